"""The threads that run compiled kernels: every piece of work is done, by one thread."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Semaphore
from typing import Any

import numba
import numpy as np
import pytest

from paged_backend.platforms.cpu import threads as cpu_threads
from paged_backend.platforms.cpu.threads import (
    Crew,
    ParallelKernel,
    claim,
    device_function,
    device_variant,
    longs,
)

PIECES = 1000


def _count_pieces(arguments: Any) -> None:
    _, address, pieces = numba.carray(arguments, 3)
    counts = longs(address, (pieces,))
    piece = claim(arguments)
    while piece < pieces:
        counts[piece] += 1
        piece = claim(arguments)


@pytest.fixture(scope="module")
def count_pieces() -> ParallelKernel:
    return ParallelKernel(_count_pieces)


@pytest.mark.parametrize("helpers", [0, 1, 5])
def test_every_piece_is_done_once(
    helpers: int, count_pieces: ParallelKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_threads, "_crew", Crew(helpers))
    counts = np.zeros(PIECES, np.int64)
    for _ in range(300):
        count_pieces(counts.ctypes.data, PIECES)
    assert (counts == 300).all()


def test_callers_in_several_threads_take_turns(
    count_pieces: ParallelKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_threads, "_crew", Crew(2))

    def run(_: int) -> bool:
        counts = np.zeros(PIECES, np.int64)
        for _ in range(50):
            count_pieces(counts.ctypes.data, PIECES)
        return bool((counts == 50).all())

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(run, range(8)))


def test_a_closure_needs_a_separate_name() -> None:
    """Code of equal names, loaded from the disk, would be taken for equal code."""
    factor = 2

    def scaled(x: int) -> int:
        return factor * x

    with pytest.raises(TypeError, match="scaled needs device_variant"):
        device_function(scaled)
    compiled = device_variant("by_two")(scaled)
    assert compiled.py_func.__qualname__.endswith("scaled.by_two")  # type: ignore[attr-defined]


ONE_KERNEL = """
import sys
from paged_backend.platforms.cpu.threads import ParallelKernel, claim

def kernel(arguments):
    while claim(arguments) < 8:
        pass

print("ready", flush=True)
sys.stdin.readline()
print(ParallelKernel(kernel)._compiled.cache_hits)
"""


def test_processes_that_start_together_compile_a_kernel_once(tmp_path: Path) -> None:
    (tmp_path / "one_kernel.py").write_text(ONE_KERNEL)
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-u", str(tmp_path / "one_kernel.py")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    processes = [subprocess.Popen(command, env=environment, text=True, **pipes) for _ in range(3)]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    hits = [process.communicate(timeout=120)[0] for process in processes]
    assert sorted(hits) == ["0\n", "1\n", "1\n"]


def test_kernels_are_compiled_again_after_an_edit_in_any_module(tmp_path: Path) -> None:
    compiled = tmp_path / "__pycache__"
    compiled.mkdir()
    ages = {tmp_path / "tiles.py": 30, compiled / "old.nbi": 40, compiled / "new.nbi": 20}
    for file, age in ages.items():
        file.touch()
        os.utime(file, (1_000_000 - age,) * 2)
    cpu_threads._remove_outdated_code(tmp_path)
    assert [file.name for file in compiled.iterdir()] == ["new.nbi"]


def test_a_helper_that_is_about_to_sleep_notices_the_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has found no job for a while, and the caller has just begun to run some."""
    calls: SimpleQueue[object] = SimpleQueue()
    returns = Semaphore(0)

    def help_once(shared: object) -> None:
        calls.put(shared)
        returns.acquire()

    monkeypatch.setattr(cpu_threads, "_help", help_once)
    crew = Crew(1)
    calls.get(timeout=10)
    with crew._busy:  # the caller leads
        crew._helpers[0].wake()
        returns.release()
        calls.get(timeout=10)
    returns.release()
    with pytest.raises(Empty):  # now it sleeps
        calls.get(timeout=0.2)
    with crew._busy:
        crew._helpers[0].wake()
        calls.get(timeout=10)
