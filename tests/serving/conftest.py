"""A clock that tests of rates and intervals set by hand."""

from __future__ import annotations

import pytest

from paged_backend.serving.requests import open_requests, token_bucket


class Clock:
    """Stands for the module `time` of modules that only read the monotonic clock."""

    def __init__(self) -> None:
        self.now_s = 4096.0

    def monotonic(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (open_requests, token_bucket):
        monkeypatch.setattr(module, "time", clock)
    return clock
