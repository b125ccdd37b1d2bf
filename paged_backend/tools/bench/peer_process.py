"""Runs a peer engine in a separate process, with the Python interpreter of its environment.

The process is `peers/serve.py`, which also describes the messages. A peer that fails, hangs or
lacks a package costs one line.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from paged_backend.launch.tied_process import tied_command
from paged_backend.tools.bench.measurements import Job
from paged_backend.tools.bench.peer_options import PeerOptions
from paged_backend.values.errors import PagedError

LOAD_SECONDS = 900.0  # an engine may convert weights and compile
_CLOSE_SECONDS = 5.0
_FOLDER = Path(__file__).parent / "peers"
_STDERR_LINES, _STDERR_CHARS = 3, 400


class PeerError(PagedError, RuntimeError):
    """A peer that cannot be measured; the message has the end of its stderr."""


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """What the peer's process needs to load the model, as our engine has loaded it."""

    folder: str
    load_format: str
    device: str
    dtype: str
    threads: int
    max_model_len: int
    max_seqs: int  # requests at once
    longest: int  # tokens of the longest request, prompt and output
    kv_bytes: int  # room in the KV cache
    quantization: str | None = None  # as our engine's option; None: as the checkpoint says
    kv_cache_dtype: str = "auto"
    prefix_caching: bool = True
    max_batched_tokens: int | None = None  # limit of a step; None: the peer's default
    memory_share: float | None = None  # part of a GPU's memory, for all uses; None: the default


class PeerProcess:
    """A peer's process with the model loaded; a context manager.

    Between calls it waits for its stdin and leaves the processor to others.

    Raises:
        ConfigError: the interpreter cannot be started.
        PeerError: the peer cannot load the model.
    """

    def __init__(
        self, options: PeerOptions, settings: PeerSettings, *, load_seconds: float = LOAD_SECONDS
    ) -> None:
        python = options.interpreter()
        self._name = options.name
        self._scratch = tempfile.TemporaryDirectory(prefix="paged-peer-")
        self._stderr = open(Path(self._scratch.name) / "stderr", "w+b")
        command = [python, str(_FOLDER / "serve.py"), str(_FOLDER / options.kind.script)]
        self._process = subprocess.Popen(
            tied_command(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env=_environment(options, settings.threads),
            start_new_session=True,  # so that its own children can be ended with it
        )
        values = {name: getattr(settings, name) for name in PeerSettings.__slots__}
        try:
            loaded = self._ask({"load": values | {"scratch": self._scratch.name}}, load_seconds)
        except BaseException:
            self.close()
            raise
        self.about = cast(dict[str, str], loaded["about"])

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def run(self, jobs: Sequence[Job], at_once: int, max_seconds: float) -> float:
        """Run the jobs, `at_once` of them at a time, and return the seconds.

        Raises:
            PeerError: the peer has failed, has ended, or has no answer after `max_seconds`.
        """
        pairs = [(job.prompt, job.max_tokens) for job in jobs]
        return float(self._ask({"jobs": pairs, "at_once": at_once}, max_seconds)["seconds"])

    def decode(
        self, prompts: list[list[int]], warm_up: int, num_steps: int, max_seconds: float
    ) -> list[float]:
        """Return the seconds of steps in which all prompts decode, after `warm_up` such steps.

        Raises:
            PeerError: the peer has failed, has ended, or has no answer after `max_seconds`.
        """
        call = {"decode": prompts, "warm_up": warm_up, "steps": num_steps}
        return cast(list[float], self._ask(call, max_seconds)["steps"])

    def first_token(self, prompt: list[int], max_seconds: float) -> float:
        """Return the seconds from a request to its first token.

        Raises:
            PeerError: the peer has failed, has ended, or has no answer after `max_seconds`.
        """
        return float(self._ask({"first_token": prompt}, max_seconds)["seconds"])

    def steady(self, prompts: list[list[int]], max_seconds: float) -> tuple[float, str]:
        """Return the tokens per second while all prompts decode, and the attention's name.

        Raises:
            PeerError: the peer has failed, has ended, or has no answer after `max_seconds`.
        """
        answer = self._ask({"steady": prompts}, max_seconds)
        return float(answer["tokens_per_s"]), str(answer["attention"])

    def close(self) -> None:
        """End the process and remove its files."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        self._kill()
        self._process.wait()
        self._process.stdout.close()
        self._clean()

    def _clean(self) -> None:
        self._stderr.close()
        self._scratch.cleanup()

    def _ask(self, call: Mapping[str, Any], max_seconds: float) -> dict[str, Any]:
        """Send a call and wait for its answer; a timer ends a process that is too slow."""
        late = threading.Event()

        def give_up() -> None:
            late.set()
            self._kill()

        timer = threading.Timer(max_seconds, give_up)
        timer.start()
        try:
            line = self._exchange(json.dumps(call))
        finally:
            timer.cancel()
        if late.is_set():
            raise self._failure(f"did not answer within {max_seconds:g} s")
        if not line:
            raise self._failure(f"ended with exit status {self._process.wait()}")
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError as error:
            raise self._failure(f"is no Python that runs the peer: {line.strip()}") from error
        if "problem" in answer:
            raise self._failure(str(answer["problem"]))
        return answer

    def _exchange(self, line: str) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):  # then there is no answer either
            print(line, file=self._process.stdin, flush=True)
        return self._process.stdout.readline()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _failure(self, problem: str) -> PeerError:
        text = (Path(self._scratch.name) / "stderr").read_text(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        tail = " | ".join(lines[-_STDERR_LINES:])[-_STDERR_CHARS:]
        problem = " ".join(problem.split())
        return PeerError(f"peer {self._name}: {problem}" + (f"; stderr: {tail}" if tail else ""))


def _environment(options: PeerOptions, threads: int) -> dict[str, str]:
    values = {
        "HF_HUB_OFFLINE": "1",  # otherwise transformers tries to download kernels
        "OMP_NUM_THREADS": str(threads),
    }
    if options.name == "vllm" and options.python is not None:
        # vLLM recommends Intel's OpenMP, which its packages install where no linker looks. Its
        # threads would spin for 200 ms after their last work.
        library = Path(options.python).absolute().parent.parent / "lib" / "libiomp5.so"
        if library.exists():
            values |= {"LD_PRELOAD": str(library), "KMP_BLOCKTIME": "1"}
    return os.environ | values
