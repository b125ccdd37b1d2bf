"""The routes ``/inference/v1/generate`` and ``/inference/v1/abort_requests``."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request, Response

from paged_client.gateway.auth import tenant_of
from paged_client.gateway.backend_pool import BackendRequest
from paged_client.gateway.bodies import body_of
from paged_client.gateway.dependencies import Servers, engine_params
from paged_client.gateway.inference_api.format import InferenceFormat
from paged_client.gateway.inference_api.schema import AbortRequest, InferenceRequest
from paged_client.gateway.responses import GatewayResponse, respond
from paged_client.gateway.routing_headers import routing_hints

InferenceBody = Annotated[InferenceRequest, Depends(body_of(InferenceRequest))]
AbortBody = Annotated[AbortRequest, Depends(body_of(AbortRequest))]


async def generate(request: Request, body: InferenceBody, servers: Servers) -> Response:
    """Create an answer to token ids."""
    model = await servers.resolve(body.model)
    backend_request = BackendRequest(
        model,
        body.token_ids,
        engine_params(request, body),
        whole=not body.stream,
        parsed=body.is_parsed,
        name=(tenant_of(request) or "", body.request_id),
        hints=routing_hints(request),
    )
    response_format = InferenceFormat(model.shown, body)
    response = GatewayResponse(response_format, [servers.stream(backend_request)])
    return await respond(request, response, stream=body.stream)


async def abort_requests(request: Request, body: AbortBody, servers: Servers) -> Response:
    """End requests of ``/inference/v1/generate``; ids that are not open are ignored.

    Their answers end with the tokens so far and the finish reason ``abort``.
    """
    tenant = tenant_of(request) or ""
    for request_id in body.request_ids:
        servers.abort((tenant, request_id))
    return Response()
