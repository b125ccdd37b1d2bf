"""What the server's container runs: tritonserver on the models of a folder, as launched here.

``docker run IMAGE [--flag=value ...]`` adds flags to tritonserver's; ``docker run IMAGE COMMAND
[ARGUMENT ...]`` runs something else. The environment may say PAGED_MODELS (/models), PAGED_HOST
(0.0.0.0), PAGED_HTTP_PORT (8000), PAGED_GRPC_PORT (8001) and PAGED_METRICS_PORT (8002).
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from paged_backend.launch.command import empty_folder, server_command, server_environment
from paged_backend.launch.ports import Endpoints
from paged_backend.launch.repository import model_names
from paged_backend.launch.server_files import find_server_files
from paged_backend.values.errors import ConfigError, PagedError


def main(arguments: list[str]) -> None:
    """Become tritonserver, or the command.

    Raises:
        PagedError: there is nothing that could be started.
    """
    if arguments and not arguments[0].startswith("-"):
        _become(arguments, dict(os.environ))
    models = Path(os.environ.get("PAGED_MODELS", "/models"))
    model_names(models)
    endpoints = Endpoints(
        os.environ.get("PAGED_HOST", "0.0.0.0"),
        _port("PAGED_HTTP_PORT", 8000),
        _port("PAGED_GRPC_PORT", 8001),
        _port("PAGED_METRICS_PORT", 8002),
    )
    folder = Path(tempfile.mkdtemp(prefix="paged-backend-"))
    command, variables = server_command(find_server_files(folder), models, endpoints)
    os.chdir(empty_folder(folder))
    _become([*command, *arguments], server_environment(variables))


def _become(command: list[str], variables: dict[str, str]) -> None:
    try:
        os.execvpe(command[0], command, variables)
    except OSError as error:
        raise ConfigError(f"cannot run {command[0]}: {error.strerror}") from error


def _port(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal() or not 0 < int(text) < 2**16:
        raise ConfigError(f"{name}: must be a port from 1 to 65535, got {text!r}")
    return int(text)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except PagedError as error:
        print(f"entrypoint: error: {error}", file=sys.stderr)
        sys.exit(2)
