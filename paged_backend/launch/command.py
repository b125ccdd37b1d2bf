"""The complete command line of tritonserver, which can also be run by hand."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from paged_backend.launch.front_ends import has_nvidia_driver
from paged_backend.launch.ports import Endpoints
from paged_backend.launch.server_files import ServerFiles
from paged_backend.launch.server_version import server_is_from

EXIT_TIMEOUT_S = 30  # for requests in flight when the server stops
_CLOSED_APIS = "shared-memory,trace,logging"
# Maximum number of responses of one stream that wait for a slow reader. Without a limit they fill
# the memory. A stream at the limit delays the other streams of its model. Few answers have more
# responses.
_MAX_WAITING_RESPONSES = 2**17
# Interval of CPU metrics; a stopping server waits for the next interval.
_METRICS_INTERVAL_MS = 500
# For the gateway only; all children of tritonserver would inherit them.
GATEWAY_VARIABLES = ("PAGED_API_KEYS",)


def server_command(
    files: ServerFiles, repository: Path, endpoints: Endpoints, log_file: Path | None = None
) -> tuple[list[str], dict[str, str]]:
    """Return the arguments, and the environment variables to add to the present ones.

    The server's log goes to ``log_file``; to stderr without it.
    """
    # These APIs are restricted by a header that no client can send: a header name cannot contain a
    # colon, neither in HTTP/1 nor in gRPC. (gRPC accepts a value with a line break.) A secret value
    # would not be enough, because every user of the machine can read this command line.
    closed = f"{_CLOSED_APIS}:paged-backend:closed={secrets.token_hex(16)}"
    flags = {
        "model-repository": repository.resolve(),
        "model-control-mode": "none",
        "http-address": endpoints.address,
        "http-port": endpoints.http_port,
        "http-restricted-api": closed,
        "grpc-address": endpoints.address,
        "grpc-port": endpoints.grpc_port,
        "grpc-restricted-protocol": closed,
        "metrics-address": endpoints.address,
        "metrics-port": endpoints.metrics_port,
        "metrics-interval-ms": _METRICS_INTERVAL_MS,
        "allow-sagemaker": "false",
        "allow-vertex-ai": "false",
        "exit-timeout-secs": EXIT_TIMEOUT_S,
    }
    if files.backend_directory is not None:
        flags["backend-directory"] = files.backend_directory
    if server_is_from(2, 56):  # release 25.03
        flags["grpc-max-response-pool-size"] = _MAX_WAITING_RESPONSES
    if server_is_from(2, 69):  # release 26.05; the restriction above closes it in older ones
        flags["allow-client-shm"] = "false"
    if not has_nvidia_driver():
        # Without a driver, searching for devices only writes an error to stderr.
        flags["allow-gpu-metrics"] = "false"
    if log_file is not None:
        flags["log-file"] = log_file
    argv = [str(files.executable), *(f"--{name}={value}" for name, value in flags.items())]
    return argv, files.environment()


def server_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment with ``variables``, without the secrets of the gateway.

    A variable in ``variables`` is always set.
    """
    own = {name: value for name, value in os.environ.items() if name not in GATEWAY_VARIABLES}
    return own | dict(variables)


def empty_folder(directory: Path) -> Path:
    """Create the server's working directory: empty, because its stubs import from it first."""
    folder = directory / "empty"
    folder.mkdir(exist_ok=True)
    return folder
