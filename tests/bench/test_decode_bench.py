"""The decode benchmark: rows, targets, the peer's process, and what is read from traces."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from oracle import make_engine

from paged_backend.checkpoint.model_config import load_model_config
from paged_backend.cli import main
from paged_backend.tools.bench.decode_engine import DecodeBench, compilations
from paged_backend.tools.bench.decode_peer import SteadyPeer
from paged_backend.tools.bench.decode_report import DecodeReport, DecodeTarget, IdleShare
from paged_backend.tools.bench.decode_roofline import DecodeRoofline
from paged_backend.tools.bench.device_trace import device_gaps
from paged_backend.tools.bench.peer_options import PeerOptions
from paged_backend.tools.bench.peer_process import PeerSettings
from paged_backend.tools.bench.peers.transformers_peer import steady_rate
from paged_backend.tools.bench.prefix import REPEATS, SUFFIX_TOKENS, time_prefix
from paged_backend.values.config import EngineConfig

MODELS = Path(__file__).parents[2] / "loadtest/models"
SMALL = EngineConfig(device="cpu", dtype="float32", kv_cache_memory_bytes=2**22)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint("llama3", folder)
    return folder


def steady_peer(folder, seconds):
    settings = PeerSettings(str(folder), "auto", "cpu", "float32", 2, 512, 8, 512, 2**20)
    return SteadyPeer(PeerOptions("transformers"), settings, seconds)


def test_bench_decode_measures_what_fits(capsys, folder, tmp_path):
    path = tmp_path / "report.json"
    argv = ["bench", "decode", str(folder), "--batch-sizes", "1,3,9", "--context", "32,480"]
    argv += ["--steps", "4", "--json", str(path), "--no-peer", "--max-num-seqs", "8"]
    assert main([*argv, "--max-model-len", "512"]) == 0
    report = json.loads(path.read_text())
    rows = {(row["context"], row["batch_size"]): row for row in report["rows"]}
    for batch_size in (1, 3):
        figures = rows[32, batch_size]["figures"]
        assert figures["tokens_per_s"] > 0 and figures["step_ms"] > 0
        # Prompts, steps of the warm-up, and half of the timed ones: no request shares a prefix.
        assert 40 * batch_size <= figures["kv_tokens"] <= 50 * batch_size
        least = figures["roofline_ms"] / 1e3
        assert figures["of_roofline"] == pytest.approx(least * figures["tokens_per_s"] / batch_size)
    assert rows[32, 9]["problem"] == "does not fit: max_num_seqs is 8"
    assert "max_model_len is 512" in rows[480, 1]["problem"]
    assert report["prefix"]["prefix_tokens"] == 464
    assert report["prefix"]["ttft_ms_cached"] > 0 and report["prefix"]["ttft_ms_without"] > 0
    assert report["peer"] is report["idle"] is report["compiled_after_warm_up"] is None
    assert report["options"]["max_num_batched_tokens"] == 512
    assert report["complete"] is True
    assert report["copy_bytes_per_s"] > 0 and report["matmul_flops_per_s"] > 0
    assert {"commit", "date", "device", "torch"} <= report["environment"].keys()
    shares = [target for target in report["targets"] if target["name"].startswith("share")]
    assert [target["met"] for target in shares] == [
        rows[32, batch_size]["figures"]["of_roofline"] >= 0.75 for batch_size in (1, 3)
    ]
    assert "does not fit" in capsys.readouterr().out


KILLED = """
import os, signal, sys
from paged_backend.tools.bench import environment
from paged_backend.tools.bench.decode_engine import DecodeBench
from paged_backend.cli import main

environment._buffer_bytes = lambda device: 2**20

time_steps = DecodeBench._time_steps

def killed(self, context, batch_size):
    if batch_size == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return time_steps(self, context, batch_size)

