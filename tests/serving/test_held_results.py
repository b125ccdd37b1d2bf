"""What open requests will return is limited, and shared among tenants."""

from __future__ import annotations

import pytest

from paged_backend.serving.requests.held_results import HeldResults
from paged_backend.values.errors import RequestRefused


def test_a_tenant_fills_a_part_of_the_room() -> None:
    held = HeldResults(90)
    for _ in range(8):
        held.add(10, "a")
    with pytest.raises(RequestRefused, match="requests of this tenant will return 80 bytes"):
        held.add(10, "a")
    held.add(0, "a")
    held.add(5, "b")
    with pytest.raises(RequestRefused, match="open requests will return 85 bytes"):
        held.add(6, "c")
    for _ in range(8):
        held.remove(10, "a")
    with pytest.raises(RequestRefused, match="requests of this tenant will return 0 bytes"):
        held.add(85, "a")  # would leave nothing beside what the others hold
    held.add(75, "a")


def test_a_request_that_is_too_large_may_be_the_only_one() -> None:
    held = HeldResults(90)
    held.add(1000, "a")
    with pytest.raises(RequestRefused, match="open requests will return 1000 bytes"):
        held.add(1, "b")
    held.remove(1000, "a")
    held.add(1, "b")
    held.remove(1, "b")
    assert not held._of_tenants
