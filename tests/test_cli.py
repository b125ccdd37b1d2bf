"""The command line: flags from the options, one-line errors, the offline benchmark."""

from __future__ import annotations

import argparse
import json
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from error_lines import error_line

from paged_backend.cli import COMMANDS, main
from paged_backend.tools.bench import constraint_cost
from paged_backend.tools.bench.engine_run import run_engine
from paged_backend.values.config import EngineConfig

ROOT = Path(__file__).parent.parent
OFFLINE = ["bench", "offline"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint("llama3", folder)
    return folder


def fails(capsys, *argv):
    """The one line of an error."""
    assert main(list(argv)) == 2
    line = error_line(capsys.readouterr().err)
    assert line.startswith("paged-backend: error: ")
    return line


def test_each_command_describes_itself():
    """A help text with a per cent sign that is not doubled makes `--help` of its command fail."""
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers()
    for command in COMMANDS:
        command.add_parser(subparsers)
    parsers = [parser]
    for known in parsers:  # which grows
        assert known.format_help()
        for action in known._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
    assert len(parsers) > 20


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
        (["serve", "demo", "--served-model-name", "a/b"], "'a/b' needs --openai-port"),
        (["serve", "demo", "--served-model-name", "a", "b"], "several names need --openai-port"),
        (["serve", "demo", "--served-model-name", "a b"], "without spaces and '=', got 'a b'"),
        (
            ["serve", "--model-repository", "x", "--served-model-name", "a=b"],
            "needs --openai-port with --model-repository",
        ),
        (
            ["serve", "demo", "--chat-template", "missing.jinja"],
            "option chat_template names no file: 'missing.jinja'",
        ),
        (
            ["serve", "demo", "--default-chat-template-kwargs", "{"],
            "default_chat_template_kwargs must be a JSON object or null, got '{'",
        ),
        (["serve", "--model-repository", "missing"], "no model repository at missing"),
        (["serve", "demo-tools", "--model-repository", "x"], "MODEL: cannot be used with"),
        (
            ["serve", "--instances", "2", "--model-repository", "x"],
            "--instances: cannot be used with",
        ),
        (["serve", "--max-num-seqs", "2", "--model-repository", "x"], "--max-num-seqs: cannot be"),
        (["serve", "--write-to", "y", "--model-repository", "x"], "--write-to: cannot be used"),
        (
            [*OFFLINE, "demo", "--dataset-name", "trace", "--dataset-path", "missing.jsonl"],
            "cannot read missing.jsonl",
        ),
        ([*OFFLINE, "demo", "--dataset-name", "sharegpt"], "dataset_path must name the file"),
        ([*OFFLINE, "demo", "--dataset-name", "conversations"], "must not be conversations"),
        ([*OFFLINE, "demo", "--num-prompts", "0"], "num_prompts must be an integer from 1"),
        ([*OFFLINE, "demo", "--input-len", "2040"], "max_model_len is 2048"),
        ([*OFFLINE, "demo", "--max-model-len", "9000"], "must be at most 2048"),
    ],
)
def test_mistakes_are_one_line(capsys, argv, message):
    assert message in fails(capsys, *argv)


def test_the_version_is_the_one_of_the_package(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert capsys.readouterr().out == f"paged-backend {version}\n"


def test_a_trace_with_a_broken_line_names_it(capsys, tmp_path):
    trace = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 2, "output_length": 2, "hash_ids": [1]}
    trace.write_text(json.dumps(line) + '\n{"timestamp": 5}\n')
    argv = [*OFFLINE, "demo", "--dataset-name", "trace", "--dataset-path", str(trace)]
    assert f"{trace}:2: needs" in fails(capsys, *argv)


def test_bench_offline_measures_a_trace(capsys, folder, tmp_path):
    trace, report = tmp_path / "trace.jsonl", tmp_path / "report.json"
    work = [
        {"timestamp": i, "input_length": 11 + i % 5, "output_length": 5 + i, "hash_ids": [i, 7, 8]}
        for i in range(6)
    ]
    trace.write_text("\n".join(map(json.dumps, work)))
    argv = [*OFFLINE, str(folder), "--dataset-name", "trace", "--dataset-path", str(trace)]
    argv += ["--trace-block-size", "5", "--concurrency", "3", "--rounds", "1", "--no-peer"]
    assert main([*argv, "--json", str(report), "--max-model-len", "512"]) == 0
    values = json.loads(report.read_text())
    assert values["num_requests"] == 6
    assert values["prompt_tokens"] == sum(item["input_length"] for item in work)
    assert values["output_tokens"] == sum(item["output_length"] for item in work)
    assert values["workload"]["dataset_path"] == str(trace)
    assert values["prefix"]["ttft_ms_cached"] > 0 and values["prefix"]["ttft_ms_without"] > 0
    assert values["engine"]["output_tokens_per_s"] > 0
    trace, *_ = values["measurements"]
    assert trace["engine"] == pytest.approx(values["engine"]["output_tokens_per_s"])
    assert 0 < values["engine"]["kv_utilization"] <= 1
    assert "output tokens/s" in capsys.readouterr().out


