"""Loads and unloads of adapters, with engines that end and front ends that share the names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from paged_backend.process import adapter_names, wire
from paged_backend.process.adapter_names import AdapterNames
from paged_backend.serving.requests import adapter_changes, brought_adapters
from paged_backend.serving.requests.adapter_changes import AdapterChanges
from paged_backend.serving.requests.brought_adapters import BroughtAdapter, BroughtAdapters
from paged_backend.values.errors import EngineDead, InvalidRequest, RequestRefused
from paged_backend.values.lora import LoRARequest

MAX_BYTES = 160


def brought_adapter(name: str, number: float, size: int) -> BroughtAdapter:
    weights = np.full((1, size), number, np.float16)
    return BroughtAdapter(name, weights, np.array([[1, 0, 1]], np.int32))


class Link:
    """Engines that answer when the test says so."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.running = set(range(size))
        self.sent: list[tuple[int, Any]] = []

    def send(self, message: wire.ToEngine, engine: int) -> bool:
        if engine in self.running:
            self.sent.append((engine, message))
        return engine in self.running

    def send_all(self, message: wire.ToEngine) -> None:
        for engine in sorted(self.running):
            self.send(message, engine)


class Caller:
    """A client: ``answer`` is "done" or its error."""

    def __init__(self) -> None:
        self.answer: str | None = None

    def send(self, tensors: dict[str, Any], final: bool) -> None:
        assert final and self.answer is None
        self.answer = "done"

    def fail(self, error: Exception) -> None:
        assert self.answer is None
        self.answer = str(error)


class World:
    """One front end of a model with several engines."""

    def __init__(self, folder: Path, size: int = 2, *, is_on: bool = True) -> None:
        self.link = Link(size)
        link: Any = self.link
        self.names = AdapterNames(folder, {"fixed": "/fixed"})
        self.used: set[LoRARequest] = set()
        self.changes = AdapterChanges(
            link,
            self.names,
            is_on=is_on,
            is_used=self.used.__contains__,
            max_brought_bytes=MAX_BYTES,
        )
        self.brought = BroughtAdapters(self.names, self.changes, MAX_BYTES)

    def load(self, name: str = "a", path: str = "a", **more: object) -> Caller:
        caller: Any = Caller()
        self.changes.load({"lora_name": name, "lora_path": path, **more}, caller)
        return caller

    def bring(self, name: str, number: float = 1, size: int = 30) -> Caller:
        """Bring an adapter of `size` numbers, and 12 bytes more."""
        caller: Any = Caller()
        adapter = brought_adapter(name, number, size)
        self.brought.admit(adapter)
        self.brought.load(adapter, lambda: caller.send({}, True), caller.fail)
        self.brought.leave(adapter)
        return caller

    def confirm_all(self) -> None:
        """Let all engines carry out all that they were told."""
        done = 0
        while done < len(self.link.sent):
            engine, message = self.link.sent[done]
            self.changes.confirm(engine, wire.AdapterChanged(message.change_id))
            done += 1

    def folders(self) -> set[str]:
        """The paths of adapters that were brought and are still there."""
        return {str(path) for path in self.names.brought_folder.glob("*")}

    def unload(self, name: str = "a") -> Caller:
        caller: Any = Caller()
        self.changes.unload({"lora_name": name}, caller)
        return caller

    def confirm(self, engine: int, problem: str = "") -> None:
        """Let an engine answer the message that it got last."""
        change_id = next(m.change_id for e, m in reversed(self.link.sent) if e == engine)
        self.changes.confirm(engine, wire.AdapterChanged(change_id, problem))

    def stop(self, engine: int) -> None:
        self.link.running.discard(engine)
        self.changes.lose_engine(engine)
        self.changes.end_done()

    def start(self, engine: int) -> None:
        self.link.running.add(engine)
        self.changes.add_engine(engine)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_load_ends_when_all_engines_have_it(world: World, tmp_path: Path) -> None:
    caller = world.load()
    world.confirm(0)
    assert caller.answer is None and "a" not in world.names.known
    world.confirm(1)
    assert caller.answer == "done"
    other = AdapterNames(tmp_path, {"fixed": "/fixed"})  # those of another front end
    assert other.find("a") == world.names.find("a") == LoRARequest("a", 2, "a")
    with pytest.raises(InvalidRequest, match=r"LoRA b is not supported.*\['fixed', 'a'\]"):
        other.find("b")


