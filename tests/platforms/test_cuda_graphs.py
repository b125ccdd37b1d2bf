"""What surrounds the captures of CUDA graphs, as far as it goes without a device."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch

from paged_backend.platforms.gpu.cuda_graphs import StepGraphs, StepShape
from paged_backend.platforms.gpu.device import GpuDevice
from paged_backend.platforms.gpu.platform import prepare

SHAPES = [StepShape.decodes(1), StepShape.decodes(2)]


class _Cycle:
    """Garbage that only a collection frees."""

    freed = 0

    def __init__(self) -> None:
        self.myself = self

    def __del__(self) -> None:
        _Cycle.freed += 1


@pytest.fixture
def collecting():
    """Whether a test is begun with collections enabled or without, it ends as it began."""
    yield
    gc.enable()


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_collected_before_the_captures_and_not_between_them(collecting, enabled):
    _Cycle.freed = 0
    seen = []

    def capture(shape):
        seen.append((gc.isenabled(), _Cycle.freed))
        return lambda: torch.empty(0)

    if not enabled:
        gc.disable()
    _Cycle()
    StepGraphs(SHAPES, capture)
    assert seen == [(False, 1), (False, 1)]
    assert gc.isenabled() is enabled


def test_collections_go_on_after_a_capture_that_fails(collecting):
    def capture(shape):
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        StepGraphs(SHAPES, capture)
    assert gc.isenabled()


class FakeCuda:
    """Streams as torch's: a capture sets its own, and keeps it set if it does not end well."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stream = "ours"
        for name in ("graph", "current_stream", "set_stream", "synchronize"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))

    def graph(self, graph, pool=None):
        return self

    def current_stream(self):
        return self.stream

    def set_stream(self, stream):
        self.stream = stream

    def synchronize(self):
        assert self.stream == "ours"

    def __enter__(self):
        self.stream = "capture's"

    def __exit__(self, kind, error, trace):
        if error is not None:  # as `capture_end` does, before the stream is set back
            raise RuntimeError("operation failed due to a previous error during capture")
        self.stream = "ours"


def test_the_stream_is_set_back_after_a_capture_that_fails(monkeypatch):
    device, gpu = FakeCuda(monkeypatch), GpuDevice(torch.device("cuda"))

    def run():
        if device.stream == "capture's":
            raise ValueError("a wrong shape")
        return torch.ones(1)

    with pytest.raises(RuntimeError, match="previous error") as failure:
        gpu.capture(run, pool=None)
    assert isinstance(failure.value.__context__, ValueError)
    assert device.stream == "ours"
    replay = gpu.capture(lambda: torch.ones(1), pool=None)
    assert (replay().item(), device.stream) == (1, "ours")


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_the_largest_step_is_run_last_of_all(enforce_eager):
    calls = []
    runner = SimpleNamespace(
        **{
            name: lambda *_, name=name: calls.append(name)
            for name in ("warm_up", "capture", "run_largest")
        }
    )
    prepare(runner, GpuDevice(torch.device("cuda")), enforce_eager=enforce_eager)
    captures = [] if enforce_eager else ["capture"]
    assert calls == ["warm_up", *captures, "run_largest"]
