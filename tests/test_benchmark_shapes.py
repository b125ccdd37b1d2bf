"""The kernel benchmarks at the scale of a GPU, as far as one can go without it.

On the "meta" device every wrapper checks its arguments and chooses its launch; nothing is launched.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
from paged_kernels import aot

BENCHMARKS = Path(__file__).parent.parent / "kernels" / "benchmarks"
NAMES = sorted(path.stem for path in BENCHMARKS.glob("bench_*.py"))
sys.path.insert(0, str(BENCHMARKS))

from measure import Bench, Call, Row, Target  # noqa: E402


class NoClock:
    """Makes the first of the calls."""

    def microseconds(self, calls: list[Call], *, captured: bool = True) -> float:
        calls[0]()
        return 100.0


class MetaBench(Bench):
    """A run at full scale without a device."""

    def __init__(self, launches: list[aot.Launch]) -> None:
        self.quick = False
        self.device = torch.device("meta")
        self.clock = NoClock()
        self.rows: list[Row] = []
        self.known: set[object] = set()
        self._launches = launches
        self._bytes_per_us, self._flops_per_us = 4.2e6, 7.5e8

    def warm_up(self, *calls: Call) -> None:
        for call in calls:
            call()
        self.known |= {launch.key for launch in self._launches}

    def report(self, row: Row, target: Target | None = None) -> Row:
        self.rows.append(row)
        return row


@pytest.mark.parametrize("name", NAMES)
def test_a_gpus_shapes_pass_all_checks_and_need_no_binary_after_the_warm_up(name, monkeypatch):
    module = importlib.import_module(name)
    # Peers and host memory need a device.
    for other in ("time_peers", "time_host_copies"):
        monkeypatch.setattr(module, other, lambda *_: None, raising=False)
    if hasattr(module, "on_host"):
        monkeypatch.setattr(module, "on_host", module.on_device)
    if hasattr(module, "QUANTIZED"):  # chosen by the device that is there
        monkeypatch.setattr(module, "QUANTIZED", torch.float8_e4m3fn)
    with aot.record(90) as launches:
        bench = MetaBench(launches)
        module.run(bench)
    assert bench.rows
    late = {launch.kernel.__name__ for launch in launches if launch.key not in bench.known}
    assert not late
