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

    turns.put("held", hold())
    return go_on


def test_groups_take_turns_and_the_works_of_a_group_keep_their_order(turns: Rotation) -> None:
    done: list[str] = []
    go_on = held(turns)
    turns.put("a", work("a", 3, done))
    turns.put("a", work("b", 1, done))
    turns.put("c", work("c", 1, done))
    assert turns.has("a") and not turns.has("b")
    go_on.set()
    turns.close()
    assert done == ["a", "c", "a", "C", "a", "A", "b", "B"]
    assert not turns.has("a")


def test_an_error_ends_one_work_only(turns: Rotation) -> None:
    def fail() -> Iterator[None]:
        yield
        raise ZeroDivisionError

    done: list[str] = []
    turns.put("a", fail())
    turns.put("a", work("b", 1, done))
    turns.close()
    assert done == ["b", "B"]


def test_more_works_than_may_wait_are_refused(
    turns: Rotation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rotation, "MAX_WAITING", 2)
    go_on = held(turns)
    turns.put("a", iter(()))
    with pytest.raises(RequestRefused, match="^queue_full: 2 long answers wait"):
        turns.put("b", iter(()))
    go_on.set()
