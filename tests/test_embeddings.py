"""Embeddings of the engine beside those of transformers on the same checkpoint."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import FAMILIES, make_checkpoint
from effort import examples
from embedding_models import expected, layers_of, older_pooling, write_modules
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from oracle import make_engine
from transformers import PreTrainedModel

from paged_backend import LLM, ConfigError, InvalidRequest, PoolingParams, SamplingParams
from paged_backend.checkpoint.bundled import MODEL_DIR
from paged_backend.core.scheduler_output import ModelRunnerOutput
from paged_backend.embeddings.vectors import make_embedding
from paged_backend.engine.engine import Engine
from paged_backend.executor.messages import decode_model_runner_output, encode
from paged_backend.values.engine_args import from_mapping
from paged_backend.values.outputs import FinishReason, SequenceOutput
from paged_backend.values.request import Request

KINDS = ("last", "mean", "cls")
HIDDEN_SIZE = 64


def make_prompts(number: int, seed: int = 0) -> list[list[int]]:
    """Prompts of 1 to 90 tokens; every third begins like the one before it."""
    rng = random.Random(seed)
    prompts: list[list[int]] = []
    for index in range(number):
        prompt = [rng.randrange(3, 199) for _ in range(rng.randint(1, 90))]
        if index % 3 == 2:
            prompt = prompts[-1][: rng.randint(1, 64)] + prompt[:20]
        prompts.append(prompt)
    return prompts


def run(
    engine: Engine, prompts: list[list[int]], params: PoolingParams | None = None
) -> list[SequenceOutput]:
    """The only output of each prompt."""
    params = params or PoolingParams()
    for index, prompt in enumerate(prompts):
        engine.add_request(Request(str(index), prompt, pooling=params))
    ends: dict[str, SequenceOutput] = {}
    while engine.has_unfinished:
        for output in engine.step():
            assert output.request_id not in ends
            ends[output.request_id] = output
    assert engine.stats().num_used_blocks == 0
    return [ends[str(index)] for index in range(len(prompts))]


def embeddings(engine: Engine, outputs: list[SequenceOutput]) -> list[NDArray[np.float32]]:
    """The normalized embeddings in outputs."""
    assert {output.finish_reason for output in outputs} == {FinishReason.STOP}
    return [
        make_embedding(output.pooled or b"", PoolingParams(), normalize=engine.limits.normalize)
        for output in outputs
    ]


def confirm(
    model: PreTrainedModel, prompts: list[list[int]], found: list[NDArray[np.float32]], kind: str
) -> None:
    for prompt, embedding in zip(prompts, found, strict=True):
        torch.testing.assert_close(
            torch.from_numpy(embedding), expected(model, prompt, kind), rtol=0, atol=1e-5
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("qwen3")


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return make_checkpoint("qwen3", folder)


# --- the same numbers as transformers ----------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma2"])
def test_embeddings_are_those_of_transformers(tmp_path, family, kind):
    model = make_checkpoint(family, tmp_path)
    engine = make_engine(tmp_path, task="embed", pooling_type=kind, max_num_batched_tokens=50)
    prompts = make_prompts(9)
    confirm(model, prompts, embeddings(engine, run(engine, prompts)), kind)


# Their modules differ in names, in what they hold beside the layers, or in where the layers are.
PARTS = (
    *("llama3", "llama4", "gemma2", "gemma4", "gpt-oss", "deepseek-v3", "minicpm3", "qwen3-next"),
    *("lfm2", "bamba", "falcon-h1", "nemotron-h", "jamba", "kimi-linear", "granite-hybrid"),
    *("mamba", "mamba2", "minimax", "recurrent-gemma", "zamba2"),
)


@pytest.mark.parametrize(
    "family",
    [pytest.param(n, marks=() if n in PARTS else pytest.mark.thorough) for n in FAMILIES],
)
def test_a_checkpoint_without_an_output_layer(tmp_path, family):
    """Its tensors have no prefix ``model.``, and it makes embeddings by default."""
    model = make_checkpoint(family, tmp_path / "whole")
    layers = layers_of(model)
    layers.save_pretrained(tmp_path / "base")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    assert config["architectures"] == [type(layers).__name__]
    engine = make_engine(tmp_path / "base")
    prompts = make_prompts(4)
    confirm(model, prompts, embeddings(engine, run(engine, prompts)), "last")


def test_an_output_layer_is_neither_needed_nor_loaded(tmp_path):
    model = make_checkpoint("llama3", tmp_path / "whole")
    model.base_model.save_pretrained(tmp_path / "base")
    # Qwen3-Embedding is like this: a name with an output layer, and tensors without one.
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    config["architectures"] = ["LlamaForCausalLM"]
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    write_modules(tmp_path / "base", older_pooling("last", HIDDEN_SIZE))
    for name in ("whole", "base"):
        engine = make_engine(tmp_path / name, task="embed" if name == "whole" else "auto")
        assert engine.executor.model_runner._model._lm_head is None
        confirm(model, [[5, 6, 7]], embeddings(engine, run(engine, [[5, 6, 7]])), "last")


def test_dimensions_are_kept_before_normalization(folder, model):
    engine = make_engine(folder, task="embed", pooling_type="mean", normalize=False)
    prompt = make_prompts(1, seed=4)[0]
    (output,) = run(engine, [prompt])
    for normalize in (False, True):
        params = PoolingParams(dimensions=7)
        found = make_embedding(output.pooled or b"", params, normalize=normalize)
        wanted = expected(model, prompt, "mean", normalize=normalize, dimensions=7)
        assert found.shape == (7,)
        torch.testing.assert_close(torch.from_numpy(found), wanted, rtol=1e-5, atol=1e-5)


# --- whatever the batch ------------------------------------------------------------------------


@pytest.fixture(scope="module", params=KINDS)
def alone(request, folder, model) -> tuple[str, list[bytes | None]]:
    """The embeddings of prompts that run alone, each in one step."""
    engine = make_engine(
        folder, task="embed", pooling_type=request.param, enable_prefix_caching=False
    )
    return request.param, [run(engine, [prompt])[0].pooled for prompt in make_prompts(12)]


@settings(max_examples=examples(15), deadline=None)
@given(
    budget=st.integers(1, 200),
    max_num_seqs=st.integers(1, 12),
    order=st.permutations(range(12)),
    num_blocks=st.integers(34, 60),
)
def test_an_embedding_depends_neither_on_the_batch_nor_on_chunks(
    folder, alone, budget, max_num_seqs, order, num_blocks
):
    """Bit by bit, with prefix hits and with little room in the pool."""
    kind, wanted = alone
    engine = make_engine(
        folder,
        task="embed",
        pooling_type=kind,
        max_num_batched_tokens=max(budget, max_num_seqs),
        max_num_seqs=max_num_seqs,
        kv_cache_memory_bytes=num_blocks * 16 * 3 * 2 * 2 * 32 * 4,
    )
    prompts = make_prompts(12)
    outputs = run(engine, [prompts[index] for index in order])
    assert [output.pooled for output in outputs] == [wanted[index] for index in order]


def test_a_preempted_prompt_starts_its_sum_again(folder, model):
    engine = make_engine(
        folder, task="embed", pooling_type="mean", max_num_batched_tokens=32, max_num_seqs=2
    )
    prompt = make_prompts(1, seed=6)[0] * 3
    engine.add_request(Request("0", prompt, pooling=PoolingParams()))
    engine.step()
    (seq,) = engine.scheduler.sequences.running.values()
    assert 0 < seq.num_computed_tokens < len(prompt)
    engine.scheduler.sequences.preempt(seq)
    outputs: list[SequenceOutput] = []
    while engine.has_unfinished:
        outputs += engine.step()
    confirm(model, [prompt], embeddings(engine, outputs), "mean")
    assert not engine.executor.model_runner._pooler._sums


@pytest.mark.parametrize(("kind", "num_hits"), [("last", 32), ("mean", 0), ("cls", 0)])
def test_only_the_last_token_allows_prefix_hits(folder, model, kind, num_hits):
    engine = make_engine(folder, task="embed", pooling_type=kind)
    prompt = list(range(3, 45))
    first, again = run(engine, [prompt])[0], run(engine, [prompt])[0]
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, num_hits)
    assert first.pooled == again.pooled


def test_a_canceled_prompt_leaves_nothing(folder, model):
    engine = make_engine(folder, task="embed", pooling_type="mean", max_num_batched_tokens=16)
    engine.add_request(Request("0", list(range(3, 60)), pooling=PoolingParams()))
    engine.step()
    (output,) = engine.cancel_request("0")
    assert (output.finish_reason, output.pooled) == (FinishReason.ABORT, None)
    assert not engine.has_unfinished
    run(engine, [[4]])
    assert not engine.executor.model_runner._pooler._sums


def test_embeddings_are_in_the_messages_between_processes():
    output = ModelRunnerOutput([], pooled=[b"\0\0\x80?", b""])
    assert decode_model_runner_output(encode(output)) == output


# --- what a checkpoint and the options say -----------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("normalize", [False, True])
def test_the_files_of_sentence_transformers_are_read(folder, model, tmp_path, kind, normalize):
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    newer = {"embedding_dimension": HIDDEN_SIZE, "include_prompt": True}
    newer["pooling_mode"] = "lasttoken" if kind == "last" else kind
    for pooling in (older_pooling(kind, HIDDEN_SIZE), newer):
        write_modules(tmp_path, pooling, normalize=normalize)
        info = make_engine(tmp_path).executor.info
        assert info.pooling is not None
        assert tuple(info.pooling) == (kind, normalize)
        assert f"embeddings of 64 numbers ({kind}" in info.describe()
    other = make_engine(tmp_path, pooling_type="mean", normalize=not normalize).executor.info
    assert other.pooling is not None
    assert tuple(other.pooling) == ("mean", not normalize)
    assert make_engine(tmp_path, task="generate").executor.info.pooling is None


@pytest.mark.parametrize(
    ("pooling", "more", "message"),
    [
        ({"pooling_mode_weightedmean_tokens": True}, (), "weightedmean"),
        ({"pooling_mode": ["cls", "mean"]}, (), "pooling_mode must be one of lasttoken, mean, cls"),
        ({"pooling_mode_max_tokens": True}, (), "pooling_mode_max_tokens must be one of"),
        ({"pooling_mode": "mean", "include_prompt": False}, (), "include_prompt is false"),
        ({"pooling_mode": "mean", "embedding_dimension": 9}, (), r"hidden_size \(64\), got 9"),
        ({"pooling_mode": "mean"}, ("Dense",), "got Transformer, Pooling, Dense, Normalize"),
    ],
)
def test_other_modules_and_modes_are_refused_by_name(
    folder, model, tmp_path, pooling, more, message
):
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    write_modules(tmp_path, pooling, more=more)
    with pytest.raises(ConfigError, match=message):
        make_engine(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"do_lower_case": True}, "do_lower_case is true"),
        ({"modality_config": {"text": {}, "message": {"format": "flat"}}}, "chat template"),
    ],
)
def test_changes_to_texts_are_refused(folder, model, tmp_path, content, message):
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    write_modules(tmp_path, older_pooling("mean", HIDDEN_SIZE))
    config = tmp_path / "sentence_bert_config.json"
    config.write_text('{"max_seq_length": 9, "do_lower_case": false}')
    make_engine(tmp_path)
    config.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message):
        make_engine(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "the modules must be"),
        ("[1]", "JSON list of modules"),
        ("[", "modules.json is not valid JSON"),
        (
            '[{"type": "a.Transformer", "path": "0"}, {"type": "a.Pooling", "path": "1"}]',
            "path of Transformer must be empty",
        ),
        (
            '[{"type": "a.Transformer", "path": ""}, {"type": "a.Pooling", "path": "../x"}]',
            "path of Pooling must be a folder next to it",
        ),
        ('[{"type": "a.Transformer", "path": ""}, {"type": "a.Pooling", "path": "p"}]', "cannot"),
    ],
)
def test_a_wrong_list_of_modules_is_refused(folder, model, tmp_path, content, message):
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "modules.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        make_engine(tmp_path)


def test_options_that_do_not_fit_are_refused(folder, model, tmp_path):
    with pytest.raises(ConfigError, match="option pooling_type can only be used with task embed"):
        make_engine(folder, pooling_type="mean")
    with pytest.raises(ConfigError, match="option normalize can only be used with task embed"):
        make_engine(folder, normalize=True)
    model.base_model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="option task must be auto or embed: .* no output layer"):
        make_engine(tmp_path, task="generate")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "is_causal": False}))
    with pytest.raises(ConfigError, match="is_causal is False, which is not supported"):
        make_engine(tmp_path)


def test_vllms_names_of_the_options():
    assert from_mapping({"runner": "pooling"}).config.task == "pooling"
    assert from_mapping({"task": "embedding", "pooling_type": "MEAN"}).config.pooling_type == "mean"
    assert from_mapping({"runner": "generate"}).config.task == "generate"
    with pytest.raises(ConfigError, match="runner is another name of task"):
        from_mapping({"runner": "pooling", "task": "embed"})
    with pytest.raises(ConfigError, match="pooling_type must be one of last, mean, cls"):
        from_mapping({"pooling_type": "max"})


# --- requests ------------------------------------------------------------------------------------


def test_wrong_requests_are_refused(folder, model):
    engine = make_engine(folder, task="embed", max_model_len=20)
    for prompt, params, message in (
        ([], PoolingParams(), "prompt: is empty"),
        ([5] * 21, PoolingParams(), r"prompt: has 21 tokens; at most 20 tokens: max_model_len"),
        ([199], PoolingParams(), "prompt: token ids must be from 0 to 198"),
        ([5], PoolingParams(dimensions=65), r"dimensions: must be at most .*\(64\), got 65"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            engine.add_request(Request("0", prompt, pooling=params))
    with pytest.raises(InvalidRequest, match="task: the model makes embeddings"):
        engine.add_request(Request("0", [5], SamplingParams()))
    run(engine, [[5] * 20])
    with pytest.raises(InvalidRequest, match="task: the model generates text"):
        make_engine(folder).add_request(Request("0", [5], pooling=PoolingParams()))
    with pytest.raises(InvalidRequest, match="dimensions: must be an integer from 1"):
        PoolingParams(dimensions=0)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", task="embed", pooling_type="mean")


def test_the_offline_api(llm):
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    texts = ["What does len do?", "a", "import os"]
    outputs = llm.embed(texts)
    for text, output in zip(texts, outputs, strict=True):
        ids = llm.tokenizer.encode(text)
        assert output.prompt_token_ids == ids
        wanted = expected(oracle, ids, "mean")
        torch.testing.assert_close(
            torch.tensor(output.outputs.embedding), wanted, rtol=0, atol=1e-5
        )
    (short,) = llm.embed(outputs[0].prompt_token_ids, PoolingParams(dimensions=5))
    assert len(short.outputs.embedding) == 5
    with pytest.raises(InvalidRequest, match="task: the model makes embeddings"):
        llm.generate("a")
    with pytest.raises(InvalidRequest, match="task: the model generates text"):
        LLM("demo").embed("a")
    with pytest.raises(InvalidRequest, match="pooling_params: has 1 entries for 2 prompts"):
        llm.embed(["a", "b"], [PoolingParams()])


def test_scores_are_cosine_similarities(llm):
    a, b, c = (np.array(output.outputs.embedding) for output in llm.embed(["a b", "b c", "c d"]))
    scores = [output.outputs.score for output in llm.score("a b", ["b c", "c d", "a b"])]
    assert scores == pytest.approx([a @ b, a @ c, 1], abs=1e-6)
    pairs = [output.outputs.score for output in llm.score(["a b", "b c"], ["b c", "c d"])]
    assert pairs == pytest.approx([a @ b, b @ c], abs=1e-6)
    with pytest.raises(InvalidRequest, match="data_1: has 2 entries for 3 in data_2"):
        llm.score(["a", "b"], ["a", "b", "c"])
