"""`paged-backend serve`: one model on a tritonserver in the foreground."""

from __future__ import annotations

import shlex
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Self

from paged_backend.launch.command import server_command
from paged_backend.launch.ports import Endpoints
from paged_backend.launch.repository import write_model_repository
from paged_backend.launch.server_files import find_server_files
from paged_backend.launch.server_process import RunningServer, launch_server

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def serve(
    engine_options: Mapping[str, object],
    *,
    name: str,
    instances: int,
    host: str,
    http_port: int,
    grpc_port: int,
    metrics_port: int,
    verbose: bool,
) -> None:
    """Serve one model until SIGINT, SIGTERM or SIGHUP; a second signal does not wait for requests.

    Says where it listens, on one line on stdout, once the model is ready. Raises ConfigError or
    LaunchError where it cannot go on. Must run on the main thread.
    """
    with _StopSignals() as signals, tempfile.TemporaryDirectory(prefix="paged-backend-") as folder:
        repository = Path(folder)
        write_model_repository(repository, name, engine_options, instances)
        with launch_server(
            repository,
            host=host,
            http_port=http_port,
            grpc_port=grpc_port,
            metrics_port=metrics_port,
            verbose=verbose,
        ) as server:
            signals.attach(server)
            if server.wait_until_ready():
                print(
                    f"{name} is ready: HTTP {server.http_url}, gRPC {server.grpc_url}, "
                    f"metrics {server.metrics_url}",
                    flush=True,
                )
            server.wait()


def command_by_hand(
    folder: Path,
    engine_options: Mapping[str, object],
    *,
    name: str,
    instances: int,
    endpoints: Endpoints,
) -> str:
    """Write all that the server needs into ``folder``; the shell line that then does the same."""
    repository = folder / "models"
    write_model_repository(repository, name, engine_options, instances)
    argv, variables = server_command(find_server_files(folder), repository, endpoints)
    settings = [f"{variable}={value}" for variable, value in variables.items()]
    return shlex.join(["env", *settings, *argv])


class _StopSignals:
    """Turns the first stop signal into ``request_stop`` and every further one into ``kill``."""

    def __init__(self) -> None:
        self._asked = False
        self._server: RunningServer | None = None

    def attach(self, server: RunningServer) -> None:
        self._server = server
        if self._asked:
            server.request_stop()

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._take) for number in _STOP_SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self._server is not None:
            if self._asked:
                self._server.kill()
            self._server.request_stop()
        self._asked = True
