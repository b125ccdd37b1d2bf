"""Rerankers: the scores of pairs of texts that transformers' models give in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rerankers import (
    DOCUMENTS,
    NO,
    QUERY,
    YES,
    answer_scores,
    classifier_scores,
    make_answerer,
    make_reranker,
)
from transformers import PreTrainedModel

from paged_backend import LLM, ConfigError, InvalidRequest
from paged_backend.values.engine_args import from_mapping

QWEN3_RERANKER = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": [NO, YES],
    "is_original_qwen3_reranker": True,
}


def load(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), dtype="float32", kv_cache_memory_bytes=2**23, **options)


def scores(llm: LLM) -> list[float]:
    return [output.outputs.score for output in llm.score(QUERY, DOCUMENTS)]


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("qwen3")


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return make_reranker("qwen3", folder)


@pytest.mark.parametrize("family", ["llama3", "qwen2-window", "gemma2", "qwen3-moe", "phi3"])
def test_a_classification_head(tmp_path: Path, family: str) -> None:
    model = make_reranker(family, tmp_path)
    wanted = torch.tensor(classifier_scores(model, tmp_path)).sigmoid()
    llm = load(tmp_path, max_num_batched_tokens=16, max_num_seqs=4)  # prompts in chunks
    assert scores(llm) == pytest.approx(wanted.tolist(), abs=1e-5)
    assert scores(llm) == scores(llm)


@pytest.mark.parametrize("family", ["roberta", "xlm-roberta", "camembert"])
def test_a_cross_encoder(tmp_path: Path, family: str) -> None:
    model = make_reranker(family, tmp_path)
    wanted = torch.tensor(classifier_scores(model, tmp_path)).sigmoid()
    llm = LLM(str(tmp_path), dtype="float32", runner="pooling")
    assert scores(llm) == pytest.approx(wanted.tolist(), abs=1e-5)
    alone = [llm.score(QUERY, document)[0].outputs.score for document in DOCUMENTS]
    assert alone == scores(llm)
    with pytest.raises(InvalidRequest, match="at most 96 tokens: max_model_len"):
        llm.score(QUERY, "a b " * 99)
    with pytest.raises(InvalidRequest, match="task: the model scores pairs of texts"):
        llm.embed("a")


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("bert", {}, "with model_type bert it must have one of BertModel, BertForMaskedLM, Bert"),
        ("roberta", {"type_vocab_size": 2}, "type_vocab_size must be 1 for a reranker"),
        ("roberta", {"num_labels": 2}, "num_labels gives 2 labels"),
    ],
)
def test_cross_encoders_that_are_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], message: str
) -> None:
    make_reranker(family, tmp_path, **changes)
    with pytest.raises(ConfigError, match=message):
        LLM(str(tmp_path), dtype="float32")


def test_activations(folder: Path, model: PreTrainedModel, tmp_path: Path) -> None:
    wanted = classifier_scores(model, folder)
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    identity = "torch.nn.modules.linear.Identity"
    for keys in (
        {"sentence_transformers": {"activation_fn": identity}},
        {"sentence_transformers": None, "sbert_ce_default_activation_function": identity},
    ):
        change_config(tmp_path, **keys)
        assert scores(load(tmp_path)) == pytest.approx(wanted, abs=1e-5)
    change_config(tmp_path, sbert_ce_default_activation_function="torch.nn.Tanh")
    with pytest.raises(ConfigError, match="function must be Sigmoid or Identity, got 'torch.nn.T"):
        load(tmp_path)


@pytest.mark.parametrize("tied", [False, True])
def test_two_tokens_of_a_model_that_generates(tmp_path: Path, tied: bool) -> None:
    model = make_answerer("qwen3", tmp_path, tie_word_embeddings=tied)
    wanted = answer_scores(model, tmp_path)
    llm = load(tmp_path, classifier_from_token=f"{NO},{YES}")
    assert scores(llm) == pytest.approx(wanted, abs=1e-5)
    assert scores(load(tmp_path, runner="pooling", hf_overrides=QWEN3_RERANKER)) == scores(llm)


def test_pairs(folder: Path, model: PreTrainedModel) -> None:
    llm = load(folder, task="score")
    assert "scores of pairs of texts" in llm.engine.executor.info.describe()
    first, *others = llm.score(QUERY, DOCUMENTS)
    assert first.prompt_token_ids == llm.tokenizer.encode_pair(QUERY, DOCUMENTS[0])
    assert others[1].outputs.score != others[0].outputs.score == others[2].outputs.score
    (pair,) = llm.score([DOCUMENTS[0]], [QUERY])
    assert pair.outputs.score != first.outputs.score
    each = llm.score([QUERY] * 4, DOCUMENTS)
    assert [output.outputs.score for output in each] == scores(llm)
    long = "a b " * 400
    for call, message in (
        (lambda: llm.generate("a"), "task: the model scores pairs of texts; it does not generate"),
        (lambda: llm.embed("a"), "task: the model scores pairs of texts; it makes no embeddings"),
        (lambda: llm.score(QUERY, [[1, 2]]), "data_2: must be texts for a reranker, got "),
        (lambda: llm.score([QUERY] * 2, DOCUMENTS), "data_1: has 2 entries for 4"),
        (lambda: llm.score(QUERY, long), "at most 512 tokens: max_model_len"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            call()
    assert scores(llm)[0] == first.outputs.score


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "embed"}, "option task must be auto, score or pooling for a reranker, got embed"),
        ({"task": "generate"}, "option task must be auto, score or pooling for a reranker"),
        ({"pooling_type": "mean"}, "option pooling_type cannot be used with a reranker"),
        ({"normalize": True}, "option normalize cannot be used with a reranker"),
        ({"classifier_from_token": "no,yes"}, "the checkpoint has no output layer"),
        ({"model_impl": "transformers"}, "architectures is"),
    ],
)
def test_options_that_do_not_fit(
    folder: Path, model: PreTrainedModel, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(folder, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"task": "score"},
            "option task can only be score for a reranker: a checkpoint of an arch",
        ),
        ({"classifier_from_token": "no"}, "must be two tokens, such as no,yes"),
        ({"classifier_from_token": "os,os"}, "must be two tokens"),
        ({"classifier_from_token": "os,qqq"}, "'qqq' is not a token of the model's vocabulary"),
        ({"classifier_from_token": "os,x", "load_format": "dummy"}, "with load_format dummy"),
    ],
)
def test_options_that_make_no_reranker(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("demo", **options)


def test_several_labels_are_refused(tmp_path: Path) -> None:
    make_reranker("llama2", tmp_path, num_labels=3)
    with pytest.raises(ConfigError, match="id2label gives 3 labels; only rerankers, which have 1"):
        load(tmp_path)
    make_reranker("llama2", tmp_path)
    change_config(tmp_path, id2label=None)
    with pytest.raises(ConfigError, match="num_labels gives 2 labels"):
        load(tmp_path)


def test_vllms_overrides_for_qwen3_reranker() -> None:
    for overrides in (QWEN3_RERANKER, json.dumps(QWEN3_RERANKER)):
        config = from_mapping({"hf_overrides": overrides}).config
        assert config.classifier_from_token == f"{NO},{YES}"
    with pytest.raises(ConfigError, match="classifier_from_token is in hf_overrides, too"):
        from_mapping({"hf_overrides": QWEN3_RERANKER, "classifier_from_token": "a,b"})
    for changes in (
        {"classifier_from_token": ["yes"]},
        {"is_original_qwen3_reranker": False},
        {"architectures": ["Qwen3ForCausalLM"]},
        {"method": "no_post_processing"},
    ):
        with pytest.raises(ConfigError, match="option hf_overrides can only have architectures"):
            from_mapping({"hf_overrides": {**QWEN3_RERANKER, **changes}})
