"""The choice of an engine, without engines."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paged_client.routing import MAX_PIECES, SLACK

from paged_backend.process import engines as engines_module
from paged_backend.process import wire
from paged_backend.process.engine_supervisor import EngineDied
from paged_backend.process.engines import Engines
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import EngineDead, RequestRefused
from paged_backend.values.request import Request

FULL = RequestRefused("queue_full", "no room")


class Supervisor:
    """An engine that takes what is sent while it is ready."""

    identity = "front-end"
    waitables = ()

    def __init__(self, *arguments: Any) -> None:
        self.is_ready = True
        self.takes = True  # False: it has ended, which nobody has noticed
        self.has_room = True
        self.sent: list[wire.ToEngine] = []
        self.events: list[Any] = []

    def send(self, message: wire.ToEngine) -> bool:
        if self.takes:
            self.sent.append(message)
        return self.takes

    def check_room(self, *numbers: int) -> None:
        if not self.has_room:
            raise FULL

    def receive(self, timeout_s: float) -> list[Any]:
        events, self.events = self.events, []
        return events


class World:
    """Engines of one model, and requests for them."""

    def __init__(self, size: int, **options: Any) -> None:
        config = EngineConfig(data_parallel_size=size, **options)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engines_module, "EngineSupervisor", Supervisor)
            self.link = Engines(config, "m", "1", os.getpid())
        self.engines: list[Any] = self.link._engines
        self._num_requests = 0

    def add(self, prompt: list[int], *, has_begun: bool = False, tenant: str = "") -> int | None:
        self._num_requests += 1
        request = Request(str(self._num_requests), prompt, tenant=tenant)
        message = wire.AddRequest(request, [[]] if has_begun else None)
        return self.link.add(message, self.link.route(request))


def prompt(number: int) -> list[int]:
    return [number] * 64


def test_a_single_engine_gets_everything_and_nothing_is_hashed() -> None:
    world = World(1)
    assert world.link.route(Request("r", prompt(1))) == ()
    assert [world.add(prompt(n)) for n in range(3)] == [0, 0, 0]
    world.engines[0].takes = False
    assert world.add(prompt(1)) is None


def test_only_the_beginning_of_a_prompt_is_looked_at() -> None:
    world = World(2)
    assert len(world.link.route(Request("r", [1] * 10**6))) == MAX_PIECES


def test_new_prompts_are_divided_and_repeated_beginnings_stay() -> None:
    world = World(3)
    first = [world.add(prompt(n)) for n in range(6)]
    assert sorted(first, key=str) == [0, 0, 1, 1, 2, 2]
    assert [world.add([*prompt(n), 7, 8]) for n in range(6)] == first


def test_an_engine_that_is_much_busier_is_left() -> None:
    world = World(2)
    assert {world.add(prompt(1)) for _ in range(SLACK + 1)} == {0}
    assert world.add(prompt(1)) == 1
    for _ in range(SLACK + 1):
        world.link.release(0)
    assert world.add(prompt(2)) == 0


def test_an_engine_that_is_not_ready_gets_nothing() -> None:
    world = World(2)
    assert world.add(prompt(1)) == 0
    world.engines[0].is_ready = False
    assert world.add(prompt(1)) == 1
    world.engines[1].takes = False
    assert world.add(prompt(1)) is None


def test_a_request_goes_past_an_engine_that_has_just_ended() -> None:
    world = World(2)
    world.engines[0].takes = False
    assert [world.add(prompt(n)) for n in range(3)] == [1, 1, 1]


def test_a_full_queue_is_avoided_but_not_by_requests_that_have_begun() -> None:
    world = World(2)
    assert world.add(prompt(1)) == 0
    world.engines[0].has_room = False
    assert world.add(prompt(2), has_begun=True) == 1
    world.link.check_room(0, 0)
    assert world.add(prompt(1)) == 1
    world.engines[1].has_room = False
    with pytest.raises(RequestRefused):
        world.link.check_room(0, 0)


def test_a_new_engine_has_none_of_the_beginnings() -> None:
    world = World(2)
    assert world.add(prompt(1)) == 0
    world.link.release(0)
    world.engines[0].events = [EngineDied(EngineDead("gone"))]
    assert [number for number, events in world.link.receive(0) if events] == [0]
    assert world.add(prompt(2)) == 1  # the one that was chosen less often
    assert world.add(prompt(3)) == 0
    assert world.add(prompt(2)) == 1, "the caches of the other engine are still there"
    assert world.add(prompt(4)) == 0
    world.link.release(1)
    world.link.release(1)
    assert world.add(prompt(1)) == 1, "the idlest, as the new engine has an empty cache"


@pytest.mark.parametrize(("rate", "expected"), [(2.0, 1), (None, 0)])
def test_the_rate_of_a_tenant_counts_the_requests_of_all_engines(
    rate: float | None, expected: int
) -> None:
    world = World(3, max_tenant_request_rate=rate)
    chosen = world.add(prompt(1), tenant="t")
    world.add(prompt(1), tenant="t", has_begun=True)
    for number, engine in enumerate(world.engines):
        charges = engine.sent.count(wire.ChargeTenant("t"))
        assert charges == (0 if number == chosen else expected)


Steps = st.lists(
    st.tuples(st.sampled_from(["add", "release", "up", "down"]), st.integers(0, 3)), max_size=60
)


@given(Steps)
def test_the_number_of_open_requests_is_right_in_any_history(steps: list[tuple[str, int]]) -> None:
    world = World(4)
    open_at: list[int] = []
    for step, number in steps:
        if step == "add":
            placed = world.add(prompt(number))
            ready = {n for n, engine in enumerate(world.engines) if engine.is_ready}
            assert placed in ready if ready else placed is None
            open_at += [] if placed is None else [placed]
        elif step == "release" and open_at:
            world.link.release(open_at.pop(number % len(open_at)))
        else:
            world.engines[number].is_ready = step == "up"
    assert world.link._num_open == [open_at.count(number) for number in range(4)]
