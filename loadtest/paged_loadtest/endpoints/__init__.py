"""Endpoints: the servers under test, one class per protocol.

Begin with `endpoint`, the interface of all of them.
"""

from __future__ import annotations

from paged_loadtest.endpoints.endpoint import Endpoint
from paged_loadtest.options import TargetOptions

__all__ = ["Endpoint", "open_endpoint"]


def open_endpoint(target: TargetOptions) -> Endpoint:
    """Create the endpoint for a target; it connects on first use."""
    if target.processes > 1:
        from paged_loadtest.endpoints.processes import ManyProcessesEndpoint

        return ManyProcessesEndpoint(target, _endpoint_here)
    return _endpoint_here(target)


def _endpoint_here(target: TargetOptions) -> Endpoint:
    """Create an endpoint that sends its requests from this process."""
    if target.backend == "triton":
        from paged_loadtest.endpoints.triton_grpc import TritonGrpcEndpoint

        return TritonGrpcEndpoint(target)
    if target.backend == "triton-http":
        from paged_loadtest.endpoints.triton_http import TritonHttpEndpoint

        return TritonHttpEndpoint(target)
    from paged_loadtest.endpoints.openai import OpenAIEndpoint

    return OpenAIEndpoint(target)
