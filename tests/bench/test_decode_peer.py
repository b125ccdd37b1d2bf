"""`bench decode` with vLLM's script, on a module in place of vLLM that has its interface."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint

from paged_backend.cli import main
from paged_backend.tools.bench import decode
from paged_backend.tools.bench.decode_peer import DecodePeer, FirstToken, median_first_token_ms
from paged_backend.tools.bench.peer_options import PeerOptions
from paged_backend.tools.bench.peer_process import PeerSettings

SAMPLING_PARAMS = """
from enum import Enum

class RequestOutputKind(Enum):
    DELTA = 1
    FINAL_ONLY = 2
"""

VLLM = """
import json, os, time
from types import SimpleNamespace

__version__ = "0.0"

def SamplingParams(**params):
    assert params["ignore_eos"] and params["temperature"] == 0
    return SimpleNamespace(**params)

class LLM:
    def __init__(self, folder, **options):
        with open(os.environ["LOADED"], "w") as file:
            json.dump(options | {"folder": folder}, file)
        self.llm_engine = Engine(options)

class Engine:
    '''Returns the tokens of a step in the next one, as asynchronous scheduling does.'''

    def __init__(self, options):
        self.options, self.requests, self.launched = options, {}, []

    def add_request(self, name, prompt, params):
        length = len(prompt["prompt_token_ids"])
        assert length + params.max_tokens <= self.options["max_model_len"]
        assert len(self.requests) < self.options["max_num_seqs"]
        self.requests[name] = params

    def abort_request(self, names):
        for name in names:
            del self.requests[name]

    def step(self):
        time.sleep(0.001)
        outputs, self.launched = self.launched, list(self.requests)
        return [SimpleNamespace(request_id=name, finished=False) for name in outputs]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint("llama3", folder)
    return folder


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that makes an interpreter which imports a changed `VLLM`."""
    monkeypatch.setenv("LOADED", str(tmp_path / "options.json"))

    def make(old: str = "", new: str = "") -> str:
        assert old in VLLM
        package = tmp_path / "site" / "vllm"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(VLLM.replace(old, new) if old else VLLM)
        (package / "sampling_params.py").write_text(SAMPLING_PARAMS)
        script = tmp_path / "python"
        script.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}/site exec {sys.executable} "$@"\n')
        script.chmod(0o755)
        return str(script)

    return make


def run(folder: Path, path: Path, python: str) -> dict[str, Any]:
    argv = ["bench", "decode", str(folder), "--batch-sizes", "1,3,9", "--context", "32,130"]
    argv += ["--steps", "4", "--json", str(path), "--max-num-seqs", "8", "--max-model-len", "256"]
    assert main([*argv, "--device", "cpu", "--peer", "vllm", "--peer-python", python]) == 0
    report: dict[str, Any] = json.loads(path.read_text())
    return report


@pytest.mark.parametrize("fits", [True, False])
def test_the_peer_runs_each_batch_that_fits(
    fits: bool,
    folder: Path,
    python: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(decode, "_fits", lambda *_: fits)
    report = run(folder, tmp_path / "report.json", python())
    peer = report["peer"]
    assert (peer["name"], peer["problem"], peer["in_turn"]) == ("vllm", None, fits)
    assert peer["about"]["vllm"] == "0.0"
    measured = {
        (row["context"], row["batch_size"]): row["figures"]
        for row in report["rows"]
        if row["figures"] is not None
    }
    assert [(row["context"], row["batch_size"]) for row in peer["rows"]] == list(measured)
    assert len(measured) == 4
    for row in peer["rows"]:
        engine = measured[row["context"], row["batch_size"]]
        assert row["ratio"] == pytest.approx(engine["tokens_per_s"] / row["tokens_per_s"])
        assert 1 <= row["step_ms"] < 1000
    (first,) = report["first_tokens"]  # 128 tokens; the longest context is 130
    assert first["num_tokens"] == 128
    assert first["ratio"] == pytest.approx(first["peer_ms"] / first["engine_ms"])
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if "vllm; the engine is" in line]
    assert len(rows) == 4
    turns = [line for line in lines if line.split()[:2] == ["32", "1"]]
    following = lines[lines.index(turns[0]) + 1]
    assert (following in rows) == fits
    assert any("first token of 128 tokens" in line and "the peer's" in line for line in lines)


def test_the_peer_has_the_limits_of_the_engine(folder: Path, python: Any, tmp_path: Path) -> None:
    report = run(folder, tmp_path / "report.json", python())
    loaded = json.loads((tmp_path / "options.json").read_text())
    assert (loaded["max_model_len"], loaded["max_num_seqs"]) == (256, 8)
    assert loaded["max_num_batched_tokens"] == report["options"]["max_num_batched_tokens"]
    assert loaded["enable_prefix_caching"] is False
    longest = 3 * (130 + 4)
    assert loaded["kv_cache_memory_bytes"] > longest * report["kv_bytes_per_token"]
    assert "gpu_memory_utilization" not in loaded  # there is none of a CPU


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        pytest.param(
            *("time.sleep(0.001)", "raise MemoryError('full')", "MemoryError: full"),
            marks=pytest.mark.thorough,  # another error of a step is below
        ),
        (
            "list(self.requests)",
            "list(self.requests)[-2 if self.launched else 0 :]",
            "a step decoded only 2 of 3",
        ),
        pytest.param(
            *("time.sleep(0.001)", "time.sleep(600)", "did not answer within"),
            marks=pytest.mark.thorough,  # see `test_a_peer_that_fails_or_hangs_is_reported`
        ),
        ("time.sleep(0.001)", "os._exit(9)", "ended with exit status 9"),
    ],
)
def test_a_peer_that_fails_leaves_the_engines_figures(
    old: str,
    new: str,
    problem: str,
    folder: Path,
    python: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "600" in new:
        monkeypatch.setattr(decode, "CPU_PEER_SECONDS", 3.0)
    report = run(folder, tmp_path / "report.json", python(old, new))
    assert problem in report["peer"]["problem"]
    assert sum(row["figures"] is not None for row in report["rows"]) == 4
    assert report["complete"] is True
    assert report["first_tokens"][0]["peer_ms"] is None
    assert "vllm: no more figures: peer vllm: " in capsys.readouterr().out


def test_the_time_of_a_peer_ends_while_it_loads(python: Any) -> None:
    settings = PeerSettings("folder", "auto", "cpu", "float32", 1, 64, 4, 64, 2**20)
    options = PeerOptions("vllm", python("self.llm_engine", "time.sleep(600)"))
    with DecodePeer(options, settings, seconds=0.5) as peer:
        assert "did not answer within 0.5 s" in str(peer.problem)
        assert peer.row([[1]], 0, 1, 1.0) is peer.first_token_ms([1]) is None


def test_the_first_prompt_of_a_length_does_not_count() -> None:
    times = iter([100.0, 1.0, 2.0, 4.0])
    assert median_first_token_ms(lambda _: next(times), [[1]] * 4) == 2.0
    assert median_first_token_ms(lambda _: None, [[1]] * 4) is None
    assert FirstToken(8, 2.0).compared(3.0) == FirstToken(8, 2.0, 3.0, 1.5)
    assert FirstToken(8, 2.0).line() == "first token of 8 tokens: 2.00 ms"


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--peer", "vllm"], "--peer vllm needs --peer-python"),
        (["--peer", "vllm", "--peer-python", "no/python"], "--peer-python no/python: No such file"),
        (["--peer-python", "x"], "--peer-python: bench decode needs it only for --peer vllm"),
    ],
)
def test_options_of_the_peer(
    argv: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "decode", "demo", *argv]) == 2
    assert problem in capsys.readouterr().err
