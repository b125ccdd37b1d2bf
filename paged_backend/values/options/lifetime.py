"""The life of an engine: when it is replaced, and how it ends."""

from __future__ import annotations

from dataclasses import dataclass

from paged_backend.values.validation import Rule, checked


@dataclass(frozen=True, kw_only=True)
class LifetimeOptions:
    """See :class:`paged_backend.values.config.EngineConfig`."""

    step_timeout_s: float = checked(
        60.0,
        Rule(float, 2, 86400),
        "an engine is considered hung if a step takes longer: it is killed and restarted",
    )
    engine_restart_timeout_s: float = checked(
        120.0,
        Rule(float, 0, 86400),
        "how long requests wait for an engine to restart; with 0 it is not restarted, and its "
        "requests fail",
    )
    max_crashes_per_request: int = checked(
        3,
        Rule(int, 1, 1000),
        "a request fails if it was in flight when this number of engines died, as it may be the "
        "cause",
    )
    drain_timeout_s: float = checked(
        20.0,
        Rule(float, 0, 86400),
        "how long running requests may continue when the server stops, within its exit timeout",
    )
