"""The offline benchmark: rounds in turn with a peer's process, ratios, and peers that fail."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from checkpoints import make_checkpoint
from error_lines import error_line

from paged_backend.cli import main
from paged_backend.tools.bench import offline, peer_options
from paged_backend.tools.bench.comparison import Comparison, Pair
from paged_backend.tools.bench.environment import FLAGS, StolenTime, cpu_flags
from paged_backend.tools.bench.measurements import Job, MeasurementPlan
from paged_backend.tools.bench.peer_options import PeerOptions
from paged_backend.tools.bench.peer_process import PeerError, PeerProcess, PeerSettings
from paged_backend.values.errors import ConfigError

NAMES = ["trace", "one_request", "first_token", "common_prefix"]

FAKE = """
import time

class Peer:
    about = {"fake": "1.0"}

    def __init__(self, settings):
        print("loads", settings["dtype"])
        assert settings["threads"] == 2
        self.jobs = []

    def add(self, index, prompt, max_tokens):
        self.jobs.append((index, prompt, max_tokens))

    def step(self):
        index, prompt, max_tokens = self.jobs.pop(0)
        return [(index, max_tokens)]
"""


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline, "SETTLE_SECONDS", 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint("llama3", folder)
    return folder


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of `FAKE`, which takes the place of transformers."""
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    monkeypatch.setitem(
        peer_options.PEERS,
        "transformers",
        SimpleNamespace(script=script, dtypes=("float32",), decodes=True),
    )
    return script


@pytest.fixture
def fake(script: Path) -> Any:
    """A function that starts a peer with a changed line of `FAKE`."""

    def start(old: str = "", new: str = "", **options: Any) -> PeerProcess:
        assert old in FAKE
        script.write_text(FAKE.replace(old, new) if old else FAKE)
        settings = PeerSettings("folder", "auto", "cpu", "float32", 2, 512, 4, 512, 2**20)
        return PeerProcess(PeerOptions("transformers", sys.executable), settings, **options)

    return start


def run(*argv: str) -> int:
    return main(["bench", "offline", *argv])


