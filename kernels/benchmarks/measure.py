"""Timing of kernels, and the ceilings that their times are compared with.

On a GPU the launches are captured in a CUDA graph, which excludes Python's overhead, and the graph
is replayed between two events. Each call of a replay has its own memory and the cache is emptied
before each replay, so that no timed call reads data that an earlier call left in the cache. Under
Triton's interpreter each call runs once, which only checks that the benchmarks work.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import triton
from paged_kernels.device import INTERPRETED
from torch import Tensor

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Call = Callable[[], object]
Config = TypeVar("Config", bound="DataclassInstance")

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
RUNS = 51  # number of timed replays; the median counts
_WARM_UPS = 5  # number of untimed replays before them
_REPLAY_MICROSECONDS = 500  # microseconds of work per replay, so that its start-up is negligible
_FEWEST_CALLS, _MOST_CALLS = 4, 64  # per replay
_CACHE_BYTES = 512 << 20  # bytes read to empty the cache: many times the largest cache
_COPY_BYTES = 2 << 30  # bytes read, and as many written
_MATMUL_SIZE = 8192
_VOCAB_SIZE = 128256  # Llama-3's


class Clock(Protocol):
    """Measures the time of calls."""

    def microseconds(self, calls: Sequence[Call], *, captured: bool = True) -> float:
        """Return the median time of one call, including launch overhead if not `captured`."""
        ...


class GraphClock:
    """Times replays of the calls' launches on the current CUDA device."""

    def __init__(self) -> None:
        self._cache = torch.zeros(_CACHE_BYTES // 4, device="cuda")

    def microseconds(self, calls: Sequence[Call], *, captured: bool = True) -> float:
        replay = _capture(calls) if captured else lambda: _make(calls)
        for _ in range(_WARM_UPS):
            replay()
        spans = []
        for _ in range(RUNS):
            start, end = _event(), _event()
            self._cache.amax()  # only reads: written data would be flushed in the timed span
            start.record()
            replay()
            end.record()
            spans.append((start, end))
        torch.cuda.synchronize()
        milliseconds = statistics.median(start.elapsed_time(end) for start, end in spans)
        return 1000 * float(milliseconds) / len(calls)


class SingleClock:
    """Times a single run of each call, for interpreted kernels."""

    def microseconds(self, calls: Sequence[Call], *, captured: bool = True) -> float:
        start = time.perf_counter()
        _make(calls)
        return 1e6 * (time.perf_counter() - start) / len(calls)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # untyped in its library


def _make(calls: Sequence[Call]) -> None:
    for call in calls:
        call()


def _capture(calls: Sequence[Call]) -> Call:
    _make(calls)  # compile and initialize first: that is impossible while capturing
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    collects = gc.isenabled()
    gc.collect()
    gc.disable()  # the finalizer of an old graph would invalidate a capture
    try:
        with torch.cuda.graph(graph):
            _make(calls)
    finally:
        torch.cuda.set_stream(stream)  # torch leaves its capture stream set when a capture fails
        if collects:
            gc.enable()
    return graph.replay


@dataclass(frozen=True, slots=True)
class Work:
    """Minimum work of a call: bytes of its memory-bound part, flops of its compute-bound part."""

    bytes: int = 0  # to and from memory
    flops: int = 0


@dataclass(frozen=True, slots=True)
class Target:
    """A required bound on one of a row's figures, and a better value to aim at."""

    figure: str  # "ratio", "tflops" or "microseconds"
    bound: float
    aim: float

    def __str__(self) -> str:
        sign = "<=" if self.figure == "microseconds" else ">="
        return f"{self.figure} {sign} {self.bound:.3g}, aim {self.aim:.3g}"

    def met(self, row: Row) -> bool:
        """Return whether the row meets the bound."""
        if self.figure == "microseconds":
            return row.microseconds <= self.bound
        return bool(getattr(row, self.figure) >= self.bound)


@dataclass(frozen=True, slots=True)
class Row:
    """A measured case."""

    name: str
    shape: str
    dtype: str
    microseconds: float  # per call
    bytes: int
    flops: int
    ceiling: str  # what the time is compared with
    ceiling_microseconds: float  # time of a call at the ceiling
    target: str | None = None
    met: bool | None = None

    @property
    def ratio(self) -> float:
        """The speed as a fraction of the ceiling's speed."""
        return self.ceiling_microseconds / self.microseconds

    @property
    def tflops(self) -> float:
        return self.flops / self.microseconds / 1e6

    def line(self) -> str:
        """Return the row as text for printing."""
        work = []
        if self.bytes:
            speed = self.bytes / self.microseconds / 1e6
            work.append(f"{self.bytes / 1e6:.4g} MB at {speed:.3f} TB/s")
        if self.flops:
            work.append(f"{self.flops / 1e9:.4g} GFLOP at {self.tflops:.4g} TFLOP/s")
        line = (
            f"{self.name:<28} {self.shape:<24} {self.dtype:<9} {self.microseconds:10.2f} us  "
            f"{' + '.join(work)}, {self.ratio:.3f} of {self.ceiling}"
        )
        return line if self.target is None else f"{line}  {verdict(self.met)}: {self.target}"

    def as_json(self) -> dict[str, Any]:
        """Return the row for a file, without bytes or flops that are 0."""
        fields = asdict(self) | {"ratio": self.ratio}
        for kind in ("bytes", "flops"):
            if not fields[kind]:
                del fields[kind]
        return fields


class Bench:
    """One benchmark run: a clock, the ceilings measured with it, and the rows so far."""

    def __init__(self, *, quick: bool, keep: Callable[[Bench], None] | None = None) -> None:
        """Measure the ceilings.

        Args:
            quick: use tiny shapes, to check that everything runs.
            keep: called with this object after each row.
        """
        self.quick = quick
        self._keep = keep
        self.device = DEVICE
        self.clock: Clock = SingleClock() if INTERPRETED else GraphClock()
        self.rows: list[Row] = []
        self.compiled: list[str] = []  # kernels compiled since the warm-up
        triton.knobs.runtime.jit_post_compile_hook = self._note_compilation
        self._bytes_per_us, self._flops_per_us = 1.0, 1.0
        self._bytes_per_us = self._copy_speed()
        self._flops_per_us = self._matmul_speed()

    def warm_up(self, *calls: Call) -> None:
        """Compile all kernels that the cases need. Any later compilation counts as a failure."""
        _make(calls)
        self.compiled.clear()

    def sizes(self, *sizes: int) -> tuple[int, ...]:
        """Return these sizes, or tiny ones in a quick run."""
        return (1, 3) if self.quick else sizes

    @property
    def vocab_size(self) -> int:
        """The number of logits of a row."""
        return 1000 if self.quick else _VOCAB_SIZE

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return normally distributed numbers."""
        return torch.randn(shape, dtype=dtype, device=self.device)

    def logits(self, rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return logits of a whole vocabulary, with some likely tokens."""
        return 3 * self.random(rows, self.vocab_size, dtype=dtype)

    def time(
        self,
        name: str,
        shape: str,
        work: Work,
        make: Callable[[], Call],
        *,
        dtype: torch.dtype = torch.bfloat16,
        ceiling: tuple[str, float] | None = None,
        target: Target | None = None,
        captured: bool = True,
    ) -> Row:
        """Measure and report a case.

        Args:
            name: what is measured.
            shape: label of the case.
            work: work of one call.
            make: returns a call on memory that no other call accesses.
            dtype: label only.
            ceiling: a name, and the microseconds that a call should take; by default the time that
                the copy and the matrix product of this run would take for the work.
            target: bound that the row should meet.
            captured: whether to exclude Python's launch overhead.
        """
        limit = ceiling or self.ceiling(work)
        calls = [make() for _ in range(self.num_calls(limit[1]))]
        microseconds = self.clock.microseconds(calls, captured=captured)
        kind = str(dtype).removeprefix("torch.")
        row = Row(name, shape, kind, microseconds, work.bytes, work.flops, *limit)
        return self.report(row, target)

    def report(self, row: Row, target: Target | None = None) -> Row:
        """Store a row and print it."""
        if target is not None:
            row = replace(row, target=str(target), met=target.met(row))
        self.rows.append(row)
        print(row.line(), flush=True)
        if self._keep is not None:
            self._keep(self)
        return row

    def peer(self, name: str, call: Callable[[], object]) -> None:
        """Run a measurement that may fail on this machine; a failure is only printed."""
        try:
            call()
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            print(f"{name:<28} did not run: {type(error).__name__}: {reason}", flush=True)

    def as_json(self) -> list[dict[str, Any]]:
        """Return all rows, and the number of compilations after the warm-up."""
        count = len(self.compiled)
        compilations = {
            "name": "compilations after warm-up",
            "count": count,
            "target": "0",
            "met": not count,
        }
        return [*(row.as_json() for row in self.rows), compilations]

    def num_calls(self, microseconds: float) -> int:
        """Return the number of calls per replay if each takes `microseconds`."""
        if self.quick:
            return 1
        return min(max(round(_REPLAY_MICROSECONDS / microseconds), _FEWEST_CALLS), _MOST_CALLS)

    def ceiling(self, work: Work) -> tuple[str, float]:
        """Return the name of the work's limits, and the microseconds that it takes at them."""
        names = [name for name, part in (("copy", work.bytes), ("matmul", work.flops)) if part]
        allowed = work.bytes / self._bytes_per_us + work.flops / self._flops_per_us
        return "+".join(names), allowed

    def _copy_speed(self) -> float:
        size = _COPY_BYTES >> 16 if self.quick else _COPY_BYTES
        source, target = torch.empty(2, size // 4, dtype=torch.int32, device=self.device).random_()
        # A kernel that reads and writes: a graph captures `copy_` as a memcpy node, which an H200
        # runs 1.55 times slower than such a kernel.
        copy = self.clock.microseconds([lambda: torch.add(source, 1, out=target)])
        work = Work(bytes=2 * size)
        self.report(_ceiling_row("copy", f"{size} B", "int32", copy, work))
        return work.bytes / copy

    def _matmul_speed(self) -> float:
        size = _MATMUL_SIZE >> 7 if self.quick else _MATMUL_SIZE
        a, b = self.random(size, size), self.random(size, size)
        out = torch.empty_like(a)
        product = self.clock.microseconds([lambda: torch.mm(a, b, out=out)])
        work = Work(flops=2 * size**3)
        self.report(_ceiling_row("matmul", f"{size}^3", "bfloat16", product, work))
        return work.flops / product

    def _note_compilation(self, *, fn: Any, **_: Any) -> None:
        if fn.module.startswith("paged_kernels"):  # not kernels of torch's own compiler
            self.compiled.append(fn.name)


def _ceiling_row(name: str, shape: str, dtype: str, microseconds: float, work: Work) -> Row:
    return Row(name, shape, dtype, microseconds, work.bytes, work.flops, "itself", microseconds)


def verdict(met: bool | None) -> str:
    """Return the word for a target that was met, or not."""
    return "PASS" if met else "MISS"


def descend(
    config: Config, choices: Mapping[str, Sequence[int]], cost: Callable[[Config], float]
) -> tuple[Config, float]:
    """Change one field at a time until no change helps; return the best configuration and its cost.

    Args:
        config: dataclass instance where the search begins.
        choices: values to try, by field.
        cost: returns the cost of a configuration; infinite if it cannot run.
    """
    known: dict[Config, float] = {config: cost(config)}
    best: Config | None = None
    while best != config:
        best = config
        for field, values in choices.items():
            candidates = [config, *(replace(config, **{field: value}) for value in values)]
            for candidate in candidates:
                if candidate not in known:
                    known[candidate] = cost(candidate)
            config = min(candidates, key=known.__getitem__)
    return config, known[config]
