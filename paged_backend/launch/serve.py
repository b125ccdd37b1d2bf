"""`paged-backend serve`: one model on a tritonserver in the foreground."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from paged_backend.launch.repository import write_model_repository
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
    with tempfile.TemporaryDirectory(prefix="paged-backend-") as folder:
        repository = Path(folder)
        write_model_repository(repository, name, engine_options, instances)
        with (
            launch_server(
                repository,
                host=host,
                http_port=http_port,
                grpc_port=grpc_port,
                metrics_port=metrics_port,
                verbose=verbose,
            ) as server,
            _stopped_by_signals(server),
        ):
            if server.wait_until_ready():
                print(
                    f"{name} is ready: HTTP {server.http_url}, gRPC {server.grpc_url}, "
                    f"metrics {server.metrics_url}",
                    flush=True,
                )
            server.wait()
            server.stop()


@contextmanager
def _stopped_by_signals(server: RunningServer) -> Iterator[None]:
    asked = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            server.kill()
        asked = True
        server.request_stop()

    previous = {number: signal.signal(number, on_signal) for number in _STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
