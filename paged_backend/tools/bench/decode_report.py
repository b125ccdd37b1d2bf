"""The report of `bench decode`: rows, first tokens, targets, and how they are printed and saved."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from paged_backend.tools.bench.decode_peer import FirstToken, PeerReport
from paged_backend.tools.bench.prefix import PrefixFigures
from paged_backend.values.json_file import write_json

TRACED_STEPS = 20
ROOFLINE_TARGET = 0.75
ROOFLINE_AIM = 0.9
ROOFLINE_TARGET_CONTEXT = 1024  # the target holds up to here
IDLE_TARGET = 0.03
PREFIX_TARGET = 8.0
HEADER = "context  batch    tokens/s   step ms  roofline ms of roofline"


@dataclass(frozen=True, slots=True)
class DecodeFigures:
    """Measurements of steps in which every sequence of a batch decoded a token."""

    tokens_per_s: float
    step_ms: float  # median
    kv_tokens: int  # total of all sequences, halfway through the steps
    roofline_ms: float
    of_roofline: float  # the roofline's step time divided by the mean step time


@dataclass(frozen=True, slots=True)
class BatchResult:
    """One batch: its figures, or the reason why there are none."""

    context: int  # tokens of each prompt
    batch_size: int
    figures: DecodeFigures | None = None
    problem: str | None = None

    def line(self) -> str:
        """The row of the table under `HEADER`."""
        case = f"{self.context:7} {self.batch_size:6}"
        if self.figures is None:
            return f"{case}  {self.problem}"
        f = self.figures
        verdict = ""
        if self.has_target:
            verdict = f"  >= {ROOFLINE_TARGET:.0%}: {_verdict(f.of_roofline >= ROOFLINE_TARGET)}"
            verdict += f", {ROOFLINE_AIM:.0%}: {_verdict(f.of_roofline >= ROOFLINE_AIM)}"
        return (
            f"{case} {f.tokens_per_s:11.1f} {f.step_ms:9.3f} {f.roofline_ms:12.3f} "
            f"{f.of_roofline:11.1%}{verdict}"
        )

    @property
    def has_target(self) -> bool:
        """Whether the roofline target applies to this context."""
        return self.context <= ROOFLINE_TARGET_CONTEXT


@dataclass(frozen=True, slots=True)
class IdleShare:
    """Fractions of a trace's span in which the device was idle; tracing itself increases them."""

    batch_size: int
    context: int
    between_launches: float  # the host launched the work too late
    within_graphs: float  # between the kernels of one CUDA graph; a gap of about 1 us for each


@dataclass(frozen=True, slots=True)
class DecodeTarget:
    """A figure and the limit that it should meet."""

    name: str
    value: float | None  # None: not measured here
    limit: float
    at_least: bool = False  # if False, the value must be below the limit, or 0

    @property
    def met(self) -> bool | None:
        """Whether the value meets the limit; None if it was not measured."""
        if self.value is None:
            return None
        if self.at_least:
            return self.value >= self.limit
        return self.value < self.limit or self.value == 0

    def line(self) -> str:
        """Name, value and verdict."""
        value = "not measured" if self.value is None else f"{self.value:.4g}"
        wanted = f"{'>=' if self.at_least else '<' if self.limit else '='} {self.limit:g}"
        verdict = "" if self.met is None else f": {_verdict(self.met)}"
        return f"{self.name}: {value} ({wanted}{verdict})"


@dataclass(frozen=True, slots=True)
class DecodeReport:
    """All results of one run, and the environment in which they were measured."""

    complete: bool  # False: saved in the middle of the run
    model: str
    options: dict[str, Any]
    copy_bytes_per_s: float
    matmul_flops_per_s: float
    weight_bytes_per_step: int
    kv_bytes_per_token: int
    timed_steps: int
    environment: dict[str, str]
    rows: list[BatchResult] = field(default_factory=list)
    prefix: PrefixFigures | None = None
    compiled_after_warm_up: list[str] | None = None  # names of kernels; None on a CPU
    first_tokens: list[FirstToken] = field(default_factory=list)
    idle: IdleShare | None = None
    peer: PeerReport | None = None

    def targets(self) -> list[DecodeTarget]:
        """The targets, with the measured values."""
        shares = [
            DecodeTarget(
                f"share of the roofline at {row.batch_size} x {row.context}",
                row.figures.of_roofline,
                ROOFLINE_TARGET,
                at_least=True,
            )
            for row in self.rows
            if row.figures is not None and row.has_target
        ]
        return shares + self._other_targets()

    def _other_targets(self) -> list[DecodeTarget]:
        late, idle, prefix = self.compiled_after_warm_up, self.idle, self.prefix
        speedup = None if prefix is None else prefix.speedup
        between = None if idle is None else idle.between_launches
        return [
            DecodeTarget(
                "first token sooner by a cached prefix", speedup, PREFIX_TARGET, at_least=True
            ),
            DecodeTarget(
                "kernels compiled after the warm-up", None if late is None else len(late), 0
            ),
            DecodeTarget("device idle between launches", between, IDLE_TARGET),
        ]

    def print(self) -> None:
        """Print the results that the run has not printed yet."""
        if self.prefix is not None:
            print(
                f"first token with {self.prefix.prefix_tokens} of "
                f"{self.prefix.prefix_tokens + self.prefix.suffix_tokens} tokens cached: "
                f"{self.prefix.ttft_ms_cached:.2f} ms, {self.prefix.ttft_ms_without:.2f} ms without"
            )
        if self.idle is not None:
            print(
                f"traced {TRACED_STEPS} steps at {self.idle.batch_size} x {self.idle.context}: "
                f"device idle between the kernels of a CUDA graph: {self.idle.within_graphs:.4g}"
            )
        for target in self._other_targets():
            print(target.line())
        if self.compiled_after_warm_up:
            print("compiled late:", *self.compiled_after_warm_up)
        for first in self.first_tokens:
            print(first.line())
        if self.peer is not None and self.peer.problem is not None:
            print(f"{self.peer.name}: no more figures: {self.peer.problem}")

    def save(self, path: Path) -> None:
        """Write everything as JSON."""
        targets = [asdict(target) | {"met": target.met} for target in self.targets()]
        write_json(path, asdict(self) | {"targets": targets}, indent=2)


class GrowingReport:
    """A report to which figures are added; with a path, it is saved after each one."""

    def __init__(self, report: DecodeReport, path: Path | None) -> None:
        self.value, self._path = report, path
        self.change()  # a path that cannot be written fails before minutes of work

    def change(self, **fields: Any) -> None:
        """Replace fields of the report."""
        self.value = replace(self.value, **fields)
        if self._path is not None:
            self.value.save(self._path)


def _verdict(met: bool) -> str:
    return "met" if met else "missed"