def fails(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line of an error."""
    assert run(*argv) == 2
    return error_line(capsys.readouterr().err)


def test_engine_and_peer_are_measured_in_rounds(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "report.json"
    argv = [str(folder), "--num-prompts", "6", "--input-len", "20", "--output-len", "7"]
    argv += ["--concurrency", "3", "--rounds", "2", "--threads", "2", "--max-model-len", "128"]
    assert run(*argv, "--json", str(path)) == 0
    values = json.loads(path.read_text())
    assert [measurement["name"] for measurement in values["measurements"]] == NAMES
    for measurement in values["measurements"]:
        assert len(measurement["rounds"]) == 2
        assert all(pair["engine"] > 0 and pair["peer"] > 0 for pair in measurement["rounds"])
        assert measurement["ratio_min"] <= measurement["ratio"] <= measurement["ratio_max"]
    rates = [pair["engine"] / pair["peer"] for pair in values["measurements"][0]["rounds"]]
    assert values["measurements"][0]["ratio_min"] == pytest.approx(min(rates))
    assert values["output_tokens"] == 6 * 7
    assert values["peer"]["name"] == "transformers" and values["peer"]["problem"] is None
    assert values["peer"]["about"]["format"] == "float32"
    assert 0 <= values["stolen_share"] < 1
    assert values["environment"]["threads"] == "2"
    shown = capsys.readouterr().out
    assert "medians of 2 rounds" in shown and "min..max" in shown and "stolen" in shown
    left = [child for child in psutil.Process().children() if "serve.py" in str(child.cmdline())]
    assert left == []


def test_without_a_peer_the_engine_is_measured_once(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "report.json"
    argv = [str(folder), "--num-prompts", "2", "--input-len", "9", "--output-len", "3"]
    assert run(*argv, "--no-peer", "--max-model-len", "512", "--json", str(path)) == 0
    values = json.loads(path.read_text())
    assert values["peer"] is None
    for measurement in values["measurements"]:
        (pair,) = measurement["rounds"]
        assert pair["engine"] > 0 and pair["peer"] is None
        assert measurement["ratio"] is None
    assert "min..max" not in capsys.readouterr().out


def test_a_ratio_above_one_means_faster_for_rates_and_for_times() -> None:
    pairs = [Pair(20.0, 10.0), Pair(30.0, 10.0), Pair(90.0, 100.0)]
    rate = Comparison("a", "a", True, pairs)
    assert rate.ratios == pytest.approx([2, 3, 0.9])
    assert (rate.engine, rate.peer) == (30, 10)
    values = rate.as_dict()
    # The median of the ratios is not the ratio of the medians, which is 3.
    assert values["ratio"] == pytest.approx(2)
    assert (values["ratio_min"], values["ratio_max"]) == pytest.approx((0.9, 3))
    assert rate.cells()[3:] == ("2.00", "0.90..3.00")
    seconds = Comparison("a", "a", False, pairs)
    assert seconds.ratios == pytest.approx([1 / 2, 1 / 3, 10 / 9])


def test_rounds_without_the_peer_have_no_ratio() -> None:
    half = Comparison("a", "a", True, [Pair(6.0, 2.0), Pair(8.0, None)])
    assert half.ratios == [3] and half.engine == 7 and half.peer == 2
    none = Comparison("a", "a", True, [Pair(6.0, None)])
    assert none.cells() == ("a", "6", "-", "-", "-")


def test_no_prompt_returns_in_a_later_round() -> None:
    trace = [Job([1, 2, 3], 5), Job([1, 2, 198], 5)]
    plan = MeasurementPlan(trace, 2, vocab_size=199, max_model_len=2048, seed=0)
    first, second = plan.round(0), plan.round(1)
    assert [job.prompt for job in second[0].jobs] == [[2, 3, 4], [2, 3, 0]]
    for before, after in zip(first, second, strict=True):
        lengths = [(len(job.prompt), job.max_tokens) for job in before.jobs]
        assert lengths == [(len(job.prompt), job.max_tokens) for job in after.jobs]
        assert before.jobs[0].prompt[:16] != after.jobs[0].prompt[:16]
        assert before.wake_up is not None and after.wake_up is not None
        assert before.wake_up.prompt[:16] != after.wake_up.prompt[:16]
    assert [len(m.jobs) for m in first] == [2, 1, 1, 32]
    assert len(first[2].jobs[0].prompt) == 512
    assert len({tuple(job.prompt[:448]) for job in first[3].jobs}) == 1
    assert len({tuple(job.prompt) for job in first[3].jobs}) == 32
    assert first[0].figure(2.0) == 5 and first[2].figure(2.0) == 2


@pytest.mark.parametrize("max_model_len", [8, 100, 512])
def test_measurements_fit_a_short_model(max_model_len: int) -> None:
    plan = MeasurementPlan([Job([1], 1)], 1, vocab_size=9, max_model_len=max_model_len, seed=0)
    for measurement in plan.round(0):
        assert measurement.lengths[-1] <= max_model_len
        assert all(job.prompt and job.max_tokens for job in measurement.jobs)
        assert measurement.wake_up is not None
        assert len(measurement.wake_up.prompt) + measurement.wake_up.max_tokens <= max_model_len


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--peer", "vllm"], "--peer vllm needs --peer-python"),
        (["--peer", "llama.cpp"], "--peer llama.cpp needs --peer-python"),
        (["--peer-dtype", "int8"], "--peer-dtype int8: transformers takes float32, bfloat16"),
        (["--no-peer", "--peer-dtype", "int8"], "--peer-dtype: cannot be used with --no-peer"),
        (["--no-peer", "--peer-python", "x"], "--peer-python: cannot be used with --no-peer"),
        (["--structured-outputs", '{"regex": "a*"}'], "without a peer: add --no-peer"),
        (
            ["--peer", "openvino", "--peer-python", "missing/python", "--num-prompts", "1"],
            "--peer-python missing/python: No such file",
        ),
    ],
)
def test_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert message in fails(capsys, "demo", *argv)


@pytest.mark.parametrize("peer", ["transformers", "vllm", "openvino", "llama.cpp"])
def test_a_missing_package_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, peer: str
) -> None:
    python = tmp_path / "python"  # interpreter of an environment without any package
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    line = fails(capsys, "demo", "--peer", peer, "--peer-python", str(python))
    assert f"peer {peer}: ModuleNotFoundError: No module named" in line


def test_a_program_that_is_not_python_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    line = fails(capsys, "demo", "--peer", "vllm", "--peer-python", "/bin/echo")
    assert "is no Python that runs the peer" in line


def test_a_peer_ends_with_the_benchmark(tmp_path: Path) -> None:
    started, python = tmp_path / "pid", tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho $$ > {started}\nexec sleep 60\n")  # as if it computed
    python.chmod(0o755)
    code = (
        "import sys\n"
        "from paged_backend.tools.bench.peer_options import PeerOptions\n"
        "from paged_backend.tools.bench.peer_process import PeerProcess, PeerSettings\n"
        "settings = PeerSettings('', 'auto', 'cpu', 'float32', 1, 1, 1, 1, 1)\n"
        "PeerProcess(PeerOptions('vllm', sys.argv[1]), settings)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(python)]) as bench:
        while not (started.exists() and started.read_text()):
            assert bench.poll() is None
            time.sleep(0.01)
        pidfd = os.pidfd_open(int(started.read_text()))
        bench.kill()
    assert select.select([pidfd], [], [], 30)[0], "the peer outlives the benchmark"
    os.close(pidfd)


def test_a_peer_runs_jobs_and_waits_without_work(fake: Any) -> None:
    with fake() as peer:
        assert peer.about == {"fake": "1.0"}
        assert peer.run([Job([1, 2], 3)] * 5, 2, 60) > 0
        process = psutil.Process(peer._process.pid)
        before = process.cpu_times()
        time.sleep(0.3)
        assert process.cpu_times() == before
        assert peer.run([Job([1] * 100_000, 3)], 2, 60) > 0  # more than a pipe holds
    assert not process.is_running()


def test_a_peer_that_dies_is_told_with_the_end_of_its_stderr(fake: Any) -> None:
    code = "import os, sys; print('no\\nmemory', file=sys.stderr, flush=True); os._exit(9)"
    with fake("index, prompt, max_tokens = self.jobs.pop(0)", code) as peer:
        with pytest.raises(PeerError, match=r"ended with exit status 9; stderr: .*no \| memory"):
            peer.run([Job([1], 1)], 1, 60)


@pytest.mark.parametrize("job", [Job([1], 1), Job([1] * 100_000, 1)])
def test_a_peer_that_hangs_is_ended(fake: Any, job: Job) -> None:
    with fake("index, prompt, max_tokens = self.jobs.pop(0)", "time.sleep(600)") as peer:
        with pytest.raises(PeerError, match="did not answer within 0.5 s"):
            peer.run([job], 1, 0.5)
        assert peer._process.wait(10) != 0


def test_a_peer_that_hangs_at_its_start_is_ended(fake: Any) -> None:
    with pytest.raises(PeerError, match="did not answer within 1 s"):
        fake("self.jobs = []", "time.sleep(600)", load_seconds=1)


def test_a_peer_that_stops_early_is_no_peer(fake: Any) -> None:
    with fake("[(index, max_tokens)]", "[(index, max_tokens - 1)]") as peer:
        with pytest.raises(PeerError, match="request 0 ended after 6 tokens"):
            peer.run([Job([1], 7)], 1, 60)


@pytest.mark.usefixtures("script")
def test_a_peer_that_fails_in_a_round_leaves_the_figures(
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []

    def run_seven(self: PeerProcess, jobs: Any, at_once: int, max_seconds: float) -> float:
        calls.append(at_once)
        if len(calls) == 8:  # four of the warm-up, the trace, and what wakes the peer up twice
            raise PeerError("peer transformers: ended with exit status 9")
        return 1.0

    monkeypatch.setattr(PeerProcess, "run", run_seven)
    path = tmp_path / "report.json"
    argv = [str(folder), "--num-prompts", "2", "--input-len", "9", "--output-len", "3"]
    argv += ["--threads", "2", "--max-model-len", "128"]
    assert run(*argv, "--json", str(path)) == 1
    assert "ended with exit status 9" in capsys.readouterr().out
    trace, *others = json.loads(path.read_text())["measurements"]
    assert len(calls) == 8 and trace["rounds"][0]["peer"] > 0
    assert all(other["rounds"][0]["peer"] is None for other in others)
    assert all(other["rounds"][0]["engine"] > 0 for other in others)


def test_only_some_peers_have_a_default_interpreter() -> None:
    assert PeerOptions("transformers").python is None
    with pytest.raises(ConfigError):
        PeerOptions("openvino")


def test_the_processor_is_described() -> None:
    assert set(cpu_flags().split()) <= set(FLAGS)
    assert 0 <= StolenTime().share() <= 1
