"""Compiles kernels, and runs them on threads.

OpenMP, which torch uses, waits for every thread of a team, and spins meanwhile. If another process
needs a core, as tritonserver does, each kernel waits until the system schedules the last thread: a
step took 25 times longer. Here the calling thread works through the pieces of a kernel itself, and
waits only for helper threads that have taken a piece. Helpers never hold the GIL, for which they
would wait whenever they wake up.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from paged_backend.values.log import LOG

_INT64 = ir.IntType(64)
_POINTER = types.CPointer(types.int64)
_NUM_PIECES, _LARGEST_PIECE = 32, 16  # pieces that threads claim, and rows of the largest
_OPTIONS = {"fastmath": True, "error_model": "numpy"}
_SIGNATURE = types.void(_POINTER)
_IDLE_POLLS = 2000  # a helper looks for the next kernel for about a millisecond
_BUSY_POLLS = 1000  # some microseconds, in which a running helper finishes its piece
# Indexes of the words that caller and helpers share, on separate cache lines. Each helper has
# words from _HELPERS on: whether it sleeps, and the semaphore (sem_t) on which it does.
_JOB, _ACTIVE, _KERNEL, _ARGUMENTS, _LEADING, _HELPERS = 0, 16, 32, 33, 48, 64
_ASLEEP, _SEMAPHORE, _HELPER_SIZE = 0, 8, 16
_HELPER_NAME = "cpu-kernel-helper"

_sched_yield = types.ExternalFunction("sched_yield", types.int32())
_sem_init = types.ExternalFunction(
    "sem_init", types.int32(types.voidptr, types.int32, types.uint32)
)
_sem_wait = types.ExternalFunction("sem_wait", types.int32(types.voidptr))
_sem_post = types.ExternalFunction("sem_post", types.int32(types.voidptr))


def device_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function that only kernels call; numba infers its types."""
    if function.__closure__ is not None:
        raise TypeError(f"{function.__qualname__} needs device_variant, as it is a closure")
    return _njit(function)