def test_the_problem_of_one_engine_ends_the_load(world: World) -> None:
    caller = world.load()
    world.confirm(0)
    world.confirm(1, "r is 99")
    assert caller.answer == "r is 99" and "a" not in world.names.known
    world.confirm(0)  # late
    assert len(world.changes) == 0


@pytest.mark.parametrize("first", [0, 1])
def test_an_engine_that_ends_is_asked_again(world: World, first: int) -> None:
    caller = world.load()
    world.stop(first)
    assert caller.answer is None
    world.stop(1 - first)
    world.start(first)
    world.confirm(first)
    assert caller.answer == "done"


def test_a_change_without_any_engine_waits_for_one(world: World) -> None:
    world.stop(0)
    world.stop(1)
    caller = world.load()
    world.changes.end_done()
    assert caller.answer is None
    world.start(1)
    world.confirm(1)
    assert caller.answer == "done"


def test_an_unload_waits_for_the_requests_of_engines_and_of_the_front_end(world: World) -> None:
    world.load()
    world.confirm(0)
    world.confirm(1)
    lora = world.names.find("a")
    world.used.add(lora)
    caller = world.unload()
    assert world.names.known == {"fixed": LoRARequest("fixed", 1, "/fixed")}
    assert world.link.sent[-1][1].lora == lora
    world.confirm(0)
    world.stop(1)
    assert caller.answer is None  # a request waits for another engine
    world.used.clear()
    world.changes.end_done()
    assert caller.answer == "done"


def test_an_adapter_is_replaced_only_if_asked(world: World) -> None:
    first, second = world.load(path="x"), world.load(path="y")  # at the same time
    for message in [m for _, m in world.link.sent]:
        for engine in range(2):
            world.changes.confirm(engine, wire.AdapterChanged(message.change_id))
    assert first.answer == "done" and "has already been loaded" in str(second.answer)
    with pytest.raises(InvalidRequest, match="has already been loaded"):
        world.load(path="z")
    caller = world.load(path="z", load_inplace=True)
    world.confirm(0)
    world.confirm(1)
    assert caller.answer == "done"
    assert world.names.find("a").lora_path == "z"
    assert [m.lora.lora_path for _, m in world.link.sent[-2:]] == ["x", "x"]  # dropped


def test_all_changes_end_with_the_front_end(world: World) -> None:
    callers = [world.load("a"), world.load("b")]
    world.changes.fail_all(EngineDead("gone"))
    assert all("gone" in str(caller.answer) for caller in callers)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({}, "lora_name: is missing"),
        ({"lora_name": 1}, "lora_name: must be a string"),
        ({"lora_name": "x" * 257}, "lora_name: must be a string of 1 to 256"),
        ({"lora_name": "a"}, "lora_path: must be a string"),
        ({"lora_name": "a", "lora_path": ""}, "lora_path: must be a string of 1 to 4096"),
        ({"lora_name": "a", "lora_path": "a", "load_inplace": 1}, "load_inplace: must be true"),
        ({"lora_name": "a", "lora_path": "a", "top_p": 1}, "top_p: is not known for adapters"),
        ({"lora_name": "fixed", "lora_path": "a"}, "fixed belongs to the option lora_modules"),
    ],
)
def test_bad_loads(world: World, parameters: dict[str, object], message: str) -> None:
    caller: Any = Caller()
    with pytest.raises(InvalidRequest, match=message):
        world.changes.load(parameters, caller)
    assert not world.link.sent and len(world.changes) == 0


def test_names_that_cannot_be_unloaded(world: World) -> None:
    with pytest.raises(InvalidRequest) as error:
        world.unload("b")
    assert str(error.value) == "The lora adapter 'b' cannot be found."
    with pytest.raises(InvalidRequest, match="fixed belongs to the option"):
        world.unload("fixed")


def test_clients_can_change_nothing_by_default(tmp_path: Path) -> None:
    world = World(tmp_path, is_on=False)
    for change in (world.load, world.unload):
        with pytest.raises(InvalidRequest, match=adapter_changes.OFF):
            change()


def test_the_number_of_open_changes_is_limited(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_changes, "MAX_OPEN", 1)
    world.load("a")
    for change in (world.load, world.unload):
        with pytest.raises(RequestRefused, match="queue_full: 1 adapters are changed"):
            change("b")


