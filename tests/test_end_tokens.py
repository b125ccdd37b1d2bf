"""The tokens that end an answer: those of the configurations, and the tokenizer's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from tokenizer_layouts import byte_level

from paged_backend.engine.llm import LLM
from paged_backend.values.errors import InvalidRequest
from paged_backend.values.outputs import FinishReason
from paged_backend.values.sampling_params import SamplingParams

OWN, NAMED, OTHER = 2, 100, 101  # the tokenizer's end token, generation_config.json's, and another


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fine-tune whose generation_config.json is still the base model's."""
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint("llama2", folder, vocab_size=512, eos_token_id=None)
    byte_level(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [NAMED]}))
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), kv_cache_memory_bytes=2**24)


def answer(llm: LLM, token_id: int, **options: Any) -> tuple[list[int], FinishReason | None]:
    """The tokens of an answer that prefers one token, and why it ended."""
    values = {"max_tokens": 5, "temperature": 0, "logit_bias": {token_id: 100}, **options}
    (output,) = llm.generate(["the"], SamplingParams.from_mapping(values))
    return list(output.outputs[0].token_ids), output.outputs[0].finish_reason


@pytest.mark.parametrize("token_id", [OWN, NAMED])
def test_both_end_an_answer(llm: LLM, token_id: int) -> None:
    assert answer(llm, token_id) == ([token_id], FinishReason.STOP)


@pytest.mark.parametrize("token_id", [OWN, NAMED])
def test_neither_does_if_they_are_ignored(llm: LLM, token_id: int) -> None:
    assert answer(llm, token_id, ignore_eos=True) == ([token_id] * 5, FinishReason.LENGTH)


@pytest.mark.parametrize("token_id", [OWN, NAMED])
def test_neither_comes_before_the_least_number_of_tokens(llm: LLM, token_id: int) -> None:
    token_ids, reason = answer(llm, token_id, min_tokens=3)
    assert (len(token_ids), token_ids[3:], reason) == (4, [token_id], FinishReason.STOP)
    assert not {OWN, NAMED} & set(token_ids[:3])


def test_both_end_an_answer_where_its_grammar_lets_it_end(llm: LLM) -> None:
    for token_id in (OWN, NAMED):
        asked = {"structured_outputs": {"regex": "[a-z]{2,}"}}
        token_ids, reason = answer(llm, token_id, max_tokens=9, **asked)
        assert (len(token_ids), token_ids[2:], reason) == (3, [token_id], FinishReason.STOP)


def test_another_token_does_not(llm: LLM) -> None:
    assert answer(llm, OTHER) == ([OTHER] * 5, FinishReason.LENGTH)


def test_the_engine_knows_each_of_them_once(llm: LLM, folder: Path, tmp_path: Path) -> None:
    assert llm.engine.executor.info.eos_token_ids == (NAMED, OWN)
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": OWN}))
    assert LLM(str(tmp_path)).engine.executor.info.eos_token_ids == (OWN,)


def test_a_model_without_an_end_token_but_the_tokenizers_ends(folder: Path, tmp_path: Path) -> None:
    for path in folder.iterdir():
        if path.name != "generation_config.json":
            (tmp_path / path.name).symlink_to(path)
    assert answer(LLM(str(tmp_path)), OWN) == ([OWN], FinishReason.STOP)


def test_a_token_beyond_the_models_vocabulary_is_left_out(tmp_path: Path) -> None:
    make_checkpoint("llama2", tmp_path, vocab_size=400, eos_token_id=None)
    byte_level(tmp_path)
    added = {"<end>": 422}
    (tmp_path / "added_tokens.json").write_text(json.dumps(added))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<end>"}))
    llm = LLM(str(tmp_path))
    assert llm.engine.executor.info.eos_token_ids == ()
    with pytest.raises(InvalidRequest):
        answer(llm, llm.tokenizer.vocab_size)