def device_variant(variant: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile a function that differs from others of its name by what it closes over.

    Kernels that are loaded from the disk share code of the same name. numba's names hold a counter
    of the process that compiled a function, which does not tell closures apart.

    Args:
        variant: becomes a part of the compiled name.
    """

    def compile_variant(function: Callable[..., Any]) -> Callable[..., Any]:
        function.__qualname__ = f"{function.__qualname__}.{variant}"
        return _njit(function)

    return compile_variant


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function as a part of its only caller.

    LLVM compiles every other device function by itself, and again in each function that calls it.
    """
    return _njit(function, inline="always")


def _njit(function: Callable[..., Any], inline: str = "never") -> Callable[..., Any]:
    compiled: Callable[..., Any] = numba.njit(
        no_cpython_wrapper=True, no_cfunc_wrapper=True, inline=inline, **_OPTIONS
    )(function)
    return compiled


def exact_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function that only kernels call, and round its results as they are written.

    Fast math may divide by multiplying with a reciprocal, and change the order of a product.
    """
    compiled: Callable[..., Any] = numba.njit(
        no_cpython_wrapper=True, no_cfunc_wrapper=True, error_model="numpy", fastmath=False
    )(function)
    return compiled


def _compile(signature: Any, function: Callable[..., None]) -> Any:
    """Compile a function that ctypes calls without the GIL; its code is cached on disk."""
    _remove_outdated_code(Path(__file__).parent)
    with _one_process_at_a_time(Path(function.__code__.co_filename)):
        compiled = numba.cfunc(signature, cache=True, **_OPTIONS)(function)
    if not compiled.cache_hits:
        _say_that_it_takes_time()
    return compiled


@functools.cache
def _remove_outdated_code(folder: Path) -> None:
    """Remove the compiled kernels of a folder that are older than one of its modules.

    numba notices edits in the module of a kernel, but not in those that it imports.
    """
    edited_s = max(file.stat().st_mtime for file in folder.glob("*.py"))
    for index in (folder / "__pycache__").glob("*.nbi"):
        # Another process may have removed the file, or the folder may be read-only.
        with contextlib.suppress(OSError):
            if index.stat().st_mtime < edited_s:
                index.unlink()


@contextlib.contextmanager
def _one_process_at_a_time(source: Path) -> Iterator[None]:
    """Hold a lock on a source file, so that processes that start together compile it once.

    The others wait, and load the code from the disk.
    """
    with source.open("rb") as file:
        with contextlib.suppress(OSError):  # not every file system has locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@functools.cache
def _say_that_it_takes_time() -> None:
    """Log once per process that kernels are compiled, which were not on disk."""
    LOG.info("compiling kernels for this processor: this start takes longer than the next")


class KernelRun(NamedTuple):
    """A run of a kernel, which can be repeated."""

    kernel: int  # address of the compiled function
    arguments: array[int]  # the counter of `claim`, then the kernel's arguments


class JobList:
    """Jobs that run one after the other, at one call from Python."""

    def __init__(self, jobs: Sequence[KernelRun]) -> None:
        self._jobs = jobs  # keeps the arguments alive
        pairs = [(job.kernel, job.arguments.buffer_info()[0]) for job in jobs]
        self._addresses = np.array(pairs, np.int64)

    def run(self) -> None:
        """Run all jobs to their end."""
        _crew.run_jobs(self._addresses.ctypes.data, len(self._jobs))


class _Recording(threading.local):
    """The list to which a thread adds the jobs that it runs; None while it does not record."""

    jobs: list[Any] | None = None


_recording = _Recording()


@contextlib.contextmanager
def recorded_jobs(jobs: list[Any]) -> Iterator[None]:
    """Add a `KernelRun` to the list for each kernel that this thread runs in the `with` block."""
    _recording.jobs = jobs
    try:
        yield
    finally:
        _recording.jobs = None


class ParallelKernel:
    """A compiled function that the calling thread and its helpers run at the same time.

    They divide the work with `claim`. All arguments are integers: floats are passed as bits, and
    arrays as addresses.
    """

    def __init__(self, function: Callable[[Any], None]) -> None:
        self._compiled = _compile(_SIGNATURE, function)
        self._address: int = self._compiled.address

    def __call__(self, *arguments: int) -> None:
        """Run the kernel to its end; it reads the arguments from index 1 on."""
        block = array("q", (0, *arguments))
        _crew.run(self._address, block.buffer_info()[0])
        if _recording.jobs is not None:
            _recording.jobs.append(KernelRun(self._address, block))


class Crew:
    """Runs kernels, one at a time, on the calling thread and helper threads.

    A helper looks for the next kernel for about a millisecond after the last one, and then sleeps.

    Args:
        helpers: the number of helper threads.
    """

    def __init__(self, helpers: int) -> None:
        self.num_helpers = helpers
        self._words = np.zeros(_HELPERS + helpers * _HELPER_SIZE, np.int64)
        self._shared = self._words.ctypes.data_as(ctypes.POINTER(ctypes.c_int64))
        self._busy = threading.Lock()
        self._jobs = 0
        for number in range(helpers):
            arguments = self._shared, number
            threading.Thread(target=_help, args=arguments, name=_HELPER_NAME, daemon=True).start()

    def wake(self) -> None:
        """Wake the helpers that sleep."""
        _wake(self._shared, self.num_helpers)

    def run(self, kernel: int, arguments: int) -> None:
        """Run a kernel to its end."""
        with self._busy:
            self._jobs += 1
            _lead(self._shared, self.num_helpers, self._jobs, kernel, arguments)

    def run_jobs(self, addresses: int, count: int) -> None:
        """Run jobs that lie at an address as pairs: the addresses of kernel and arguments."""
        with self._busy:
            _lead_all(self._shared, self.num_helpers, self._jobs, addresses, count)
            self._jobs += count


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def _load(context: Any, pointer: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(builder.gep(args[0], [args[1]]), "seq_cst", 8)

    return types.int64(pointer, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def _store(context: Any, pointer: Any, index: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[2], builder.gep(args[0], [args[1]]), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(pointer, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def _exchange(context: Any, pointer: Any, index: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("xchg", builder.gep(args[0], [args[1]]), args[2], "seq_cst")

    return types.int64(pointer, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def _address_of(context: Any, pointer: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.gep(args[0], [args[1]])
        return builder.bitcast(place, ir.IntType(8).as_pointer())

    return types.voidptr(pointer, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def _add(context: Any, pointer: Any, index: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", builder.gep(args[0], [args[1]]), args[2], "seq_cst")

    return types.int64(pointer, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def _call(context: Any, kernel: Any, arguments: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = ir.FunctionType(ir.VoidType(), [_INT64.as_pointer()]).as_pointer()
        pointer = builder.inttoptr(args[1], _INT64.as_pointer())
        builder.call(builder.inttoptr(args[0], function), [pointer])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@device_function
def _lead_job(shared: Any, job: int, kernel: int, arguments: int) -> None:
    """Offer a job to the helpers, do the rest of it, and wait for helpers that took part."""
    _store(shared, _KERNEL, kernel)
    _store(shared, _ARGUMENTS, arguments)
    _store(shared, _JOB, job)
    _call(kernel, arguments)
    _store(shared, _JOB, 0)
    polls = 0
    while _load(shared, _ACTIVE) != 0:
        polls += 1
        if polls > _BUSY_POLLS:  # the helper may be waiting for this core
            _sched_yield()


@device_function
def _wake_all(shared: Any, num_helpers: int) -> None:
    for number in range(num_helpers):
        words = _HELPERS + number * _HELPER_SIZE
        if _load(shared, words + _ASLEEP) != 0 and _exchange(shared, words + _ASLEEP, 0) != 0:
            _sem_post(_address_of(shared, words + _SEMAPHORE))


def _wake_helpers(shared: Any, num_helpers: int) -> None:
    _wake_all(shared, num_helpers)


def _lead_one_job(shared: Any, num_helpers: int, job: int, kernel: int, arguments: int) -> None:
    _store(shared, _LEADING, 1)
    _wake_all(shared, num_helpers)
    _lead_job(shared, job, kernel, arguments)
    _store(shared, _LEADING, 0)


def _lead_jobs(shared: Any, num_helpers: int, last: int, addresses: int, count: int) -> None:
    """Lead jobs with numbers that follow the last one; each begins with its first piece."""
    _store(shared, _LEADING, 1)
    _wake_all(shared, num_helpers)
    jobs = longs(addresses, (count, 2))
    for i in range(count):
        kernel, arguments = jobs[i, 0], jobs[i, 1]
        longs(arguments, 1)[0] = 0
        _lead_job(shared, last + 1 + i, kernel, arguments)
    _store(shared, _LEADING, 0)


def _help_with_jobs(shared: Any, number: int) -> None:
    """Take part in offered jobs, and sleep while none was offered for a while; never returns."""
    words = _HELPERS + number * _HELPER_SIZE
    semaphore = _address_of(shared, words + _SEMAPHORE)
    _sem_init(semaphore, np.int32(0), np.uint32(0))
    last = 0
    idle = 0
    while True:
        job = _load(shared, _JOB)
        if job == 0 or job == last:
            idle += 1
            if idle > _IDLE_POLLS:
                _sleep(shared, words + _ASLEEP, semaphore)
                idle = 0
            _sched_yield()
            continue
        idle = 0
        _add(shared, _ACTIVE, 1)
        # From here on, the caller waits for this helper. If it has just closed the job, skip it.
        last = _load(shared, _JOB)
        if last != 0:
            _call(_load(shared, _KERNEL), _load(shared, _ARGUMENTS))
        _add(shared, _ACTIVE, -1)


@device_function
def _sleep(shared: Any, asleep: int, semaphore: Any) -> None:
    """Sleep until the caller wakes this helper, unless the caller leads already."""
    _store(shared, asleep, 1)
    if _load(shared, _LEADING) != 0 and _exchange(shared, asleep, 0) != 0:
        return
    while _sem_wait(semaphore) != 0:  # a signal has interrupted it
        pass


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def _pointer(context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@device_function
def claim(arguments: Any) -> Any:
    """Return the number of the next piece of a kernel's work, counted from 0.

    Each number is given to one thread only. Numbers after the last piece mean that no work is left.

    Args:
        arguments: the kernel's arguments; the word at index 0 is the shared counter.
    """
    return _add(arguments, 0, 1)


@device_function
def claim_rows(arguments: Any, num_rows: int) -> Any:
    """Return the first row of the next piece, and the row after its last one.

    If there are many rows, a piece has several, because threads wait for each other when they
    claim. There are still enough pieces for the cores of a large CPU. After the last piece, both
    numbers are equal.

    Args:
        arguments: see `claim`.
        num_rows: number of rows of the kernel; each row takes about as much time.
    """
    piece = min(max(num_rows // _NUM_PIECES, 1), _LARGEST_PIECE)
    first = min(claim(arguments) * piece, num_rows)
    return first, min(first + piece, num_rows)


def float_bits(value: float) -> int:
    """Return the bits of a float64, for an argument of a kernel."""
    bits: int = np.float64(value).view(np.int64).item()
    return bits


@device_function
def float_of(bits: int) -> Any:
    """Return the float32 of a kernel's argument, which holds the bits of its float64."""
    return np.float32(np.int64(bits).view(np.float64))


@device_function
def array_at(address: int, shape: Any, dtype: Any) -> Any:
    """Return the array with a shape and a dtype at an address."""
    return numba.carray(_pointer(address), shape, dtype)


@device_function
def floats(address: int, shape: Any) -> Any:
    """Return the float32 array with a shape at an address."""
    return numba.carray(_pointer(address), shape, np.float32)


@device_function
def ints(address: int, shape: Any) -> Any:
    """Return the int32 array with a shape at an address."""
    return numba.carray(_pointer(address), shape, np.int32)


@device_function
def longs(address: int, shape: Any) -> Any:
    """Return the int64 array with a shape at an address."""
    return numba.carray(_pointer(address), shape, np.int64)


_lead = _compile(types.void(_POINTER, *[types.int64] * 4), _lead_one_job).ctypes
_lead_all = _compile(types.void(_POINTER, *[types.int64] * 4), _lead_jobs).ctypes
_wake = _compile(types.void(_POINTER, types.int64), _wake_helpers).ctypes
_help = _compile(types.void(_POINTER, types.int64), _help_with_jobs).ctypes
_crew = Crew(0)


def use_threads_of_torch() -> None:
    """Let kernels run on as many threads as torch has, the calling thread included."""
    global _crew
    helpers = torch.get_num_threads() - 1
    if helpers != _crew.num_helpers:
        _crew = Crew(helpers)


def wake_helpers() -> None:
    """Wake the helper threads shortly before kernels run, since waking up takes them a while."""
    _crew.wake()