def test_a_load_fails_alone_if_its_name_cannot_be_written(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = world.load()
    world.confirm(0)

    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(adapter_names.os, "replace", fail)
    world.confirm(1)
    assert "No space left" in str(caller.answer)


def test_the_number_of_adapters_is_limited(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_names, "MAX_RUNTIME_ADAPTERS", 1)
    world.load("a")
    world.confirm(0)
    world.confirm(1)
    with pytest.raises(InvalidRequest, match="1 adapters are loaded"):
        world.load("b")


def test_a_brought_adapter_is_loaded_once(world: World) -> None:
    first, second = world.bring("7"), world.bring("7")
    assert first.answer is second.answer is None and len(world.folders()) == 2
    world.confirm_all()
    assert first.answer == second.answer == "done"
    lora = world.names.find("7")
    assert world.folders() == {lora.lora_path} and len(world.changes) == 0
    arrays = load_file(Path(lora.lora_path) / "packed_adapter.safetensors")
    assert arrays["lora_weights"].tolist() == [[1] * 30]
    assert "7" not in world.names.known  # no list shows it
    num_sent = len(world.link.sent)
    assert world.bring("7").answer == "done" and len(world.link.sent) == num_sent
    for name in ("7", "fixed"):
        with pytest.raises(InvalidRequest, match=f"lora_name: {name} "):
            world.bring(name, number=2)
    assert world.folders() == {lora.lora_path}


def test_the_weights_that_come_second_under_a_name_are_refused(world: World) -> None:
    first, second = world.bring("7"), world.bring("7", number=2)
    world.confirm_all()
    assert first.answer == "done"
    assert second.answer is not None and "7 stands for another adapter" in second.answer
    assert world.folders() == {world.names.find("7").lora_path}


def test_the_oldest_brought_adapter_makes_room(world: World, tmp_path: Path) -> None:
    """Its files are there until the last of its requests has ended."""
    world.load()
    for name in ("1", "2"):
        world.bring(name)
        world.confirm_all()
    oldest = world.names.find("1")
    world.used.add(oldest)
    assert world.bring("3").answer is None
    world.confirm_all()
    assert [world.names.find(name).lora_name for name in ("2", "3", "a")] == ["2", "3", "a"]
    with pytest.raises(InvalidRequest, match="LoRA 1 is not supported"):
        world.names.find("1")
    assert oldest.lora_path in world.folders() and len(world.folders()) == 3
    world.used.clear()
    world.changes.end_done()
    assert oldest.lora_path not in world.folders() and len(world.folders()) == 2
    assert world.unload("2").answer is None
    world.confirm_all()
    assert world.folders() == {world.names.find("3").lora_path}


def test_the_number_of_brought_adapters_is_limited(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_names, "MAX_BROUGHT", 2)
    monkeypatch.setattr(adapter_names, "MAX_RUNTIME_ADAPTERS", 1)
    world.load()
    for name in ("1", "2", "3"):
        world.bring(name, size=1)
        world.confirm_all()
    with pytest.raises(InvalidRequest, match="LoRA 1 is not supported"):
        world.names.find("1")
    for name in ("2", "3", "a"):
        world.names.find(name)
    with pytest.raises(InvalidRequest, match="1 adapters are loaded"):
        world.load("b")


def test_an_adapter_that_another_request_has_brought_meanwhile(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = brought_adapters._write

    def write_late(folder: Path, adapter: BroughtAdapter) -> None:
        write(folder, adapter)
        monkeypatch.undo()
        world.bring("7")
        world.confirm_all()

    monkeypatch.setattr(brought_adapters, "_write", write_late)
    assert world.bring("7").answer == "done"
    assert world.folders() == {world.names.find("7").lora_path}


def test_a_brought_adapter_that_does_not_fit_leaves_nothing(world: World) -> None:
    caller = world.bring("7")
    world.confirm(0, "lora_config: row 0 has the rank 9")
    assert caller.answer == "lora_config: row 0 has the rank 9"
    assert not world.folders()
    with pytest.raises(InvalidRequest, match="LoRA 7 is not supported"):
        world.names.find("7")


def test_adapters_that_wait_are_limited(world: World) -> None:
    with pytest.raises(InvalidRequest, match="lora_weights: has 212 bytes .*at most 160"):
        world.brought.admit(brought_adapter("7", 1, 100))
    adapters = [brought_adapter(name, 1, 30) for name in ("1", "2", "3")]
    for adapter in adapters[:2]:
        world.brought.admit(adapter)
    with pytest.raises(RequestRefused, match="144 bytes of adapters wait to be loaded"):
        world.brought.admit(adapters[2])
    world.brought.leave(adapters[0])
    world.brought.leave(adapters[0])
    world.brought.admit(adapters[2])
