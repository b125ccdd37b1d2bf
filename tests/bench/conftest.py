"""Settings of the tests of benchmarks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def small_copies() -> Iterator[None]:
    """Measure the speed of memory with a small buffer: the usual one takes two seconds."""
    from paged_backend.tools.bench import environment

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment, "_buffer_bytes", lambda device: 2**20)
        yield
