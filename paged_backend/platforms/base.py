"""What carries out a planned step: on the host at once, or on a device while the host goes on."""

from __future__ import annotations

from typing import Protocol

from paged_backend.core.scheduler_output import ModelRunnerOutput, SchedulerOutput


class PendingOutput(Protocol):
    """The output of a step that may be under way."""

    def result(self) -> ModelRunnerOutput:
        """Wait for it."""
        ...


class StepRunner(Protocol):
    """Owns the inputs and the sampler of one model and its KV pool."""

    def submit(self, plan: SchedulerOutput) -> PendingOutput:
        """Start a step; steps are carried out in the order of their submission."""
        ...
