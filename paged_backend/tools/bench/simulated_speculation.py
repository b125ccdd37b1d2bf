"""Measures how long a device that is only simulated is idle with speculation and without it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from paged_backend.checkpoint.hub import resolve_model
from paged_backend.checkpoint.model_config import load_model_config
from paged_backend.engine.engine import Engine
from paged_backend.tools.bench.simulated_device import SimulatedDrafts, SimulatedExecutor
from paged_backend.tools.bench.speculation import SpeculationBench, SpeculationFigures, give_to
from paged_backend.values.config import EngineConfig

_MAX_MODEL_LEN = 2048  # longer than any trace


@dataclass(frozen=True, slots=True)
class IdleFigures(SpeculationFigures):
    """Also the parts of the time in which the device was idle, as medians over all rounds.

    Only the processor time of the host counts as idle time of the device.
    """

    idle_without: float
    idle_with: float

    def line(self) -> str:
        """Return a row for people."""
        row = SpeculationFigures.line(self)
        return f"{row}  {self.idle_without:12.1%}  {self.idle_with:9.1%}"


IDLE_HEADER = (
    "trace    at once   without      with  ratio              tokens/step  accepted  "
    "idle without  idle with"
)


class SimulatedSpeculationBench(SpeculationBench):
    """Serves the traces on a device on which each step takes the same time.

    The engine and the preparation of a GPU's inputs are the real ones; there is no model. A step is
    scheduled while the one before it runs, unless `async_scheduling` is off.

    Args:
        config: the engine's options; `speculative_config` says how to speculate.
        step_s: the device's time for a step, in seconds.
        drafts: the draft model, if `speculative_config` has one.

    Raises:
        ConfigError: `speculative_config` is missing, or an option is wrong.
    """

    def __init__(self, config: EngineConfig, step_s: float, drafts: SimulatedDrafts) -> None:
        speculation = config.speculation()
        draws = speculation is not None and speculation.is_drawn_by_worker
        self._step_s, self._drafts = step_s, drafts if draws else None
        self._answers: dict[int, list[int]] = {}  # by seed
        self._idle: dict[bool, list[float]] = {False: [], True: []}  # shares, by side
        super().__init__(config)

    def measure(
        self, kinds: Sequence[str], numbers: Sequence[int], rounds: int
    ) -> Iterator[IdleFigures]:
        """Yield the figures of each kind of trace with each number of requests at once."""
        for figures in super().measure(kinds, numbers, rounds):
            # The first round does not count.
            idle = {side: statistics.median(shares[1:]) for side, shares in self._idle.items()}
            self._idle = {side: [] for side in self._idle}
            values = {spec.name: getattr(figures, spec.name) for spec in fields(figures)}
            yield IdleFigures(**values, idle_without=idle[False], idle_with=idle[True])

    def _open(self, config: EngineConfig) -> Engine:
        vocab_size = load_model_config(resolve_model(config.model, weights=False)).vocab_size
        executor = SimulatedExecutor(
            *(config, vocab_size, config.max_model_len or _MAX_MODEL_LEN),
            *(self._answers, self._drafts),
        )
        self._device = executor.device
        self._models = [give_to(self._answers)]
        return Engine(config, executor)

    def _run(self, kind: str, at_once: int, speculate: bool, number: int) -> float:
        self._device.reset(self._step_s)
        rate = super()._run(kind, at_once, speculate, number)
        self._idle[speculate].append(self._device.host_share)
        return rate
