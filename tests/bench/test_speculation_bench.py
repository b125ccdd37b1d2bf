"""The benchmark of speculation: its texts, what it counts, and mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from error_lines import error_line
from free_drafts import make_drafts_free

from paged_backend.cli import main
from paged_backend.speculation.step_costs import StepCosts
from paged_backend.speculation.token_index import TokenIndex
from paged_backend.tools.bench import speculation, speculation_traces
from paged_backend.tools.bench.speculation import SpeculationBench
from paged_backend.tools.bench.speculation_traces import ANSWER_TOKENS, KINDS, traces
from paged_backend.values.config import EngineConfig

SUFFIX = ["--speculative-config", '{"method": "suffix"}']


def run(*argv: str) -> int:
    return main(["bench", "speculation", "demo", *argv])


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_answers_repeat_themselves_but_for_random_ones(kind: str) -> None:
    """The part of the tokens that follow a match of the two tokens before, which they followed."""
    made = traces(kind, 3, 8192, seed=1)
    assert made == traces(kind, 3, 8192, seed=1) != traces(kind, 3, 8192, seed=2)
    for prompt, answer in made:
        assert len(answer) == ANSWER_TOKENS and all(16 <= t < 8192 for t in prompt + answer)
        index, right = TokenIndex(1024, 2), 0
        index.extend(prompt)
        for place, token in enumerate(answer):
            match = index.find((prompt + answer[:place])[-9:], 9)
            right += any(index.following(end, 1) == [token] for end in match.ends)
            index.extend([token])
        assert right == 0 if kind == "random" else right > 0.4 * ANSWER_TOKENS


def test_figures_of_the_demo(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (speculation, speculation_traces):
        monkeypatch.setattr(module, "ANSWER_TOKENS", 64)
    monkeypatch.setattr(StepCosts, "token_s", 0.0)  # a busy machine measures anything
    path = tmp_path / "figures.json"
    flags = ["--traces", "edit,random", "--concurrency", "2", "--rounds", "1", *SUFFIX]
    assert run(*flags, "--json", str(path)) == 0
    edit, random = json.loads(path.read_text())["figures"]
    assert (edit["name"], edit["at_once"], len(edit["rounds"])) == ("edit", 2, 1)
    assert edit["tokens_per_step"] > 1.5 and 0.3 < edit["accepted_share"] <= 1
    assert random["tokens_per_step"] == 1.0 and random["accepted_share"] == 0.0
    assert edit["ratio"] == pytest.approx(edit["engine"] / edit["peer"])
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed] == ["trace", "edit", "random"]


def test_idle_time_on_a_simulated_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps give the tokens of the traces, and drafts are verified."""
    monkeypatch.setattr(StepCosts, "token_s", 0.0)
    path = tmp_path / "figures.json"
    flags = ["--traces", "edit,random", "--concurrency", "2", "--rounds", "1", *SUFFIX]
    assert run(*flags, "--simulate-device-ms", "1", "--json", str(path)) == 0
    edit, random = json.loads(path.read_text())["figures"]
    assert edit["tokens_per_step"] > 1.5 and random["tokens_per_step"] == 1.0
    for row in (edit, random):
        assert 0 <= row["idle_without"] < 1 and 0 <= row["idle_with"] < 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].endswith("idle without  idle with") and printed[1].endswith("%")


def test_a_draft_model_on_a_simulated_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_drafts_free(monkeypatch)
    path = tmp_path / "figures.json"
    draft_model = '{"method": "draft_model", "model": "demo"}'
    flags = ["--traces", "random", "--concurrency", "2", "--rounds", "1"]
    flags += ["--speculative-config", draft_model, "--simulate-device-ms", "2", "--json", str(path)]
    assert run(*flags, "--simulate-pass-ms", "0.1", "--draft-chance", "1") == 0
    (figures,) = json.loads(path.read_text())["figures"]
    assert figures["tokens_per_step"] > 1.5 and figures["accepted_share"] == 1.0


def test_the_tokens_are_those_of_the_traces() -> None:
    values = {"model": "demo", "speculative_config": {"method": "ngram"}}
    bench = SpeculationBench(EngineConfig.from_mapping(values))
    (trace,) = traces("json", 1, 2048, seed=0)
    engine, answer = bench._engine, list[int]()
    engine.add_request(bench._request(trace, True))
    while engine.has_unfinished:
        for output in engine.step():
            answer += output.new_token_ids
    assert answer == trace.answer


@pytest.mark.parametrize("chance", [0.0, 1.0])
def test_a_draft_model_guesses_with_the_chance(
    chance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_drafts_free(monkeypatch)
    config = {"method": "draft_model", "model": "demo", "num_speculative_tokens": 3}
    values = {"model": "demo", "speculative_config": config}
    bench = SpeculationBench(EngineConfig.from_mapping(values), chance)
    bench._run("random", 1, speculate=True, number=0)
    stats = bench._engine.stats()
    assert stats.num_draft_tokens > 100
    assert stats.num_accepted_tokens == chance * stats.num_draft_tokens


def test_mistakes_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 2
    assert "speculative_config is needed" in error_line(capsys.readouterr().err)
    assert run("--simulate-device-ms", "1", "--simulate-pass-ms", "1", *SUFFIX) == 2
    said = error_line(capsys.readouterr().err)
    assert "--simulate-pass-ms: needs --simulate-device-ms and the method" in said
    with pytest.raises(SystemExit):
        run("--draft-chance", "1.5", *SUFFIX)
    assert "must be from 0 to 1, got '1.5'" in capsys.readouterr().err
    assert run("--concurrency", "513", *SUFFIX) == 2
    assert "--concurrency: must be at most 512" in error_line(capsys.readouterr().err)
    assert run("--max-model-len", "300", "--concurrency", "1", *SUFFIX) == 2
    assert "max_model_len must be at least" in error_line(capsys.readouterr().err)
    assert run("--tensor-parallel-size", "2", *SUFFIX) == 2
    assert "tensor_parallel_size can only be 1" in error_line(capsys.readouterr().err)
    with pytest.raises(SystemExit):
        run("--traces", "edit,prose", *SUFFIX)
    assert "must be of edit, json, code, random, got 'prose'" in capsys.readouterr().err
