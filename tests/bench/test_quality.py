"""The quality benchmark: divergences, the positions they belong to, prompts, and mistakes."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from effort import examples
from error_lines import error_line
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import EOS, Oracle

from paged_backend.checkpoint.bundled import MODEL_DIR
from paged_backend.cli import main
from paged_backend.tools.bench.divergence import Divergences, Logits, kl_divergence
from paged_backend.tools.bench.quality import ScoredEngine, reference_config
from paged_backend.tools.bench.quality_options import NUM_RANDOM_PROMPTS, PromptOptions
from paged_backend.tools.bench.quality_prompts import QualityPrompt, make_prompts
from paged_backend.values.config import EngineConfig


def run(*argv: str) -> int:
    return main(["bench", "quality", *argv])


def fails(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line of an error."""
    assert run("demo", *argv) == 2
    return error_line(capsys.readouterr().err)


def figures(tmp_path: Path, *argv: str) -> dict[str, Any]:
    """What a run of the demo model saves."""
    path = tmp_path / "report.json"
    assert run("demo", *argv, "--json", str(path)) == 0
    values: dict[str, Any] = json.loads(path.read_text())
    return values


def row(*probabilities: float, shift: float = 0.0) -> Logits:
    with np.errstate(divide="ignore"):
        return (np.log(probabilities) + shift).astype(np.float32)


def prompts_of(**options: Any) -> list[QualityPrompt]:
    return make_prompts(
        PromptOptions(**options), model=Path("x"), tokenizer="demo", vocab_size=2048, seed=3
    )


def test_a_divergence_by_hand() -> None:
    # 1/2 log(2) + 1/4 log(1) + 1/4 log(1/2)
    by_hand = math.log(2) / 4
    reference, tested = row(1 / 2, 1 / 4, 1 / 4), row(1 / 4, 1 / 4, 1 / 2, shift=50)
    assert kl_divergence(reference, tested) == pytest.approx(by_hand, rel=1e-5)


def test_a_token_that_is_ruled_out_adds_nothing() -> None:
    assert kl_divergence(row(1, 0), row(0.5, 0.5)) == pytest.approx(math.log(2), rel=1e-5)
    assert kl_divergence(row(1, 0), row(1, 0)) == 0
    assert kl_divergence(row(0.5, 0.5), row(1, 0)) == math.inf
    assert math.isnan(kl_divergence(row(0.5, 0.5), np.array([0, np.nan], np.float32)))


@settings(max_examples=examples(30))
@given(st.integers(2, 500), st.floats(0, 20), st.integers(0, 2**32 - 1))
def test_divergences_are_those_of_torch(size: int, scale: float, seed: int) -> None:
    rows = torch.randn(2, size, generator=torch.Generator().manual_seed(seed)) * scale
    p, q = rows.double().log_softmax(1)
    expected = torch.nn.functional.kl_div(q, p, reduction="sum", log_target=True).item()
    found = kl_divergence(*rows.numpy())
    assert found >= 0
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert kl_divergence(rows[0].numpy(), rows[0].numpy()) == 0


def test_figures_of_many_positions() -> None:
    divergences = Divergences()
    for _ in range(99):
        assert divergences.add(row(0.75, 0.25), row(0.75, 0.25, shift=1)) < 1e-9
    largest = divergences.add(row(0.75, 0.25), row(0.25, 0.75))
    found = divergences.figures()
    assert largest == pytest.approx(math.log(3) / 2, rel=1e-5)
    assert found.num_positions == 100 and found.equal_argmax_share == 0.99
    assert found.max_kl == largest and found.mean_kl == pytest.approx(largest / 100, rel=1e-5)
    assert found.p99_kl == pytest.approx(0.01 * largest, rel=1e-4)  # between the last two


def test_logits_are_those_of_the_answers_positions(tmp_path: Path) -> None:
    oracle = Oracle("llama3", tmp_path)
    config = EngineConfig(model=str(tmp_path), dtype="float32", kv_cache_memory_bytes=2**22)
    engine = ScoredEngine(config, tmp_path)
    prompts = [[5], [7, 8, 9] * 11]
    for prompt, answer in zip(prompts, engine.answers(prompts, 9), strict=True):
        assert len(answer) == 9 or answer[-1] == EOS
        rows = np.stack(list(engine.logits(prompt, answer)))
        with torch.inference_mode():
            expected = oracle.model(torch.tensor([prompt + answer])).logits[0]
        np.testing.assert_allclose(rows, expected[len(prompt) - 1 : -1].numpy(), atol=1e-4)
        assert rows.argmax(1).tolist() == answer
        (first,) = engine.logits(prompt, answer[:1])
        np.testing.assert_allclose(first, rows[0], atol=1e-5)