def test_bench_offline_constrains_a_part_of_the_requests(capsys, tmp_path):
    report = tmp_path / "report.json"
    schema = {"type": "array", "items": {"enum": ["function", "module"]}, "minItems": 90}
    constraint = json.dumps({"json": schema, "disable_any_whitespace": True})
    argv = [*OFFLINE, "demo", "--no-peer", "--num-prompts", "5", "--output-len", "20"]
    argv += ["--structured-outputs", constraint, "--structured-output-ratio", "0.4"]
    assert main([*argv, "--rounds", "2", "--json", str(report)]) == 0
    values = json.loads(report.read_text())
    assert values["constraint"] == {"structured_outputs": constraint, "ratio": 0.4}
    assert values["num_constrained_requests"] == 2
    assert values["output_tokens"] == 5 * 20
    assert values["engine"]["num_forced_tokens"] > 0
    assert values["engine"]["median_itl_ms_unconstrained"] > 0
    assert [item["name"] for item in values["measurements"]] == ["trace", "unconstrained_itl"]
    rate, itl = (item["rounds"] for item in values["measurements"])
    assert len(rate) == len(itl) == 2
    assert all(pair["engine"] > 0 and pair["peer"] > 0 for pair in rate + itl)
    shown = capsys.readouterr().out
    assert "2 (json)" in shown and "without" in shown


def test_bench_offline_runs_other_prompts_without_the_constraint_in_turn(tmp_path, monkeypatch):
    runs = []

    def watched(engine, worker, jobs, at_once):
        runs.append(jobs)
        return run_engine(engine, worker, jobs, at_once)

    monkeypatch.setattr(constraint_cost, "run_engine", watched)
    report = tmp_path / "report.json"
    argv = [*OFFLINE, "demo", "--no-peer", "--num-prompts", "3", "--output-len", "8"]
    argv += ["--structured-outputs", '{"regex": "(.|\\\\n)*"}', "--rounds", "2"]
    assert main([*argv, "--json", str(report)]) == 0
    values = json.loads(report.read_text())
    (rate,) = values["measurements"]  # no request is free, so there is no ITL of such requests
    assert len(rate["rounds"]) == 2
    grammars = [[bool(job.grammar) for job in jobs] for jobs in runs]
    assert grammars == [[True] * 3, [False] * 3] * 3  # the first pair is the warm-up
    prompts = [tuple(job.prompt) for jobs in runs for job in jobs]
    assert len(set(prompts)) == len(prompts)


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        ("{", "structured_outputs"),
        ('{"regex": "["}', "structured_outputs.regex"),
        ('{"choice": []}', "structured_outputs.choice"),
    ],
)
def test_a_constraint_of_bench_offline_is_checked(capsys, constraint, message):
    argv = [*OFFLINE, "demo", "--no-peer", "--num-prompts", "1"]
    assert message in fails(capsys, *argv, "--structured-outputs", constraint)


@pytest.mark.parametrize("ratio", ["0", "1.5"])
def test_a_share_of_constrained_requests_is_above_zero_and_at_most_one(capsys, ratio):
    with pytest.raises(SystemExit):
        main([*OFFLINE, "demo", "--structured-output-ratio", ratio])
    assert "--structured-output-ratio" in capsys.readouterr().err


def test_the_shapes_to_measure_are_those_of_the_readme():
    from paged_backend.checkpoint.model_config import load_model_config

    small = load_model_config(ROOT / "loadtest/models/llama-30m")
    smol = load_model_config(ROOT / "loadtest/models/smollm2-135m")
    assert (small.hidden_size, small.num_layers, small.vocab_size) == (512, 8, 8192)
    assert (smol.hidden_size, smol.num_layers, smol.vocab_size) == (576, 30, 49152)
