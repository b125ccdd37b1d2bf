"""Every benchmark runs at a tiny scale, and what its figures are made of is right."""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import paged_kernels
import pytest
import torch
from paged_kernels.device import INTERPRETED
from paged_kernels.tuning.decode import DecodeConfig, decode_config

KERNELS = Path(paged_kernels.__file__).parent
BENCHMARKS = KERNELS.parent / "benchmarks"
NAMES = sorted(path.stem for path in BENCHMARKS.glob("bench_*.py"))
sys.path.insert(0, str(BENCHMARKS))

import attention  # noqa: E402
import measure  # noqa: E402
from measure import Bench, GraphClock, Row, Target, Work, descend  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
ROW = Row("paged_decode", "1x1k", "bfloat16", 10.0, 4_000_000, 0, "copy", 8.0)


@pytest.fixture
def bench() -> Bench:
    return Bench(quick=True)


@pytest.fixture
def full() -> SimpleNamespace:
    """A run at full scale, as far as batches without layers need one."""
    return SimpleNamespace(quick=False, device=torch.device("cpu"))


def test_every_kernel_has_a_benchmark() -> None:
    operations = {path.stem for path in (KERNELS / "reference").glob("[a-z]*.py")}
    operations |= {"paged_decode", "paged_prefill", "merge_attention", "packed_matmul"}
    operations -= {"w4a16_matmul", "w8a16_matmul"}  # the two of `packed_matmul`
    operations -= {"splits", "states"}  # parts of others
    assert operations == {name.removeprefix("bench_") for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_cases_run(name: str, bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    ceilings = len(bench.rows)
    importlib.import_module(name).run(bench)
    printed = capsys.readouterr().out
    assert not INTERPRETED or "did not run" not in printed  # on a GPU, torch's compiler may not
    rows = bench.rows[ceilings:]
    assert rows
    assert not bench.compiled
    for row in rows:
        assert row.bytes + row.flops > 0
        assert row.line() in printed
    json.dumps(bench.as_json())


@pytest.mark.parametrize(
    "name", ["bench_latent_attention", "bench_paged_decode", "bench_paged_prefill"]
)
def test_sweeps_run(
    name: str, bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(name)
    kept = {field: values[:1] for field, values in module.CHOICES.items()}
    monkeypatch.setattr(module, "CHOICES", {"tile": kept["tile"]})
    monkeypatch.setattr(attention, "_TINY_SHARE", 4096)
    module.sweep(bench)
    printed = capsys.readouterr().out
    assert "Error" not in printed
    assert printed.count("us by ") >= 6


def test_work_of_decodes(full: SimpleNamespace) -> None:
    work = attention.AttentionBatch(full, [1024] * 64).work
    keys_and_values = 2 * 64 * 1024 * 8 * 128 * 2
    queries_and_output = 2 * 64 * 32 * 128 * 2
    assert work == Work(bytes=keys_and_values + queries_and_output)
    assert keys_and_values == 256 << 20


def test_work_of_a_prompt(full: SimpleNamespace) -> None:
    work = attention.AttentionBatch(full, [8192], [8192]).work
    assert work == Work(flops=4 * 128 * 32 * sum(range(1, 8193)))


def test_work_of_a_chunk(full: SimpleNamespace) -> None:
    work = attention.AttentionBatch(full, [10], [3]).work
    assert work == Work(flops=4 * 128 * 32 * (8 + 9 + 10))


def test_shared_keys_count_once(full: SimpleNamespace) -> None:
    shared = attention.AttentionBatch(full, [48] * 3, shared_keys=32)
    alone = attention.AttentionBatch(full, [48, 16, 16])
    assert shared.work == alone.work
    assert shared.block_table[:, :2].unique(dim=0).shape[0] == 1
    assert shared.block_table[:, 2].unique().numel() == 3


def test_sequences_of_a_batch_share_no_blocks(full: SimpleNamespace) -> None:
    batch = attention.AttentionBatch(full, [17, 1, 32])
    used = [
        int(i) for row, count in zip(batch.block_table, (2, 1, 2), strict=True) for i in row[:count]
    ]
    assert sorted(used) == list(range(batch.num_blocks))


def test_gathered_keys_equal_the_keys_in_the_blocks(bench: Bench) -> None:
    batch = attention.AttentionBatch(bench, [20 * 512] * 2)
    layer = batch.layer()
    k, v = batch.gathered(layer)
    keys = batch.keys[0]
    assert k.shape == v.shape == (2, batch.heads.keys, keys, batch.heads.dim)
    for seq, key in ((0, 0), (1, 17), (1, keys - 1)):
        block = batch.block_table[seq, key // attention.BLOCK_SIZE]
        stored = layer.kv_cache[block, :, :, key % attention.BLOCK_SIZE]
        assert torch.equal(torch.stack([k[seq, :, key], v[seq, :, key]]), stored)


def test_ragged_lengths_are_compared_with_even_ones_of_as_many_keys() -> None:
    module = importlib.import_module("bench_paged_decode")
    for lengths in module.RAGGED_LENGTHS.values():
        even = module.evened(lengths)
        assert (len(even), sum(even)) == (len(lengths), sum(lengths))
        assert max(even) - min(even) <= 1
        assert max(lengths) > 8 * min(lengths)


@pytest.mark.parametrize(
    ("target", "met"),
    [
        (Target("ratio", 0.8, aim=0.9), True),
        (Target("ratio", 0.81, aim=0.9), False),
        (Target("microseconds", 10.0, aim=7.0), True),
        (Target("microseconds", 9.9, aim=7.0), False),
        (Target("tflops", 400.0, aim=590.0), False),
    ],
)
def test_a_target_is_met_or_missed(bench: Bench, target: Target, met: bool) -> None:
    row = bench.report(ROW, target)
    assert row.met is met
    assert ("PASS: " if met else "MISS: ") + str(target) in row.line()


def test_figures_of_a_row() -> None:
    assert ROW.ratio == pytest.approx(0.8)
    assert "4 MB at 0.400 TB/s, 0.800 of copy" in ROW.line()
    product = Row("prefill", "1x8k", "bfloat16", 1000.0, 0, 10**12, "matmul", 700.0)
    assert product.tflops == pytest.approx(1000.0)
    assert "bytes" not in product.as_json()


def test_a_capture_that_fails_leaves_stream_and_collections_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = ["ours"]

    class Capture:
        """As torch's: it sets its own stream, and keeps it set if it does not end well."""

        def __init__(self, _graph: object) -> None: ...

        def __enter__(self) -> None:
            streams.append("capture's")
            assert not gc.isenabled()

        def __exit__(self, *_: object) -> None:
            raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(torch.cuda, "graph", Capture)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", SimpleNamespace)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams[-1])
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    with pytest.raises(RuntimeError, match="previous error"):
        measure._capture([lambda: None])
    assert streams == ["ours", "capture's", "ours"]
    assert gc.isenabled()


def test_replays_are_timed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    device = _FakeDevice()
    monkeypatch.setattr(measure, "_event", device.event)
    monkeypatch.setattr(measure, "_capture", lambda calls: lambda: [call() for call in calls])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    clock = object.__new__(GraphClock)
    clock._cache = torch.zeros(1)
    calls = [device.work] * 4
    assert clock.microseconds(calls) == pytest.approx(3.0)
    assert device.done == 4 * (measure.RUNS + 5)
    assert measure.RUNS >= 50


class _FakeDevice:
    """Each piece of work takes 3 microseconds."""

    def __init__(self) -> None:
        self.done = 0

    def work(self) -> None:
        self.done += 1

    def event(self) -> _FakeEvent:
        return _FakeEvent(self)


@dataclass
class _FakeEvent:
    device: _FakeDevice
    at: int = 0

    def record(self) -> None:
        self.at = self.device.done

    def elapsed_time(self, end: _FakeEvent) -> float:
        return (end.at - self.at) * 0.003


def test_compilations_after_the_warm_up_are_counted(bench: Bench) -> None:
    def compiling(module: str) -> None:
        fn = SimpleNamespace(module=module, name="_kernel")
        measure.triton.knobs.runtime.jit_post_compile_hook(fn=fn, key="", repr="")

    bench.warm_up(lambda: compiling("paged_kernels.rms_norm"))
    assert bench.as_json()[-1]["met"]
    compiling("torch._inductor")
    compiling("paged_kernels.rms_norm")
    assert bench.compiled == ["_kernel"]
    assert bench.as_json()[-1]["met"] is False


def test_a_peer_that_fails_is_printed_with_its_reason(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise RuntimeError("no compiler\nand a long trace")

    bench.peer("FlexAttention", fail)
    line = capsys.readouterr().out.strip().splitlines()[-1]
    assert line.split() == "FlexAttention did not run: RuntimeError: no compiler".split()


def test_the_search_finds_the_cheapest_configuration() -> None:
    start = DecodeConfig(32, 4, 3, 4, costs=decode_config(90, 128, 2, 16, quantized=False).costs)

    def cost(config: DecodeConfig) -> float:
        if config.tile == 128 and config.num_warps == 4:
            return float("inf")  # does not fit
        return abs(config.tile - 128) + abs(config.num_warps - 8) + config.num_stages

    choices = {"num_stages": (2, 3), "tile": (32, 64, 128), "num_warps": (4, 8)}
    best, lowest = descend(start, choices, cost)
    assert (best.tile, best.num_warps, best.num_stages, lowest) == (128, 8, 2, 2)


DYING = """
import os, signal, time
from measure import Row

def run(bench):
    for name in ("first", "second"):
        bench.report(Row(name, "1", "float32", 1.0, 1, 0, "copy", 1.0))
    if "hanging" in __name__:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        time.sleep(60)
    if "killed" in __name__:
        os.kill(os.getpid(), signal.SIGKILL)
    bench.report(Row("third", "1", "float32", 1.0, 1, 0, "copy", 1.0))
"""


def rows_of(file: Path) -> dict[str, list[str]]:
    """Names of the rows that each benchmark has made itself."""
    found: dict[str, list[str]] = {}
    for row in json.loads(file.read_text())["rows"]:
        if row["name"] in ("first", "second", "third"):
            found.setdefault(row["bench"], []).append(row["name"])
    return found


def test_each_row_is_kept_when_a_benchmark_is_killed_or_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_all = importlib.import_module("run_all")
    monkeypatch.setattr(run_all, "GRACE", 0.1)
    path = os.pathsep.join(map(str, (KERNELS.parent, BENCHMARKS, tmp_path)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([path, os.environ.get("PYTHONPATH", "")]))
    for name in ("good", "killed", "hanging"):
        (tmp_path / f"bench_{name}.py").write_text(DYING)
    file = tmp_path / "results" / "kernels.json"
    assert run_all.run("good", ["--quick"], file)
    assert not run_all.run("killed", ["--quick"], file)
    kept = {"bench_good": ["first", "second", "third"], "bench_killed": ["first", "second"]}
    assert rows_of(file) == kept
    command = [sys.executable, str(BENCHMARKS / "run_one.py"), "hanging", "--quick"]
    hanging = subprocess.Popen([*command, "--json", str(file), "--add"])
    while "second" not in rows_of(file).get("bench_hanging", []):
        assert hanging.poll() is None
        time.sleep(0.02)
    monkeypatch.setattr(run_all, "TIMEOUT", 0.1)
    assert not run_all._waited(hanging)
    assert hanging.returncode == -signal.SIGKILL
    assert rows_of(file) == {**kept, "bench_hanging": ["first", "second"]}
    assert [entry.name for entry in file.parent.iterdir()] == ["kernels.json"]


def test_run_all_collects_the_figures_of_each_benchmark(tmp_path: Path) -> None:
    file = tmp_path / "results" / "kernels.json"
    command = ["run_all.py", "--quick", "--only", "silu_and_mul", "--json", str(file)]
    path = os.pathsep.join([str(KERNELS.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / command[0]), *command[1:]],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "targets missed: none" in done.stdout
    kept = json.loads(file.read_text())
    assert {"device", "commit", "torch", "triton", "python"} <= set(kept["environment"])
    names = [row["name"] for row in kept["rows"]]
    assert names[:2] == ["copy", "matmul"]
    assert {"silu_and_mul", "compilations after warm-up"} <= set(names)
    assert {row["bench"] for row in kept["rows"]} == {"bench_silu_and_mul"}


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["rms_norm", "--sweep"], "--sweep: rms_norm has no launch configurations to search"),
        (["norm"], "NAME: there is no bench_norm.py"),
    ],
)
def test_mistakes_are_named(
    argv: list[str],
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["run_one.py", *argv])
    with pytest.raises(SystemExit) as caught:
        importlib.import_module("run_one").main()
    assert problem in f"{caught.value}{capsys.readouterr().err}"
