"""The OpenAI gateway as a child process next to a tritonserver."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Self
from urllib.parse import urlsplit

from paged_backend.launch.ports import listen, reachable
from paged_backend.launch.server_process import LaunchError
from paged_backend.launch.tied_process import tied_command
from paged_backend.values.nodes import without_key

_DRAIN_TIMEOUT_S = 20.0
_CLOSE_TIMEOUT_S = 20.0  # after the drain


class GatewayProcess:
    """A gateway on ``listener``, a bound socket that it owns; it ends when this process ends."""

    def __init__(
        self,
        listener: socket.socket,
        grpc_url: str,
        drain_timeout_s: float = _DRAIN_TIMEOUT_S,
        metrics_url: str | None = None,
        flags: Sequence[str] = (),
    ) -> None:
        """Start the gateway; ``flags`` are further ones of ``paged-backend gateway``."""
        self._stop_timeout_s = drain_timeout_s + _CLOSE_TIMEOUT_S
        listen(listener)
        self.address = reachable(*listener.getsockname())
        # -P: nothing is imported from the working directory, which others may be able to write.
        command = [sys.executable, "-P", "-m", "paged_backend.cli", "gateway"]
        command += ["--triton", grpc_url, "--fd", str(listener.fileno())]
        if metrics_url is not None:
            command += ["--triton-metrics", urlsplit(metrics_url).netloc]
        command += ["--drain-timeout", str(drain_timeout_s), *flags]
        self._process = subprocess.Popen(
            tied_command(command),
            pass_fds=(listener.fileno(),),
            stdin=subprocess.DEVNULL,
            process_group=0,
            env=without_key(os.environ),
        )
        listener.close()

    def check(self) -> None:
        """Raise LaunchError if the gateway has ended by itself."""
        status = self._process.poll()
        if status is not None:
            raise LaunchError(f"the gateway ended (exit status {status})")

    def stop(self) -> None:
        """Let open requests finish, then end the gateway."""
        self._process.terminate()
        try:
            self._process.wait(self._stop_timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
