"""The command line: flags from the options, one-line errors, the offline benchmark."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest
from checkpoints import make_checkpoint

from paged_backend.cli import main
from paged_backend.config import EngineConfig

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint("llama3", folder)
    return folder


def fails(capsys, *argv):
    """The one line of an error."""
    assert main(list(argv)) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("paged-backend: error: ")
    return lines[0]


def test_serve_has_a_flag_for_each_option_of_the_engine(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    shown = capsys.readouterr().out
    for spec in fields(EngineConfig):
        if spec.name != "model":
            assert "--" + spec.name.replace("_", "-") in shown
    assert "--no-enable-prefix-caching" in shown
    assert "--served-model-name" in shown


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["serve", "missing/folder/of/mine"],
            "model folder 'missing/folder/of/mine' does not exist",
        ),
        (["serve", "demo", "--block-size", "24"], "block_size must be a power of two"),
        (["serve", "demo", "--gpu-memory-utilization", "1.5"], "up to 1, got 1.5"),
        (["serve", "demo", "--max-num-seqs", "0"], "max_num_seqs must be an integer from 1"),
        (["serve", "demo", "--served-model-name", "a/b"], "a/b"),
        (["bench", "offline", "demo", "--trace", "missing.jsonl"], "cannot read missing.jsonl"),
        (["bench", "offline", "demo", "--max-model-len", "9000"], "must be at most 2048"),
    ],
)
def test_mistakes_are_one_line(capsys, argv, message):
    assert message in fails(capsys, *argv)


def test_a_trace_with_a_broken_line_names_it(capsys, tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"prompt_token_ids": [1, 2], "max_tokens": 2}\n{"max_tokens": 2}\n')
    assert f"{trace}:2: needs" in fails(capsys, "bench", "offline", "demo", "--trace", str(trace))


def test_bench_offline_measures_both_on_one_trace(capsys, folder, tmp_path):
    trace, report = tmp_path / "trace.jsonl", tmp_path / "report.json"
    work = [{"prompt_token_ids": [3 + i] * (9 + i), "max_tokens": 5 + i} for i in range(6)]
    trace.write_text("\n".join(map(json.dumps, work)))
    argv = ["bench", "offline", str(folder), "--trace", str(trace), "--concurrency", "3"]
    assert main([*argv, "--json", str(report), "--max-model-len", "512"]) == 0
    values = json.loads(report.read_text())
    assert values["num_requests"] == 6
    assert values["output_tokens"] == sum(item["max_tokens"] for item in work)
    assert values["engine"]["output_tokens_per_s"] > 0
    assert values["peer_output_tokens_per_s"] > 0
    assert values["speedup"] == pytest.approx(
        values["engine"]["output_tokens_per_s"] / values["peer_output_tokens_per_s"]
    )
    assert 0 < values["engine"]["kv_utilization"] <= 1
    assert "output tokens/s" in capsys.readouterr().out


def test_the_shapes_to_measure_are_those_of_the_readme():
    from paged_backend.models.model_config import load_model_config

    small = load_model_config(ROOT / "loadtest/models/llama-30m")
    smol = load_model_config(ROOT / "loadtest/models/smollm2-135m")
    assert (small.hidden_size, small.num_layers, small.vocab_size) == (512, 8, 8192)
    assert (smol.hidden_size, smol.num_layers, smol.vocab_size) == (576, 30, 49152)
