"""`paged-backend serve`: one model on a tritonserver in the foreground."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Self

from paged_backend.launch.command import GATEWAY_VARIABLES, empty_folder, server_command
from paged_backend.launch.gateway_process import GatewayProcess
from paged_backend.launch.pipeline import PipelineOptions
from paged_backend.launch.ports import Endpoints, bind
from paged_backend.launch.repository import model_names, write_model_repository, write_pipeline
from paged_backend.launch.server_files import find_server_files
from paged_backend.launch.server_process import RunningServer, launch_server
from paged_backend.launch.storage import temporary_folder, writing
from paged_backend.values import engine_args

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def serve(
    engine_options: Mapping[str, object],
    *,
    name: str,
    instances: int,
    pipeline: PipelineOptions | None,
    repository: Path | None,
    host: str,
    http_port: int,
    grpc_port: int,
    metrics_port: int,
    openai_port: int | None,
    verbose: bool,
    note: str | None = None,
    gateway_flags: Sequence[str] = (),
) -> None:
    """Serve one model until SIGINT, SIGTERM or SIGHUP; a second signal does not wait for requests.

    With ``pipeline`` the models around it are served, too; with ``repository``, the models of this
    model repository, and no other. With ``openai_port`` an OpenAI gateway listens on that port,
    started with ``gateway_flags``. Prints the addresses on one line to stdout once the model is
    ready, and ``note`` to stderr.
    Raises ConfigError or LaunchError if it cannot continue. Must run on the main thread.
    """
    with ExitStack() as stack:
        signals = stack.enter_context(_StopSignals())
        listener = None
        if openai_port is not None:  # before the model loads, which can take long
            listener = stack.enter_context(bind(host, openai_port, "openai-port"))
        if repository is None:
            repository = stack.enter_context(temporary_folder())
            _write(repository, name, engine_options, instances, pipeline)
        else:
            name = ", ".join(model_names(repository))
        server = stack.enter_context(
            launch_server(
                repository,
                host=host,
                http_port=http_port,
                grpc_port=grpc_port,
                metrics_port=metrics_port,
                verbose=verbose,
            )
        )
        signals.attach(server)
        if not server.wait_until_ready():
            return
        verb = "are" if "," in name else "is"
        where = (
            f"{name} {verb} ready: HTTP {server.http_url}, gRPC {server.grpc_url}, "
            f"metrics {server.metrics_url}"
        )
        check = None
        if listener is not None:
            drain_timeout_s = engine_args.from_mapping(engine_options).config.drain_timeout_s
            gateway = GatewayProcess(
                listener, server.grpc_url, drain_timeout_s, server.metrics_url, gateway_flags
            )
            stack.enter_context(gateway)
            where += f", OpenAI http://{gateway.address}/v1"
            check = gateway.check
        print(where, flush=True)
        if note is not None:
            print(f"paged-backend: {note}", file=sys.stderr, flush=True)
        server.wait(check)


def command_by_hand(
    folder: Path,
    engine_options: Mapping[str, object],
    *,
    name: str,
    instances: int,
    pipeline: PipelineOptions | None,
    endpoints: Endpoints,
) -> str:
    """Write all files of a server to ``folder``; returns the shell command that starts it."""
    repository = folder / "models"
    _write(repository, name, engine_options, instances, pipeline)
    with writing(folder):
        files = find_server_files(folder)
        settings = ["-C", str(empty_folder(folder))]
    argv, variables = server_command(files, repository, endpoints)
    settings += [f"--unset={variable}" for variable in GATEWAY_VARIABLES]
    settings += [f"{variable}={value}" for variable, value in variables.items()]
    return shlex.join(["env", *settings, *argv])


def _write(
    repository: Path,
    name: str,
    options: Mapping[str, object],
    instances: int,
    pipeline: PipelineOptions | None,
) -> None:
    if pipeline is None:
        write_model_repository(repository, name, options, instances)
    else:
        write_pipeline(repository, name, options, instances, options=pipeline)


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