DecodeBench._time_steps = killed
main(sys.argv[1:])
"""


def test_a_run_that_is_killed_leaves_the_rows_that_it_has_measured(folder, tmp_path):
    path = tmp_path / "results" / "report.json"
    argv = ["bench", "decode", str(folder), "--batch-sizes", "1,2,3", "--context", "32"]
    argv += ["--steps", "4", "--json", str(path), "--device", "cpu", "--max-num-seqs", "8"]
    done = subprocess.run([sys.executable, "-c", KILLED, *argv], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    report = json.loads(path.read_text())
    assert [row["batch_size"] for row in report["rows"]] == [1, 2]
    assert all(row["figures"]["tokens_per_s"] > 0 for row in report["rows"])
    assert report["complete"] is False
    assert report["prefix"] is report["peer"] is None
    assert {"commit", "device", "torch"} <= report["environment"].keys()
    assert [file.name for file in path.parent.iterdir()] == ["report.json"]


def test_a_path_that_cannot_be_written_ends_the_run_before_it_measures(folder, tmp_path, capsys):
    (tmp_path / "file").touch()
    argv = ["bench", "decode", str(folder), "--batch-sizes", "1", "--context", "32", "--no-peer"]
    with pytest.raises(FileExistsError):
        main([*argv, "--json", str(tmp_path / "file" / "report.json")])
    assert "tokens/s" not in capsys.readouterr().out


def test_a_batch_that_the_pool_cannot_hold_does_not_fit(capsys, folder):
    argv = ["bench", "decode", str(folder), "--batch-sizes", "8", "--context", "200", "--no-peer"]
    shape = load_model_config(folder)
    token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * 4
    argv += ["--kv-cache-memory-bytes", str(1000 * token), "--max-model-len", "512"]
    assert main(argv) == 0
    assert "KV blocks, there are 61" in capsys.readouterr().out


def test_the_second_prompt_of_each_pair_finds_the_prefix(folder):
    engine = make_engine(folder)
    figures = time_prefix(engine, EngineConfig(), 256, np.random.default_rng(0))
    assert (figures.prefix_tokens, figures.suffix_tokens) == (256, SUFFIX_TOKENS)
    assert engine.stats().num_prompt_tokens == REPEATS * 2 * (256 + SUFFIX_TOKENS)
    assert engine.stats().num_cache_hits == REPEATS * 256


@pytest.mark.parametrize("counts", ["0", "1,,2", "many"])
def test_counts_are_whole_numbers_from_one(counts, capsys):
    with pytest.raises(SystemExit):
        main(["bench", "decode", "demo", "--batch-sizes", counts])
    assert "--batch-sizes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "met", "shown"),
    [
        (DecodeTarget("a", 9.0, 8.0, at_least=True), True, "a: 9 (>= 8: met)"),
        (DecodeTarget("a", 7.9, 8.0, at_least=True), False, "a: 7.9 (>= 8: missed)"),
        (DecodeTarget("a", 0.03, 0.03), False, "a: 0.03 (< 0.03: missed)"),
        (DecodeTarget("a", 0.0, 0.03), True, "a: 0 (< 0.03: met)"),
        (DecodeTarget("a", 0, 0), True, "a: 0 (= 0: met)"),
        (DecodeTarget("a", 1, 0), False, "a: 1 (= 0: missed)"),
        (DecodeTarget("a", None, 0), None, "a: not measured (= 0)"),
    ],
)
def test_targets(target, met, shown):
    assert target.met is met
    assert target.line() == shown


def test_the_roofline_of_the_model_to_measure():
    config = load_model_config(MODELS / "llama-3-8b")
    roofline = DecodeRoofline(config, torch.bfloat16, 4.3e12, 790e12)
    assert roofline.weight_bytes == 2 * (8_030_261_248 - 128_256 * 4096)
    assert roofline.kv_bytes_per_token == 131_072
    assert 64 / roofline.step_seconds(64, 64 * 1024) == pytest.approx(11_661, abs=1)


def test_the_products_of_a_large_batch_take_longer_than_reading_the_weights():
    config = load_model_config(MODELS / "llama-3-8b")
    roofline = DecodeRoofline(config, torch.bfloat16, 4.3e12, 790e12)
    cache = 256 * 1024 * 131_072 / 4.3e12
    products = 2 * 7_504_924_672 * 256 / 790e12
    assert roofline.step_seconds(256, 256 * 1024) == pytest.approx(products + cache)
    assert products > 1.39 * roofline.weight_bytes / 4.3e12
    # 184 sequences are where the two take as long.
    for batch_size, seconds in ((183, roofline.weight_bytes / 4.3e12), (185, 185 * products / 256)):
        rest = roofline.step_seconds(batch_size, batch_size) - batch_size * 131_072 / 4.3e12
        assert rest == pytest.approx(seconds)


def test_a_tied_embedding_is_read_and_a_window_bounds_the_cache(tmp_path):
    make_checkpoint("mistral", tmp_path)
    config = load_model_config(tmp_path)
    (window,) = set(config.windows)
    roofline = DecodeRoofline(config, torch.float32, 1e9, 1e12)
    assert roofline.step_seconds(2, 20 * window) == roofline.step_seconds(2, 2 * window)
    assert roofline.step_seconds(2, 2 * window) > roofline.step_seconds(2, window)
    smol = load_model_config(MODELS / "smollm2-135m")
    weights = DecodeRoofline(smol, torch.float32, 1e9, 1e12).weight_bytes
    assert weights == 4 * 134_515_008


def test_quantized_weights_and_caches_count_with_the_bytes_that_are_stored():
    config = load_model_config(MODELS / "llama-3-8b")
    embedding = 128_256 * 4096
    held = 2 * embedding + (8_030_261_248 - embedding) // 2  # all else in 4 bits
    stored = 2 * 32 * 8 * (128 + 4)  # int8 with a scale for each token and head
    roofline = DecodeRoofline(
        config, torch.bfloat16, 4.3e12, 790e12, held_bytes=held, kv_bytes_per_token=stored
    )
    weights = (8_030_261_248 - embedding) // 2
    assert roofline.weight_bytes == weights
    assert roofline.step_seconds(8, 8 * 1024) == (
        pytest.approx((weights + 8 * 1024 * stored) / 4.3e12)
    )
    # The elements to multiply are as many as before.
    products = 2 * 7_504_924_672 * 256 / 790e12
    assert roofline.step_seconds(256, 256) == pytest.approx(products + 256 * stored / 4.3e12)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_the_bench_reads_the_bytes_from_the_engine(folder, quantization):
    shape = load_model_config(folder)
    options = {"quantization": quantization, "kv_cache_dtype": "int8_per_token_head"}
    config = replace(SMALL, **options)
    roofline = DecodeBench(config, folder, 4).roofline
    heads = 2 * shape.num_layers * shape.num_kv_heads
    assert roofline.kv_bytes_per_token == heads * (shape.head_dim + 4)
    plain = DecodeRoofline(shape, torch.float32, 1.0, 1.0).weight_bytes
    if quantization is None:
        assert (roofline.weight_bytes, roofline.flops_per_s < math.inf) == (plain, True)
    else:
        assert roofline.weight_bytes < plain / 2
        assert roofline.flops_per_s == math.inf  # inputs are rounded, too


def test_gaps_between_the_kernels_of_a_graph_have_no_target(capsys):
    report = DecodeReport(
        **dict.fromkeys(field.name for field in fields(DecodeReport))
        | {"rows": [], "first_tokens": []}
    )
    report = replace(report, idle=IdleShare(32, 1024, between_launches=0.01, within_graphs=0.07))
    assert [target.met for target in report.targets() if "idle" in target.name] == [True]
    report.print()
    assert "32 x 1024: device idle between the kernels of a CUDA graph: 0.07" in (
        capsys.readouterr().out
    )


def device_event(start, end, launch, kind="kernel"):
    return {
        "ph": "X",
        "cat": kind,
        "ts": start,
        "dur": end - start,
        "args": {"correlation": launch},
    }


def test_gaps_are_told_apart_by_launch():
    events = [
        {"ph": "M", "name": "process_name", "args": {}},
        {"ph": "X", "cat": "cuda_runtime", "ts": 0, "dur": 500, "args": {"correlation": 7}},
        device_event(160, 200, 3),
        device_event(100, 110, 1, "gpu_memcpy"),
        device_event(120, 140, 2),  # 10 after another launch
        device_event(144, 150, 2),  # 4 within the launch
        device_event(145, 148, 9),  # on another stream, within the one before
    ]
    between, within = device_gaps(events)
    assert between == pytest.approx((10 + 10) / 100)
    assert within == pytest.approx(4 / 100)
    assert device_gaps(events[:2]) is None


def test_compilations_are_noted_until_the_end():
    knobs = pytest.importorskip("triton.knobs")
    from triton.runtime.jit import JitFunctionInfo

    with compilations(torch.device("cuda")) as names:
        knobs.runtime.jit_post_compile_hook(repr="", fn=JitFunctionInfo("m", "norm", None))
    assert names == ["norm"]
    assert knobs.runtime.jit_post_compile_hook is None
    with compilations(torch.device("cpu")) as names:
        assert names is None


def test_the_peer_counts_only_while_all_requests_decode():
    assert steady_rate([[0.0, 1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0]]) == pytest.approx(2.0)
    with pytest.raises(RuntimeError, match="before the last began"):
        steady_rate([[0.0, 1.0], [2.0, 3.0]])


def test_the_peer_runs_in_a_process_of_its_own(folder):
    with steady_peer(folder, 120) as peer:
        row = peer.row([[*range(3, 35)]] * 2, 0, 0, 100.0)
        assert peer.problem is None
    assert (row.context, row.batch_size, row.step_ms) == (32, 2, None)
    assert row.tokens_per_s > 0 and row.ratio == 100.0 / row.tokens_per_s
    assert peer.about["attention"] == "sdpa"


def test_a_peer_that_fails_or_hangs_is_reported(folder, monkeypatch):
    with steady_peer(folder, 0.01) as peer:
        assert peer.problem == "peer transformers: did not answer within 0.01 s"
        assert peer.row([[3]], 0, 0, 1.0) is None
    monkeypatch.setattr(sys, "executable", "false")
    with steady_peer(folder, 60) as peer:
        assert peer.problem == "peer transformers: ended with exit status 1"


def test_bench_host_times_the_three_parts_of_a_step(capsys):
    assert main(["bench", "host", "--batch-sizes", "1,8", "--context", "40", "--steps", "20"]) == 0
    _, *rows = capsys.readouterr().out.splitlines()
    for row, batch_size in zip(rows, ("1", "8"), strict=True):
        found, context, *times, total = row.split()
        assert (found, context) == (batch_size, "40")
        # Each of the four numbers is rounded to a microsecond.
        assert sum(map(float, times)) == pytest.approx(float(total), abs=0.0021)
        assert all(float(value) > 0 for value in times)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.thorough)])
def test_bench_experts_compares_with_reading_the_chosen_ones(capsys, dtype: str) -> None:
    sizes = ["--num-experts", "4", "--num-experts-per-tok", "4", "--hidden-size", "64"]
    sizes += ["--intermediate-size", "96", "--batch-sizes", "1,16", "--rounds", "3"]
    assert main(["bench", "experts", *sizes, "--dtype", dtype]) == 0
    _, *rows = capsys.readouterr().out.splitlines()
    for row, batch_size in zip(rows, ("1", "16"), strict=True):
        found, experts, megabytes, compute, _, ratio = row.split()
        assert (found, experts) == (batch_size, "4")
        size = 4 * 3 * 64 * 96 * (4 if dtype == "float32" else 2)
        assert float(megabytes) == pytest.approx(size / 1e6, abs=0.06)
        assert float(compute) > 0 and float(ratio) > 0


def test_bench_states_compares_with_scaling_them(capsys) -> None:
    assert main(["bench", "states", "--batch-sizes", "2", "--prompt", "3", "--rounds", "1"]) == 0
    _, *rows = capsys.readouterr().out.splitlines()
    wanted = [("causal_conv", 98304), ("gated_delta", 2**21), ("selective_scan", 5 * 2**20)]
    for (name, num_bytes), *pair in zip(wanted, rows[::2], rows[1::2], strict=True):
        for row, sequences, total in zip(pair, (2, 1), (2, 3), strict=True):
            function, *numbers = row.split()
            assert (function, *map(int, numbers[:2])) == (name, sequences, total)
            assert float(numbers[2]) == pytest.approx(sequences * num_bytes / 1e6, abs=0.06)
            assert all(float(number) > 0 for number in numbers[5:])


def test_bench_experts_refuses_more_experts_than_there_are(capsys) -> None:
    assert main(["bench", "experts", "--num-experts", "4", "--num-experts-per-tok", "5"]) != 0
    assert "--num-experts-per-tok must be at most 4" in capsys.readouterr().err
