"""`paged-backend bench serve`, `sweep` and `prefix` as users run them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
from metrics_page import read_metrics
from paged_loadtest.options import BACKENDS
from paged_loadtest.results import LATENCIES, load_report

from paged_backend.cli import main

pytestmark = pytest.mark.server
SMALL = ["--num-prompts", "12", "--input-len", "40", "--output-len", "10"]


def bench(kind, targets, backend, *words):
    """The report that is saved to the last of the words, after the flags."""
    *flags, path = words
    assert main(["bench", kind, *targets.flags(backend), *flags, "--save", str(path)]) == 0
    return load_report(path)


def settled_tokens(targets, expected=0):
    """The server's count of generated tokens, once it stands still.

    It does not before it is as expected, unless it never is.
    """
    counts = [-1.0, targets.server.metrics()["generation_tokens_total"]]
    deadline = time.monotonic() + 30
    while counts[-1] != counts[-2] or (counts[-1] < expected and time.monotonic() < deadline):
        time.sleep(0.5)
        counts.append(targets.server.metrics()["generation_tokens_total"])
    return counts[-1]


def fails(capsys, *argv):
    """The one line of an error."""
    assert main(["bench", *map(str, argv)]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("paged-backend: error: ")
    return lines[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_serve_counts_what_the_server_counts(targets, backend, tmp_path, capsys):
    before = settled_tokens(targets)
    flags = [*SMALL, "--max-concurrency", "4", "--slo", "ttft:60000", "--slo", "e2e:60000"]
    flags += ["--tokenizer", "demo", "--metrics-url", targets.server.running.metrics_url]
    report = bench("serve", targets, backend, *flags, tmp_path / "run.json")
    (run,) = report.runs
    assert (run.num_completed, run.num_failed, run.errors) == (12, 0, {})
    assert run.num_output_tokens == 120
    assert run.num_input_tokens == 12 * 40
    assert run.num_cached_tokens == 0
    assert run.label == "concurrency 4" and run.max_concurrency == 4
    assert run.goodput == pytest.approx(run.request_throughput)
    assert set(run.latencies) == set(LATENCIES)
    assert len(run.samples["ttft_ms"]) == len(run.samples["e2e_ms"]) == 12
    assert run.server and all(0 <= sample.kv_usage <= 1 for sample in run.server)
    probes = {"triton": 2, "triton-http": 2}.get(backend, 3)  # tokens, before the run
    expected = before + 120 + probes
    assert settled_tokens(targets, expected) == expected
    shown = capsys.readouterr()
    # No progress bar where stderr is no terminal.
    assert re.fullmatch(r"concurrency 4: 12 of 12 requests in \d+\.\d s\n", shown.err)
    for words in (
        "Successful requests",
        "Output token throughput (tok/s)",
        "p99",
        "TTFT",
        "goodput",
    ):
        assert words in shown.out


def test_a_peer_is_measured_in_turn_on_the_same_requests(targets, tmp_path, capsys):
    flags = [*SMALL, "--max-concurrency", "2", "--tokenizer", "demo", "--seed", "901"]
    url = targets.flags("openai")[-1]
    flags += ["--peer-url", url, "--rounds", "2", "--peer-model", "paged_llm"]
    report = bench("serve", targets, "triton", *flags, tmp_path / "run.json")
    labels = [run.label for run in report.runs]
    wanted = [f"concurrency 2, round {number}" for number in (1, 2)]
    assert labels == [wanted[0], f"peer, {wanted[0]}", wanted[1], f"peer, {wanted[1]}"]
    assert [run.num_output_tokens for run in report.runs] == [120] * 4
    assert [run.num_cached_tokens for run in report.runs] == [0] * 4
    shown = capsys.readouterr().out
    assert "Medians of 2 rounds" in shown and "server is better by" in shown
    (row,) = (line for line in shown.splitlines() if "Output token throughput" in line)
    server, peer, ratio, lowest, highest = map(float, re.findall(r"\d+\.\d+", row))
    assert lowest <= ratio <= highest
    ratios = [
        first.output_throughput / second.output_throughput
        for first, second in zip(report.runs[::2], report.runs[1::2], strict=True)
    ]
    assert [lowest, highest] == pytest.approx(sorted(ratios), abs=0.006)
    assert min(server, peer) > 0


def test_a_report_holds_all_that_the_figures_depend_on(targets, tmp_path):
    flags = [*SMALL, "--request-rate", "100", "--burstiness", "2", "--seed", "5"]
    report = bench("serve", targets, "triton", *flags, tmp_path / "run.json")
    assert report.kind == "serve"
    expected = {
        **{"backend": "triton", "base_url": targets.server.running.grpc_url},
        **{"model": "paged_llm", "dataset_name": "random", "num_prompts": 12, "seed": 5},
        **{"input_len": "40", "request_rate": "100", "burstiness": 2.0, "slo": []},
    }
    assert {name: report.config[name] for name in expected} == expected
    assert report.environment["server"].startswith("triton 2.")
    assert {"date", "commit", "device", "cores", "python", "numpy"} <= set(report.environment)
    saved = json.loads((tmp_path / "run.json").read_text())
    assert saved["runs"][0]["output_throughput"] > 0
    assert report.runs[0].request_rate == 100 and report.runs[0].duration_s >= 0.12


def test_runs_find_nothing_of_runs_before_unless_they_want_to(targets, tmp_path):
    flags = [*SMALL, "--seed", "77", "--max-concurrency", "2"]
    cached = [
        bench("serve", targets, "triton", *flags, *more, tmp_path / "run.json")
        .runs[0]
        .num_cached_tokens
        for more in ([], [], ["--no-fresh-cache"], ["--no-fresh-cache"])
    ]
    assert cached[:3] == [0, 0, 0]
    assert cached[3] == 12 * 32  # whole blocks of 16


def test_slos_that_nobody_keeps(targets, tmp_path):
    flags = [*SMALL, "--slo", "itl:0.000001"]
    report = bench("serve", targets, "triton", *flags, tmp_path / "run.json")
    assert report.runs[0].goodput == 0


def test_conversations_and_warm_ups(targets, tmp_path):
    flags = ["--dataset-name", "conversations", "--num-prompts", "3", "--num-turns", "3"]
    flags += ["--tokenizer", "demo", "--num-warmups", "2", "--max-concurrency", "2"]
    report = bench("serve", targets, "triton", *flags, tmp_path / "run.json")
    (run,) = report.runs
    assert (run.num_completed, run.num_failed) == (9, 0)
    assert run.num_cached_tokens > 0  # the history


def test_a_trace_is_sent_at_its_own_times(targets, tmp_path):
    trace = tmp_path / "trace.jsonl"
    entry = {"input_length": 20, "output_length": 4, "hash_ids": [1]}
    trace.write_text("".join(json.dumps({"timestamp": at, **entry}) + "\n" for at in (0, 300, 600)))
    flags = ["--dataset-name", "trace", "--dataset-path", str(trace)]
    report = bench("serve", targets, "triton", *flags, tmp_path / "run.json")
    (run,) = report.runs
    assert run.label == "as the trace has it" and run.num_completed == 3
    assert 0.6 <= run.duration_s < 60  # milliseconds, not seconds


def gains(report):
    """Whether each run is faster than all before it by more than --min-gain says."""
    best, found = 0.0, []
    for run in report.runs:
        found.append(run.output_throughput >= best * (1 + report.config["min_gain"] / 100))
        best = max(best, run.output_throughput)
    return found


def test_a_sweep_doubles_up_to_its_limit(targets, tmp_path, capsys):
    flags = ["--num-prompts", "4", "--input-len", "8", "--output-len", "4", "--up-to", "2"]
    report = bench("sweep", targets, "triton", *flags, tmp_path / "sweep.json")
    assert report.kind == "sweep"
    assert [run.max_concurrency for run in report.runs] == [1, 2]
    assert [run.num_completed for run in report.runs] == [8, 16]
    assert [run.num_cached_tokens for run in report.runs] == [0, 0]
    assert "concurrency" in capsys.readouterr().out


def test_a_sweep_ends_where_two_levels_gain_too_little(targets, tmp_path):
    flags = ["--num-prompts", "4", "--input-len", "8", "--output-len", "4", "--min-gain", "60"]
    report = bench("sweep", targets, "triton-http", *flags, tmp_path / "sweep.json")
    found = gains(report)
    assert found[-2:] == [False, False]
    assert [False, False] not in [found[at : at + 2] for at in range(len(found) - 2)]


@pytest.mark.parametrize(
    "backend", ["triton", pytest.param("openai-chat", marks=pytest.mark.thorough)]
)
def test_prefix_hits_are_those_asked_for(targets, backend, tmp_path, capsys):
    flags = ["--num-prompts", "6", "--output-len", "4", "--prompt-len", "256"]
    flags += ["--hit-rates", "0,50,100", "--tokenizer", "demo"]
    report = bench("prefix", targets, backend, *flags, tmp_path / "prefix.json")
    assert report.kind == "prefix" and report.config["dataset_name"] == "shared-prefix"
    assert report.config["prompt_len"] == 256 and report.config["input_len"] is None
    rates = [run.num_cached_tokens / run.num_input_tokens for run in report.runs]
    assert rates == pytest.approx([0, 0.5, 1], abs=0.07)
    assert [run.num_completed for run in report.runs] == [6, 6, 6]
    assert "cached" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--slo", "ttft500"], "slo: must be one of ttft, tpot, itl, e2e, a colon"),
        (["--slo", "itl:-1"], "slo: must be one of"),
        (["--base-url", "a b"], "base_url must be an address such as 127.0.0.1:8001"),
        (["--request-rate", "x"], "request_rate must be a number above 0 or inf"),
        (["--max-concurrency", "0"], "max_concurrency must be an integer from 1"),
        (["--model", "nope"], "--model: "),
        (["--input-len", "3000"], "does not fit"),
        (["--save", "/missing/run.json"], "--save: there is no folder /missing"),
        (["--save", "/tmp"], "--save: cannot write /tmp"),
        (["--metrics-url", "http://127.0.0.1:1/metrics"], "--metrics-url: cannot read"),
        (["--dataset-name", "sharegpt"], "dataset_path"),
        (["--prompt-format", "text"], "--tokenizer"),
        (["--rounds", "2"], "option rounds needs --peer-url"),
        (["--peer-url", "a b"], "option peer_url must be an address such as"),
        (
            ["--peer-url", "http://127.0.0.1:1", "--tokenizer", "demo"],
            "--peer-url: nobody speaks openai at http://127.0.0.1:1",
        ),
    ],
)
def test_mistakes_are_told_in_one_line(targets, capsys, flags, message):
    assert message in fails(capsys, "serve", *targets.flags("triton"), *flags)


def test_a_malformed_trace_is_told_with_its_line(targets, capsys, tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"timestamp": 0, "input_length": 8, "output_length": 2, "hash_ids": [1]}\n{\n'
    )
    flags = ["--dataset-name", "trace", "--dataset-path", trace]
    assert f"{trace}:2" in fails(capsys, "serve", *targets.flags("triton"), *flags)


def test_prompts_that_the_backend_does_not_take(targets, capsys):
    flags = [*targets.flags("openai"), "--prompt-format", "chat", "--tokenizer", "demo"]
    assert "--backend openai-chat" in fails(capsys, "serve", *flags)


def test_a_server_that_refuses_every_request(targets, capsys):
    flags = [*targets.flags("triton"), "--vocab-size", "5000", "--seed", "3", "--input-len", "200"]
    assert "does not take requests of this workload: " in fails(capsys, "serve", *flags)


def command(kind, url, backend, path):
    flags = ["--backend", backend, "--base-url", url, "--save", str(path)]
    flags += ["--num-prompts", "100000", "--input-len", "16", "--output-len", "16"]
    return [sys.executable, "-m", "paged_backend.cli", "bench", kind, *flags]


@contextmanager
def started(argv):
    """A command that is killed in the end, should it still run."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(argv, text=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for_tokens(server, count):
    deadline = time.monotonic() + 120
    while read_metrics(server.metrics_url)["generation_tokens_total"] < count:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_what_is_killed_has_saved_the_runs_before(targets, tmp_path):
    path = tmp_path / "run.json"
    argv = command("sweep", targets.server.running.grpc_url, "triton", path)
    argv += ["--num-prompts", "16", "--min-gain", "0"]
    with started(argv) as run:
        deadline = time.monotonic() + 120
        while not path.exists():
            assert time.monotonic() < deadline and run.poll() is None
            time.sleep(0.05)
    saved = load_report(path).runs[0]
    assert saved.max_concurrency == 1 and saved.num_completed == 16
    targets.server.wait_for("kv_blocks_used", 0)


def test_ctrl_c_keeps_what_there_is(targets, tmp_path):
    path = tmp_path / "run.json"
    begun = targets.server.metrics()["generation_tokens_total"]
    argv = command("sweep", targets.server.running.grpc_url, "triton", path)
    with started(argv) as run:
        wait_for_tokens(targets.server.running, begun + 400)
        os.kill(run.pid, signal.SIGINT)
        out, err = run.communicate(timeout=120)
    assert run.returncode == 130 and err == ""
    assert "Saved to" in out
    (saved,) = load_report(path).runs
    assert saved.num_completed > 5 and saved.num_failed == 0
    targets.server.wait_for("kv_blocks_used", 0)
