"""``paged-backend plan`` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_loadtest.results import Report, summarise
from paged_loadtest.timeline import Timeline

from paged_backend.checkpoint.hub import resolve_model
from paged_backend.checkpoint.model_config import load_model_config
from paged_backend.cli import main
from paged_backend.tools.bench import environment
from paged_backend.tools.bench.decode_roofline import DecodeRoofline

ROOT = Path(__file__).parents[2]


def plan(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    """The plan as JSON."""
    assert main(["plan", *argv, "--json"]) == 0
    values: dict[str, Any] = json.loads(capsys.readouterr().out)
    return values


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line that says what is wrong."""
    assert main(["plan", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1
    return lines[0].removeprefix("paged-backend: error: ")


def test_tables_of_llama_3_on_three_gpus(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    gpus = ["--gpu", "a100", "--gpu", "h100", "--gpu", "h200"]
    assert main(["plan", "llama-3-8b", *gpus, "--context", "8192", "--price", "3"]) == 0
    small = capsys.readouterr().out
    assert "8,030,261,248 (8.03 B)" in small
    assert "128 KiB a token in bfloat16, 1 GiB at 8,192 tokens" in small
    assert "a100-80gb" in small and "h100-sxm" in small and "h200" in small
    assert "cost of a million output tokens" in small
    assert main(["plan", "llama-3-70b", *gpus, "--context", "8192"]) == 0
    large = capsys.readouterr().out
    assert "70,553,706,496 (70.55 B)" in large
    assert "320 KiB a token" in large
    assert "2 x h200" in large
    assert "cost of" not in large
    assert "not been measured on GPUs" in large and "not been measured on GPUs" not in small


def test_json_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["llama-3-8b", "--gpu", "h200", "--context", "8192", "--price", "3.6"]
    lengths = ["--input-len", "1000", "--output-len", "24", "--length-sigma", "0"]
    values = plan(capsys, *argv, *lengths)
    known, [gpu] = values["assumptions"], values["gpus"]
    assert known["mean_held"] == 1012.5
    capacity = gpu["capacity"]
    slots = capacity["memory"]["num_blocks"] * 16
    assert capacity["naive"]["slots"] == 8192
    assert capacity["naive"]["waste"] == pytest.approx(1 - 1012.5 / 8192)
    assert capacity["naive"]["sequences"] == slots // 8192
    # 1001 ... 1008 tokens lie in 63 blocks, the other 16 lengths in 64.
    held = 16 * (8 * 63 + 16 * 64) / 24
    assert capacity["paged"]["slots"] == pytest.approx(held)
    assert capacity["paged"]["sequences"] == int(slots / held)
    service = capacity["service"]
    assert service["batch_size"] == 256
    step = next(row["step"] for row in capacity["decode"] if row["batch_size"] == 256)
    seconds = step["seconds"] * 24 / 256 + service_prefill(1000)
    assert service["requests_per_s"] == pytest.approx(1 / seconds)
    assert service["cost_per_million_output"] == pytest.approx(1000 / (24 / seconds))


def service_prefill(num_tokens: int) -> float:
    """Seconds on an H200, bound by computing."""
    attention = 32 * 4 * 4096 * (num_tokens * (num_tokens + 1) // 2)
    return (2 * 6_979_321_856 * num_tokens + attention + 2 * 525_336_576) / 989.5e12


def test_the_same_plan_from_a_name_a_folder_and_a_file(
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = ROOT / "loadtest" / "models" / "llama-30m"
    names = ("llama-30m", str(folder), str(folder / "config.json"))
    first, *others = (plan(capsys, name, "--gpu", "l4") for name in names)
    assert all(other == first for other in others)


def test_a_model_that_does_not_fit_is_said_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    argv = ["llama-3-70b", "--gpu", "l4", "--gpu", "b200", "--context", "8192"]
    [small, large] = plan(capsys, *argv, "--tensor-parallel-size", "1")["gpus"]
    assert small["capacity"] is None
    assert small["problem"] == "1 x 8192 tokens do not fit"
    assert large["capacity"]["memory"]["num_gpus"] == 1
    assert main(["plan", *argv, "--tensor-parallel-size", "1"]) == 0
    assert "l4: 1 x 8192 tokens do not fit." in capsys.readouterr().out
    assert main(["plan", *argv[:3], "--tensor-parallel-size", "1"]) == 0
    assert "do not fit" in capsys.readouterr().out


def test_latent_attention_has_no_8_bit_cache(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    values = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "max_position_embeddings": 8192,
        "num_attention_heads": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 3,
        "vocab_size": 200,
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    argv = [str(tmp_path), "--gpu", "l4"]
    model = plan(capsys, *argv)["model"]
    assert model["attention"] == "MLA" and model["kv_bytes_per_token"] == 3 * (512 + 64) * 4
    message = refusal(capsys, *argv, "--kv-cache-dtype", "fp8")
    assert message == "--kv-cache-dtype: latent attention has no 8-bit KV cache, got fp8"


def test_more_sequences_take_more_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["llama-3-8b", "--gpu", "l4", "--context", "8192"]
    for sequences, num_gpus in (("2", 1), ("3", 2)):
        [gpu] = plan(capsys, *argv, "--sequences", sequences)["gpus"]
        assert gpu["capacity"]["memory"]["num_gpus"] == num_gpus


def test_a_stage_on_each_host(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    argv = ["llama-3-70b", "--gpu", "l4", "--context", "8192", "--nodes", "2", "--dtype", "fp8"]
    [gpu] = plan(capsys, *argv, "--gpus-per-node", "4")["gpus"]
    assert gpu["capacity"]["memory"]["group"] == {"tensor": 4, "pipeline": 2, "gpus_per_node": 4}
    assert main(["plan", *argv, "--network-gb-s", "25"]) == 0
    shown = capsys.readouterr().out
    assert "8 x l4" in shown and "2 x 4" in shown and "one after another" in shown
    assert "Between hosts, each GPU sends" not in shown  # eight fit in one host
    assert main(["plan", *argv, "--gpus-per-node", "4", "--network-gb-s", "25"]) == 0
    assert "Between hosts, each GPU sends 25 GB/s." in capsys.readouterr().out
    [none] = plan(capsys, *argv, "--gpus-per-node", "2")["gpus"]
    assert none["problem"] == "1 x 8192 tokens do not fit on 4 either"


def test_a_faster_link_shortens_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["llama-3-70b", "--gpu", "h200", "--tensor-parallel-size", "8"]
    slow, fast = (
        plan(capsys, *argv, "--link-gb-s", speed)["gpus"][0]["capacity"]["decode"][0]["step"]
        for speed in ("45", "450")
    )
    traffic = 80 * 2 * 2 * 7 / 8 * 8192 * 2
    assert slow["seconds"] - fast["seconds"] == pytest.approx(traffic / 45e9 - traffic / 450e9)


def test_short_contexts_shorten_the_lengths(capsys: pytest.CaptureFixture[str]) -> None:
    known = plan(capsys, "demo", "--context", "100")["assumptions"]
    assert (known["input_len"], known["output_len"]) == (75, 25)


# Results


def timeline(sent_s: float, num_cached: int) -> Timeline:
    """100 tokens in, 11 out, the first after half a second, the last after one and a half."""
    arrivals = [sent_s + 0.5 + index / 10 for index in range(11)]
    return Timeline(sent_s, arrivals, 100, 11, num_cached)


def test_results_of_a_load_stand_beside_the_roofline(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Four requests of 1.5 s in 3 s: two at once on average.
    calls = [timeline(start, 40) for start in (0.0, 0.0, 1.5, 1.5)]
    run = summarise("c2", calls, 3.0, max_concurrency=2, request_rate=None)
    empty = summarise("c4", [], 3.0, max_concurrency=4, request_rate=None)
    path = tmp_path / "results.json"
    Report("sweep", {}, {}, [run, empty]).save(path)
    argv = ["llama-30m", "--gpu", "l4", "--price", "1", "--from-results", str(path)]
    [row] = plan(capsys, *argv)["gpus"][0]["capacity"]["measured"]
    seen = row["measurement"]
    assert seen["batch_size"] == pytest.approx(2)
    assert seen["held"] == 105.5
    assert seen["tokens_per_s"] == pytest.approx(44 / 3)
    assert (seen["prompt"], seen["output"]) == (60, 11)
    assert row["roofline_tokens_per_s"] > seen["tokens_per_s"]
    assert row["cost_per_million_output"] == pytest.approx(1e6 / (44 / 3) / 3600)
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["plan", *argv]) == 0
    assert "Measured, compared with the roofline of 1 x l4" in capsys.readouterr().out


def test_results_of_the_decode_bench_stand_beside_the_roofline(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "_buffer_bytes", lambda device: 2**20)
    path = tmp_path / "decode.json"
    bench = ["bench", "decode", "demo", "--context", "64", "--batch-sizes", "1,4,4096"]
    assert main([*bench, "--steps", "4", "--no-peer", "--json", str(path)]) == 0
    capsys.readouterr()
    argv = ["demo", "--gpu", "here=4:20:0.19", "--dtype", "float32", "--from-results", str(path)]
    rows = plan(capsys, *argv)["gpus"][0]["capacity"]["measured"]
    assert [row["measurement"]["label"] for row in rows] == ["1 x 64", "4 x 64"]
    written = json.loads(path.read_text())
    # Both count the same bytes: at the same speeds the two rooflines are one.
    config = load_model_config(resolve_model("demo"))
    roofline = DecodeRoofline(config, torch.float32, 20e9, 0.19e12)
    for row, measured in zip(rows, written["rows"], strict=False):
        tokens = measured["figures"]["kv_tokens"]
        limit = measured["batch_size"] / roofline.step_seconds(measured["batch_size"], tokens)
        assert row["roofline_tokens_per_s"] == pytest.approx(limit, rel=0.01)


def test_results_without_a_completed_request_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "results.json"
    run = summarise("c1", [], 1.0, max_concurrency=1, request_rate=None)
    Report("serve", {}, {}, [run]).save(path)
    problem = refusal(capsys, "llama-30m", "--from-results", str(path))
    assert problem == f"{path} holds no run with completed requests: measure again"


@pytest.mark.parametrize("content", ["[]", "{", '{"schema": 1}', '{"rows": [3]}', '{"rows": 3}'])
def test_files_that_hold_no_results(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str
) -> None:
    path = tmp_path / "results.json"
    path.write_text(content)
    assert str(path) in refusal(capsys, "llama-30m", "--from-results", str(path))


# Mistakes


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["nowhere"], "model: no config.json at nowhere; give a folder or a file, or one of demo"),
        (["llama-3-8b", "--gpu", "h20"], "--gpu: 'h20' is not known; did you mean h200?"),
        (["llama-3-8b", "--price", "-3"], "--price: must be money for an hour of one GPU, above 0"),
        (["llama-3-8b", "--price", "1", "--price", "2"], "--price: give it once"),
        (["llama-3-8b", "--context", "131073"], "--context: the model was made for 131072 tokens"),
        (["llama-3-8b", "--context", "0"], "--context: must be an integer from 2"),
        (["llama-3-8b", "--tensor-parallel-size", "3"], "--tensor-parallel-size: the heads divide"),
        (
            ["llama-3-8b", "--pipeline-parallel-size", "33"],
            "--pipeline-parallel-size: the model has 32 layers, got 33 stages",
        ),
        (
            ["llama-3-8b", "--nodes", "1", "--tensor-parallel-size", "16"],
            "--nodes: 16 GPUs need 2 hosts of 8, got 1",
        ),
        (["llama-3-8b", "--nodes", "0"], "--nodes: must be an integer from 1 up to 64"),
        (["llama-3-8b", "--network-gb-s", "0"], "--network-gb-s: must be a number from 0.1"),
        (["llama-3-8b", "--block-size", "12"], "option block_size must be a power of two"),
        (
            ["llama-3-8b", "--length-sigma", "nan"],
            "--length-sigma: must be a number from 0 up to 3",
        ),
        (
            ["llama-3-8b", "--context", "512", "--input-len", "500"],
            "--input-len: 500 and an output of 128 tokens exceed the context of 512",
        ),
        (
            ["llama-3-8b", "--gpu", "l4", "--gpu", "l40s", "--from-results", "x"],
            "--from-results: give the one --gpu that the results were measured on",
        ),
        (["llama-3-8b", "--from-results", "nowhere"], "cannot read nowhere: No such file"),
    ],
)
def test_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str], argv: list[str], problem: str
) -> None:
    assert refusal(capsys, *argv).startswith(problem)


def quantized(folder: Path, config: dict[str, Any]) -> str:
    """Llama-3-8B with a quantization_config."""
    values = json.loads((ROOT / "loadtest/models/llama-3-8b/config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"quantization_config": config}))
    return str(folder)


LINEAR, REST = 6_979_321_856, 8_030_261_248 - 6_979_321_856
OUTPUTS = 32 * (4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096)  # outputs of all linear layers
BLOCKS = LINEAR // 128**2
AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True}
FP8 = {"quant_method": "modelopt", "quant_algo": "FP8"}


@pytest.mark.parametrize(
    ("config", "weights", "kv"),
    [
        (AWQ | {"group_size": 128}, LINEAR * 66.5 / 128, "bfloat16"),
        (AWQ | {"group_size": 48}, 2 * LINEAR, "bfloat16"),  # no kernel has these groups
        (FP8 | {"kv_cache_quant_algo": "FP8"}, LINEAR + 4 * OUTPUTS, "fp8"),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128]},
            LINEAR + 4 * BLOCKS,
            "bfloat16",
        ),
        (
            {"quant_method": "gptq", "bits": 8, "group_size": -1, "dynamic": {"-:.*_proj": {}}},
            2 * LINEAR,
            "bfloat16",
        ),
    ],
)
def test_a_quantized_checkpoint_as_a_gpu_keeps_it(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    config: dict[str, Any],
    weights: float,
    kv: str,
) -> None:
    model = plan(capsys, quantized(tmp_path, config), "--gpu", "h200")["model"]
    assert model["dtype"] == config["quant_method"]
    assert model["kv_cache_dtype"] == kv
    # Four bits of zero points for each of 32 or 112 groups of a row are whole words.
    assert model["weight_bytes"] == weights + 2 * REST


def test_a_quantized_output_layer_is_counted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = AWQ | {"group_size": 128}
    plain = plan(capsys, quantized(tmp_path, config))["model"]["weight_bytes"]
    with_head = plan(capsys, quantized(tmp_path, config | {"lm_head": True}))["model"]
    head = 128256 * 4096
    assert with_head["weight_bytes"] == plain - 2 * head + head * 66.5 / 128


def test_a_wrong_quantization_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = quantized(tmp_path, {"quant_method": "awq"})
    assert "bits" in refusal(capsys, folder)
    assert main(["plan", folder, "--dtype", "int4"]) == 0


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"hidden_size": None}, "hidden_size is missing; it must be an integer from 1"),
        ({"num_key_value_heads": 3}, "num_key_value_heads (3) must divide num_attention_heads (8)"),
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures must be one of LlamaForCausalLM"),
        ({"torch_dtype": "int3"}, "torch_dtype must be one of float32, bfloat16, float16"),
    ],
)
def test_a_wrong_config_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    values = json.loads((ROOT / "loadtest/models/llama-30m/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | changes))
    assert refusal(capsys, str(tmp_path)).startswith(f"{tmp_path / 'config.json'}: {problem}")
