"""Runs a tritonserver as a child process: start, wait, stop, clean up."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from paged_backend.launch.command import (
    EXIT_TIMEOUT_S,
    empty_folder,
    server_command,
    server_environment,
)
from paged_backend.launch.http_get import http_get
from paged_backend.launch.ports import Endpoints, ReservedEndpoints
from paged_backend.launch.repository import model_names
from paged_backend.launch.server_files import find_server_files
from paged_backend.launch.server_log import ServerLog
from paged_backend.launch.shutdown import wait_for_end
from paged_backend.launch.stderr_relay import StderrRelay
from paged_backend.launch.storage import shortage, temporary_folder, writing
from paged_backend.launch.tied_process import tied_command
from paged_backend.values.errors import PagedError
from paged_backend.values.server_memory import REGION_PREFIX, regions_with, remove_regions

_STDERR = 2
_POLL_S = 0.1
_PROBE_TIMEOUT_S = 5.0
_METRICS_TIMEOUT_S = 3.0  # after the models are ready
STOP_TIMEOUT_S = EXIT_TIMEOUT_S + 10.0
_CHILDREN_GRACE_S = 5.0


class LaunchError(PagedError, RuntimeError):
    """The server did not start, or ended by itself; the message has the known cause."""


class RunningServer:
    """A tritonserver that was started; ``endpoints`` are its addresses."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        endpoints: Endpoints,
        models: list[str],
        relay: StderrRelay,
        log: ServerLog,
    ) -> None:
        self.endpoints = endpoints
        self.pid = process.pid
        self._process = process
        self._models = models
        self._relay = relay
        self._log = log
        # Not an Event: its lock could be held by the thread that a signal handler interrupts.
        self._stopping = False
        self._ready = False

    @property
    def http_url(self) -> str:
        """Base URL of the HTTP endpoints."""
        return self.endpoints.http_url

    @property
    def grpc_url(self) -> str:
        """``host:port`` of the gRPC endpoint."""
        return self.endpoints.grpc_url

    @property
    def metrics_url(self) -> str:
        """URL of the Prometheus metrics."""
        return self.endpoints.metrics_url

    def wait_until_ready(self, timeout_s: float | None = None) -> bool:
        """Block until every model is ready and the metrics can be read.

        A server may have its metrics turned off, so they are waited for only for a short time.
        Returns False if ``request_stop`` was called before.

        Raises LaunchError if the server ends, or is not ready in ``timeout_s`` seconds.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._stopping:
            if self._process.poll() is not None:
                raise self._failure("ended before it was ready")
            if all(map(self._is_ready, self._models)):
                self._wait_for_metrics()
                self._ready = True
                self._relay.release()
                return True
            if deadline is not None and time.monotonic() > deadline:
                raise self._failure(f"was not ready in {timeout_s:g} s")
            time.sleep(_POLL_S)
        return False

    def wait(self, check: Callable[[], None] | None = None) -> None:
        """Block until ``request_stop``; raises LaunchError if the server ends by itself.

        ``check`` is called at intervals; it raises if another process than the server has ended.
        """
        while not self._stopping:
            if self._process.poll() is not None:
                raise self._failure("ended")
            if check is not None:
                check()
            time.sleep(_POLL_S)

    def request_stop(self) -> None:
        """End ``wait`` and ``wait_until_ready``; may be called in a signal handler."""
        self._stopping = True

    def stop(self) -> int:
        """Let open requests finish, then end the server and its children; returns the exit status.

        They are killed after ``STOP_TIMEOUT_S``, and if the server waits though no request is open.
        """
        if not self._ready:
            self._relay.mute()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        if not wait_for_end(self._process, self.metrics_url, STOP_TIMEOUT_S):
            self.kill()
        if not self._relay.wait(_CHILDREN_GRACE_S):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        return self._process.wait()

    def kill(self) -> None:
        """End the server at once; its children notice this, clean up and end by themselves."""
        if self._process.returncode is None:
            self._process.kill()

    def _wait_for_metrics(self) -> None:
        """Wait for the port of the metrics, which the server opens last."""
        deadline = time.monotonic() + _METRICS_TIMEOUT_S
        while not (self._stopping or _answers(self.metrics_url) or time.monotonic() > deadline):
            time.sleep(_POLL_S)

    def _is_ready(self, model: str) -> bool:
        return _answers(f"{self.http_url}/v2/models/{model}/ready")

    def _failure(self, what: str) -> LaunchError:
        self._relay.wait(1.0)
        if self._relay.errors:
            return LaunchError(self._relay.errors[-1])
        status = self._process.poll()
        code = "" if status is None else f" (exit status {status})"
        causes = "" if self._ready else self._causes()
        return LaunchError(f"tritonserver {what}{code}{causes}{self._log.mention()}")

    def _causes(self) -> str:
        """Return possible causes of a failed start, as a part of a message."""
        causes = [cause for cause in (self._log.last_error(), shortage()) if cause is not None]
        return f": {'; '.join(causes)}" if causes else ""


def _answers(url: str) -> bool:
    return http_get(url, _PROBE_TIMEOUT_S) is not None


@contextmanager
def launch_server(
    repository: Path,
    *,
    host: str = "127.0.0.1",
    http_port: int = 0,
    grpc_port: int = 0,
    metrics_port: int = 0,
    verbose: bool = False,
    environment: Mapping[str, str] | None = None,
) -> Iterator[RunningServer]:
    """Start tritonserver on ``repository``, and stop it at the end; port 0 is any free port.

    Yields at once, before the server is ready. ``environment`` is added to this process's. The
    server's log goes to stderr if ``verbose``, and otherwise to a file that is kept only if an
    error message names it. Raises ConfigError if the server cannot be started.
    """
    models = model_names(repository)
    with (
        temporary_folder() as run_folder,
        ServerLog(to_file=not verbose) as log,
        ReservedEndpoints(
            host, http_port=http_port, grpc_port=grpc_port, metrics_port=metrics_port
        ) as reserved,
    ):
        with writing(run_folder):
            files = find_server_files(run_folder)
            working_directory = empty_folder(run_folder)
        region_prefix = f"{REGION_PREFIX}{secrets.token_hex(8)}-"
        argv, variables = server_command(files, repository, reserved.endpoints, log.path)
        argv.append(f"--backend-config=python,shm-region-prefix-name={region_prefix}")
        variables |= environment or {}
        process, relay = _start(argv, variables, working_directory, log.path)
        server = RunningServer(process, reserved.endpoints, models, relay, log)
        try:
            yield server
        finally:
            server.stop()
            remove_regions(regions_with(region_prefix))  # regions of a server that was killed


@contextmanager
def start_server(
    repository: Path,
    *,
    ready_timeout_s: float = 120.0,
    environment: Mapping[str, str] | None = None,
) -> Iterator[RunningServer]:
    """Start a server on free loopback ports and wait until it is ready, for tests and benchmarks.

    Raises LaunchError if it is not ready within ``ready_timeout_s`` seconds.
    """
    with launch_server(repository, environment=environment) as server:
        server.wait_until_ready(ready_timeout_s)
        yield server


def _start(
    argv: list[str], variables: dict[str, str], folder: Path, log_file: Path | None
) -> tuple[subprocess.Popen[bytes], StderrRelay]:
    """Start the server in a new process group, so that Ctrl-C reaches this process only."""
    read_end, write_end = os.pipe()
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, write_end)
        stdout = None if log_file is None else stack.enter_context(log_file.open("ab"))
        process = subprocess.Popen(
            tied_command(argv) if _on_main_thread() else argv,
            cwd=folder,
            env=server_environment(_terminal_variables() | variables),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=write_end,
            process_group=0,
        )
    return process, StderrRelay(read_end, _STDERR)


def _on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _terminal_variables() -> dict[str, str]:
    """Return variables about our stderr for progress bars in the server; its own is a pipe."""
    if not os.isatty(_STDERR):
        return {"TQDM_DISABLE": "1"}
    return {"COLUMNS": str(shutil.get_terminal_size().columns)}