def test_float32_is_its_own_reference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["bin/paged-backend", "bench", "quality", "a b"])
    found = figures(tmp_path, "--num-prompts", "5", "--concurrency", "2")
    assert found["divergence"] == {
        "num_positions": found["answers"]["num_tokens"],
        "mean_kl": 0,
        "p99_kl": 0,
        "max_kl": 0,
        "equal_argmax_share": 1,
    }
    assert found["num_prompts"] == found["answers"]["num_equal"] == 5
    assert found["answers"]["num_right"] == found["answers"]["num_right_of_reference"] == 5
    assert found["command"] == "paged-backend bench quality 'a b'" and found["model"] == "demo"
    assert found["environment"]["device"]
    shown = capsys.readouterr().out
    assert "5 of 5 (100.0%)" in shown and "0 nats" in shown


@pytest.mark.parametrize(
    ("option", "value", "at_most"),
    [
        ("--dtype", "bfloat16", 1e-3),
        ("--quantization", "int4", 1e-1),
        ("--kv-cache-dtype", "int8_per_token_head", 1e-3),
    ],
)
def test_a_coarser_format_diverges_a_little(
    tmp_path: Path, option: str, value: str, at_most: float
) -> None:
    found = figures(tmp_path, "--num-prompts", "5", "--max-prompt-tokens", "9", option, value)
    divergence = found["divergence"]
    assert 0 < divergence["mean_kl"] <= divergence["p99_kl"] <= divergence["max_kl"]
    assert divergence["mean_kl"] < at_most
    assert found["answers"]["num_right"] == 5
    assert found["tested"] != found["reference"]
    assert found["reference"] == {"dtype": "float32", "quantization": None, "kv_cache": "float32"}


def test_the_reference_of_a_quantized_checkpoint_has_its_weights(tmp_path: Path) -> None:
    made = tmp_path / "demo"
    scheme = ["--scheme", "w4a16", "--group-size", "64"]
    assert main(["quantize", "demo", *scheme, "-o", str(made)]) == 0
    prompts, report = tmp_path / "prompts.txt", tmp_path / "report.json"
    prompts.write_text("What does abs do?\n\nWhat does len do?\n")
    argv = ["--quantization", "compressed-tensors", "--prompts", str(prompts)]
    assert run(str(made), *argv, "--json", str(report)) == 0
    found = json.loads(report.read_text())
    assert found["reference"]["quantization"] == "compressed-tensors"
    assert found["divergence"]["max_kl"] == 0
    assert found["num_prompts"] == 2 and found["answers"]["num_right"] is None


def test_only_the_number_formats_of_the_reference_differ() -> None:
    config = EngineConfig(
        model="demo", dtype="bfloat16", quantization="int8", kv_cache_dtype="fp8", block_size=32
    )
    assert reference_config(config) == EngineConfig(model="demo", dtype="float32", block_size=32)


def test_prompts_of_files(tmp_path: Path) -> None:
    lines, objects = tmp_path / "a.txt", tmp_path / "a.jsonl"
    lines.write_text("What does abs do?\r\n \n{\u2028}\n")
    abs_, other = prompts_of(prompts=str(lines))
    objects.write_text('{"prompt": "What does abs do?", "id": 1}\n{"prompt": "{\\u2028}"}\n')
    assert prompts_of(prompts=str(objects)) == [abs_, other]
    assert prompts_of(prompts=str(objects), num_prompts=1) == [abs_]
    assert abs_.right_answer is None


def test_prompts_without_a_file() -> None:
    drawn = prompts_of(input_len=7)
    assert len(drawn) == NUM_RANDOM_PROMPTS and drawn == prompts_of(input_len=7)
    assert all(len(p.token_ids) == 7 and p.right_answer is None for p in drawn)
    asked = make_prompts(
        PromptOptions(), model=MODEL_DIR, tokenizer="demo", vocab_size=2048, seed=0
    )
    assert len(asked) == 253 and all(p.right_answer and p.right_answer[-1] == 1 for p in asked)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "a.jsonl: No such file"),
        ("\n", "has no prompts"),
        ("{", "line 1 is not valid JSON"),
        ('\n{"text": "a"}', 'line 2 must be an object with a text "prompt"'),
        ('["prompt"]', 'line 1 must be an object with a text "prompt"'),
        ('{"prompt": "\\ud800"}', "prompt 1: prompt: must be text that UTF-8 can hold"),
    ],
)
def test_files_without_prompts_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str | None, message: str
) -> None:
    path = tmp_path / "a.jsonl"
    if text is not None:
        path.write_text(text)
    assert message in fails(capsys, "--prompts", str(path))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--load-format", "dummy"], "option load_format must be auto"),
        (["--max-tokens", "0"], "option max_tokens must be an integer from 1"),
        (
            ["--max-tokens", "500000", "--max-model-len", "300000"],
            "shorten the prompts or lower --max-tokens",
        ),
        (["--quantization", "int3"], "option quantization must be"),
        (["--max-model-len", "8"], "prompt 29 has 8 tokens, and with max_model_len 8"),
    ],
)
def test_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert message in fails(capsys, *argv)


def test_a_format_that_overflows_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def overflow(self: ScoredEngine, prompt: list[int], answer: list[int]) -> Iterator[Logits]:
        yield from np.full((len(answer), 4), np.nan, np.float32)

    monkeypatch.setattr(ScoredEngine, "logits", overflow)
    line = fails(capsys, "--num-prompts", "1")
    assert "the logits of token 1 of answer 1 are not finite" in line
