"""The threads that run compiled kernels: every piece of work is done, by one thread."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
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
MAX_POLLS = 20_000_000  # some seconds


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
    processes = [subprocess.Popen(command, env=environment, text=True, **pipes) for _ in range(2)]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    hits = [process.communicate(timeout=120)[0] for process in processes]
    assert sorted(hits) == ["0\n", "1\n"]


def test_kernels_are_compiled_again_after_an_edit_in_any_module(tmp_path: Path) -> None:
    compiled = tmp_path / "__pycache__"
    compiled.mkdir()
    ages = {tmp_path / "tiles.py": 30, compiled / "old.nbi": 40, compiled / "new.nbi": 20}
    for file, age in ages.items():
        file.touch()
        os.utime(file, (1_000_000 - age,) * 2)
    cpu_threads._remove_outdated_code(tmp_path)
    assert [file.name for file in compiled.iterdir()] == ["new.nbi"]


def _meet(arguments: Any) -> None:
    """Take both pieces, each on a thread that waits until the other one has begun."""
    number = claim(arguments)
    while number < 2:
        cpu_threads._store(arguments, 1 + number, 1)
        polls = 0
        while cpu_threads._load(arguments, 2 - number) == 0 and polls < MAX_POLLS:
            polls += 1
            cpu_threads._sched_yield()
        if polls == MAX_POLLS:
            longs(arguments[3], (1,))[0] = 1
        number = claim(arguments)


@pytest.fixture(scope="module")
def meet() -> ParallelKernel:
    return ParallelKernel(_meet)


def two_threads_meet(meet: ParallelKernel) -> bool:
    """Return True if a helper has taken one of the two pieces of a kernel."""
    failed = np.zeros(1, np.int64)
    meet(0, 0, failed.ctypes.data)
    return not failed.any()


def sleeps(crew: Crew) -> bool:
    return bool(crew._words[cpu_threads._HELPERS + cpu_threads._ASLEEP])


def wait_until_it_sleeps(crew: Crew) -> None:
    deadline = time.monotonic() + 10
    while not sleeps(crew):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_helper_sleeps_and_is_woken_by_a_kernel(
    meet: ParallelKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    crew = Crew(1)
    monkeypatch.setattr(cpu_threads, "_crew", crew)
    for _ in range(3):
        wait_until_it_sleeps(crew)
        assert two_threads_meet(meet)


def test_a_helper_can_be_woken_before_the_first_kernel(
    meet: ParallelKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    crew = Crew(1)
    monkeypatch.setattr(cpu_threads, "_crew", crew)
    wait_until_it_sleeps(crew)
    cpu_threads.wake_helpers()
    assert not sleeps(crew)
    assert two_threads_meet(meet)
    wait_until_it_sleeps(crew)


def test_a_helper_that_is_about_to_sleep_notices_the_caller(
    meet: ParallelKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pauses end around the moment at which a helper has found no job for long enough."""
    monkeypatch.setattr(cpu_threads, "_crew", Crew(1))
    rng = np.random.default_rng(0)
    for pause_s in rng.uniform(0, 0.003, 500):
        end_s = time.perf_counter() + pause_s
        while time.perf_counter() < end_s:
            pass
        assert two_threads_meet(meet)
