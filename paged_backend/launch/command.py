"""The command line that starts tritonserver: all of it, so that it can be typed by hand."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from paged_backend.launch.ports import Endpoints
from paged_backend.launch.server_files import ServerFiles
from paged_backend.launch.server_version import server_is_from

EXIT_TIMEOUT_S = 30  # for requests in flight when the server is told to stop
_CLOSED_APIS = "shared-memory,trace,logging"
# Responses of one stream that wait for a slow reader. Without a bound they fill the memory; once it
# is reached the reader holds up the others of its model. Hardly any answer has more than these.
_MAX_WAITING_RESPONSES = 2**17
# The server looks at the CPU so often, and at its end waits for the next look.
_METRICS_INTERVAL_MS = 500
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
# For the gateway alone: tritonserver's children would all inherit them.
GATEWAY_VARIABLES = ("PAGED_API_KEYS",)


def server_command(
    files: ServerFiles, repository: Path, endpoints: Endpoints, log_file: Path | None = None
) -> tuple[list[str], dict[str, str]]:
    """The argument vector, and the environment variables to set on top of the present ones.

    ``log_file`` takes the server's log in place of stderr.
    """
    # The APIs stay, behind a header that no client can send: a name cannot hold a colon, neither
    # in HTTP/1 nor in gRPC. (gRPC accepts a value with a line break.) A value that is only secret
    # would not do, as every user of the machine can read this command line.
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
    if not _NVIDIA_DRIVER.exists():
        # Without a driver the search for devices only writes an error to stderr.
        flags["allow-gpu-metrics"] = "false"
    if log_file is not None:
        flags["log-file"] = log_file
    argv = [str(files.executable), *(f"--{name}={value}" for name, value in flags.items())]
    return argv, files.environment()


def server_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """This process's own environment with ``variables``, but without what the server must not see.

    A variable of ``variables`` is set even then.
    """
    own = {name: value for name, value in os.environ.items() if name not in GATEWAY_VARIABLES}
    return own | dict(variables)


def empty_folder(directory: Path) -> Path:
    """A server's working directory, made in ``directory``: its stubs import from it first."""
    folder = directory / "empty"
    folder.mkdir()
    return folder
