"""Locust load shapes: the number of users over time.

Each shape respects Locust's own --users (the maximum) and --run-time.
"""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from locust import LoadTestShape

from paged_backend.tools.workloads.request import WorkloadRequest
from paged_loadtest.locust_options import LocustOptions
from paged_loadtest.locust_statistics import num_output_tokens

MAX_SPAWN_RATE = 100.0  # Locust warns above this rate
_LOG = logging.getLogger(__name__)


class LoadCurve(LoadTestShape):
    """Base of load shapes in which the number of users depends on time."""

    abstract = True
    use_common_options: ClassVar[bool] = True

    def __init__(self, options: LocustOptions) -> None:
        super().__init__()
        self.options = options

    @abstractmethod
    def users(self, at_s: float, most: int) -> int | None:
        """Number of users, at most ``most``, ``at_s`` seconds into the run; None ends the run."""

    def tick(self) -> tuple[int, float] | None:
        """Return the number of users and the spawn rate; Locust calls this once a second."""
        assert self.runner is not None and self.runner.environment.parsed_options is not None
        common = self.runner.environment.parsed_options
        at_s = self.get_run_time()
        if common.run_time and at_s >= common.run_time:
            return None
        most = common.num_users or 1
        users = self.users(at_s, most)
        return None if users is None else (users, min(float(most), MAX_SPAWN_RATE))


class Burst(LoadCurve):
    """All users at the end of each interval, few before."""

    def users(self, at_s: float, most: int) -> int:
        """All users in a burst, the floor otherwise."""
        options = self.options
        before_s = options.burst_every - options.burst_length
        return most if at_s % options.burst_every >= before_s else _part(most, options.floor)


class Wave(LoadCurve):
    """A daily cycle: fewest users at the start and end, most in the middle."""

    def users(self, at_s: float, most: int) -> int:
        """A cosine between the floor and all users."""
        height = (1 - math.cos(2 * math.pi * at_s / self.options.wave_period)) / 2
        return _part(most, self.options.floor + (1 - self.options.floor) * height)


class Ramp(LoadCurve):
    """1, 2, 4, ... users, until doubling hardly raises tokens per second or all users run."""

    def reset_time(self) -> None:
        """Restart from one user."""
        super().reset_time()
        self._users = 1
        self._step_began_s = 0.0
        self._tokens_before = 0
        self._best = 0.0

    def users(self, at_s: float, most: int) -> int | None:
        """The number of users of the current step, or of the next once the step time has passed."""
        if at_s - self._step_began_s < self.options.ramp_step:
            return min(self._users, most)
        return self._next_step(at_s, most)

    def _next_step(self, at_s: float, most: int) -> int | None:
        assert self.runner is not None
        tokens = num_output_tokens(self.runner.stats)
        rate = (tokens - self._tokens_before) / (at_s - self._step_began_s)
        _LOG.info("ramp: %d users, %.1f output tokens a second", self._users, rate)
        if rate < self._best * (1 + self.options.ramp_gain):
            _LOG.info("ramp: no more than %.1f output tokens a second: saturated", self._best)
            return None
        if self._users >= most:
            _LOG.info("ramp: all users are there, and the server is not saturated")
            return None
        self._best, self._tokens_before, self._step_began_s = rate, tokens, at_s
        self._users = min(2 * self._users, most)
        return self._users


class Replay(LoadCurve):
    """All users until the last request of a trace has been sent."""

    def __init__(self, options: LocustOptions, last_arrival_s: float) -> None:
        super().__init__(options)
        self._last_arrival_s = last_arrival_s

    def users(self, at_s: float, most: int) -> int | None:
        """End 2 s late: Locust asks once a second, and users on other machines start later."""
        return None if at_s > self._last_arrival_s + 2.0 else most


SHAPES: dict[str, type[LoadCurve]] = {"ramp": Ramp, "burst": Burst, "wave": Wave}


def make_shape(options: LocustOptions, requests: Sequence[WorkloadRequest]) -> LoadCurve | None:
    """Create the shape of a run; None leaves the number of users to Locust."""
    last_arrival_s = requests[-1].arrival_s
    if last_arrival_s is not None:
        return Replay(options, last_arrival_s)
    kind = SHAPES.get(options.shape)
    return None if kind is None else kind(options)


def _part(most: int, part: float) -> int:
    return max(1, round(most * part))
