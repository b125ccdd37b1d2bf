"""Long works in slices: each group in turn, and in order within a group."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from paged_backend.serving import rotation
from paged_backend.serving.rotation import Rotation
from paged_backend.values.errors import RequestRefused


@pytest.fixture
def turns() -> Iterator[Rotation]:
    turns = Rotation("test-rotation")
    yield turns
    turns.close()


def work(name: str, number: int, done: list[str]) -> Iterator[None]:
    for _ in range(number):
        done.append(name)
        yield
    done.append(name.upper())


def held(turns: Rotation) -> threading.Event:
    """Keep the thread busy until the event is set, so that other works wait."""
    go_on = threading.Event()

    def hold() -> Iterator[None]:
        go_on.wait(60)
        yield

    turns.put("held", "held", hold())
    return go_on


def test_groups_take_turns_and_the_works_of_a_group_keep_their_order(turns: Rotation) -> None:
    done: list[str] = []
    go_on = held(turns)
    turns.put("t", "a", work("a", 3, done))
    turns.put("t", "a", work("b", 1, done))
    turns.put("t", "c", work("c", 1, done))
    assert turns.has("t", "a") and not turns.has("t", "b") and not turns.has("u", "a")
    go_on.set()
    turns.close()
    assert done == ["a", "c", "a", "C", "a", "A", "b", "B"]
    assert not turns.has("t", "a")


def test_an_error_ends_one_work_only(turns: Rotation) -> None:
    def fail() -> Iterator[None]:
        yield
        raise ZeroDivisionError

    done: list[str] = []
    turns.put("t", "a", fail())
    turns.put("t", "a", work("b", 1, done))
    turns.close()
    assert done == ["b", "B"]


def test_more_works_than_may_wait_are_refused(
    turns: Rotation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rotation, "MAX_WAITING", 2)
    go_on = held(turns)
    turns.put("t", "a", iter(()))
    with pytest.raises(RequestRefused, match="^queue_full: 2 long answers wait"):
        turns.put("u", "b", iter(()))
    go_on.set()


def test_a_tenant_with_many_groups_has_one_turn_of_each_round(turns: Rotation) -> None:
    done: list[str] = []
    go_on = held(turns)
    for name in "abcd":
        turns.put("many", name, work(name, 1, done))
    turns.put("one", "x", work("x", 2, done))
    go_on.set()
    turns.close()
    assert done == ["a", "x", "b", "x", "c", "X", "d", "A", "B", "C", "D"]


def test_a_tenant_cannot_take_the_last_places(turns: Rotation) -> None:
    go_on = held(turns)
    for number in range(rotation.MAX_WAITING):
        try:
            turns.put("many", f"{number}", iter(()))
        except RequestRefused as error:
            assert f"{number} long answers of this tenant wait" in str(error)
            break
    assert 0.88 < number / rotation.MAX_WAITING < 0.9
    for other in range(100):
        turns.put(f"{other}", "a", iter(()))
    go_on.set()
