"""Encoders of the BERT family: the embeddings of transformers, without a KV cache."""

from __future__ import annotations

import ctypes
import json
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from embedding_models import expected, older_pooling, write_modules
from encoders import (
    ENCODERS,
    KINDS,
    MAX_POSITIONS,
    confirm,
    embed,
    encoder_engine,
    make_encoder,
    make_prompts,
    write_wordpiece,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMaskedLM, AutoTokenizer, PreTrainedModel

from paged_backend import LLM, ConfigError, InvalidRequest, PoolingParams, SamplingParams
from paged_backend.models.transformers_linear import KernelLinear
from paged_backend.platforms.cpu.amx import has_amx
from paged_backend.values.request import Request

LONG = [5 + place % 150 for place in range(MAX_POSITIONS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bert")


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    write_wordpiece(folder)
    return make_encoder("bert", folder)


def linked(folder: Path, target: Path) -> Path:
    """A folder with links to the same files, for changes; config.json is a copy."""
    target.mkdir(exist_ok=True)
    for file in folder.iterdir():
        (target / file.name).symlink_to(file)
    (target / "config.json").unlink()
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    return target


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# --- the same numbers as transformers ------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *(("bert", kind) for kind in KINDS),
        *((family, KINDS[place % 3]) for place, family in enumerate(ENCODERS[1:])),
    ],
)
def test_embeddings_are_those_of_transformers(tmp_path: Path, family: str, kind: str) -> None:
    model = make_encoder(family, tmp_path)
    normalize = kind != "mean"
    engine = encoder_engine(
        tmp_path, pooling_type=kind, normalize=normalize, max_num_batched_tokens=1000
    )
    prompts = make_prompts(12)
    for batch in (prompts, prompts[7:8], prompts[::-4]):  # each in one step
        confirm(model, batch, embed(engine, batch), kind, normalize=normalize)
    assert engine.stats().num_steps == 3
    runner: Any = engine.executor.model_runner
    layers = {type(layer) for layer in runner._encoder._model.modules()}
    assert KernelLinear in layers
    assert torch.nn.Linear not in layers


@pytest.mark.skipif(not has_amx(), reason="no AMX: float32_matmul_precision cannot be high")
@pytest.mark.parametrize(
    ("family", "kind"), [(family, KINDS[place % 3]) for place, family in enumerate(ENCODERS)]
)
def test_embeddings_are_those_of_transformers_with_products_on_amx(
    tmp_path: Path, family: str, kind: str
) -> None:
    model = make_encoder(family, tmp_path)
    engine = encoder_engine(
        tmp_path, pooling_type=kind, normalize=True, float32_matmul_precision="high"
    )
    assert "float32 (matmul precision high)" in engine.executor.info.describe()
    prompts = make_prompts(12)
    # The large random weights of these models add up what 8 bits less change.
    confirm(model, prompts, embed(engine, prompts), kind, atol=2e-5, normalize=True)


@pytest.mark.parametrize(
    ("family", "parts"),
    [
        ("bert", "encoder.layer.0.attention.self.query key value"),
        ("distilbert", "transformer.layer.0.attention.q_lin k_lin v_lin"),
        ("albert", "encoder.albert_layer_groups.0.albert_layers.0.attention.query key value"),
        ("mpnet", "encoder.layer.0.attention.attn.q k v"),
        ("eurobert", "layers.0.mlp.gate_proj up_proj"),
    ],
)
def test_layers_that_read_the_same_rows_are_one_product(
    tmp_path: Path, family: str, parts: str
) -> None:
    make_encoder(family, tmp_path)
    runner: Any = encoder_engine(tmp_path).executor.model_runner
    parent, _, first = parts.partition(" ")[0].rpartition(".")
    module = runner._encoder._model.get_submodule(parent)
    names = [first, *parts.split(" ")[1:]]
    assert len({getattr(module, name)._product for name in names}) == 1


def test_dimensions_are_kept_before_normalization(folder: Path, model: PreTrainedModel) -> None:
    engine = encoder_engine(folder, pooling_type="mean")
    (found,) = embed(engine, [LONG], PoolingParams(dimensions=7))
    confirm(model, [LONG], [found], "mean", dimensions=7)
    with pytest.raises(InvalidRequest, match=r"model's embeddings \(64\), got 65"):
        embed(engine, [[5]], PoolingParams(dimensions=65))


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "modernbert"])
def test_the_head_of_a_masked_language_model_is_not_needed(tmp_path: Path, family: str) -> None:
    model = make_encoder(family, tmp_path)
    whole = AutoModelForMaskedLM.from_config(model.config)
    whole.base_model.load_state_dict(model.state_dict(), strict=False)
    for file in tmp_path.glob("model*"):
        file.unlink()
    whole.save_pretrained(tmp_path)
    confirm(model, [LONG], embed(encoder_engine(tmp_path), [LONG]), "cls")


def test_bfloat16_weights(folder: Path, model: PreTrainedModel) -> None:
    engine = encoder_engine(folder, dtype="bfloat16", pooling_type="mean")
    (found,) = embed(engine, [LONG])
    wanted = expected(model, LONG, "mean")
    assert torch.dot(torch.from_numpy(found), wanted) > 0.999
    assert not torch.equal(torch.from_numpy(found), wanted)


# --- steps ---------------------------------------------------------------------------------------


def test_a_step_has_whole_prompts_within_its_budget(folder: Path, model: PreTrainedModel) -> None:
    engine = encoder_engine(folder, max_num_batched_tokens=100, pooling_type="mean")
    prompts = [LONG, [4] * 60, [5] * 30, [6] * 10, [7] * 40, [8] * 60]
    schedule, steps = engine.scheduler.schedule, []

    def spy() -> Any:
        steps.append(schedule())
        return steps[-1]

    engine.scheduler.schedule = spy  # type: ignore[method-assign]
    found = embed(engine, prompts)
    confirm(model, prompts, found, "mean")
    assert all(item.start == 0 for step in steps for item in step.slices)
    sizes = [[item.num_tokens for item in step.slices] for step in steps]
    assert sizes == [[96], [60, 30, 10], [40, 60]]
    assert embed(engine, [LONG])[0].tobytes() == found[0].tobytes()
    stats = engine.stats()
    assert (stats.num_blocks, stats.num_cache_hits, stats.kv_usage) == (0, 0, 0.0)
    assert "no KV cache" in engine.executor.info.describe()


@pytest.mark.parametrize(("length", "budget"), [(600, 2048), (2500, 2500)])
def test_by_default_a_step_has_room_for_the_longest_prompt(
    tmp_path: Path, length: int, budget: int
) -> None:
    model = make_encoder("bert", tmp_path, max_position_embeddings=length, num_hidden_layers=1)
    engine = encoder_engine(tmp_path)
    assert engine.executor.info.step_limits.max_num_batched_tokens == budget
    prompt = [5 + place % 150 for place in range(length)]
    confirm(model, [prompt], embed(engine, [prompt]), "cls")


def test_a_canceled_prompt_leaves_nothing(folder: Path, model: PreTrainedModel) -> None:
    engine = encoder_engine(folder, max_num_seqs=1)
    for name in "ab":
        engine.add_request(Request(name, LONG, pooling=PoolingParams()))
    engine.cancel_request("b")
    assert [output.request_id for output in engine.step()] == ["a"]
    assert not engine.has_unfinished
    engine.scheduler.check_empty()


# --- what a checkpoint and the options say -------------------------------------------------------


def test_the_files_of_sentence_transformers_are_read(
    folder: Path, model: PreTrainedModel, tmp_path: Path
) -> None:
    info = encoder_engine(folder).executor.info
    assert info.pooling is not None
    assert tuple(info.pooling) == ("cls", True)
    linked(folder, tmp_path)
    write_modules(tmp_path, older_pooling("mean", 64), normalize=False)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 30}')
    engine = encoder_engine(tmp_path)
    confirm(model, [LONG[:30]], embed(engine, [LONG[:30]]), "mean", normalize=False)
    with pytest.raises(InvalidRequest, match=r"has 31 tokens; at most 30 tokens: max_model_len"):
        embed(engine, [LONG[:31]])
    engine = encoder_engine(tmp_path, max_model_len=40)  # the model can do more
    confirm(model, [LONG[:40]], embed(engine, [LONG[:40]]), "mean", normalize=False)
    write_modules(tmp_path, older_pooling("mean", 64), more=("Dense",))
    with pytest.raises(ConfigError, match="got Transformer, Pooling, Dense, Normalize"):
        encoder_engine(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "generate"}, "option task must be auto or embed: .* no output layer"),
        ({"pooling_type": "max"}, "pooling_type must be one of last, mean, cls"),
        ({"quantization": "int8"}, "quantized weights are not supported"),
        ({"kv_cache_dtype": "bfloat16"}, "option kv_cache_dtype cannot be used with an encoder"),
        ({"kv_cache_memory_bytes": 9999}, "option kv_cache_memory_bytes cannot be used with an"),
        ({"max_num_batched_tokens": 95}, r"must be at least max_model_len \(96\) for an encoder"),
        ({"max_model_len": 97}, r"max_model_len must be at most 96 \(the model's max_position"),
        ({"model_impl": "paged"}, "architectures must be one of Llama"),
    ],
)
def test_options_that_do_not_fit(
    folder: Path, model: PreTrainedModel, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        encoder_engine(folder, **options)


def without_a_tensor(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["encoder.layer.0.output.dense.bias"]


def with_another_tensor(tensors: dict[str, torch.Tensor]) -> None:
    tensors["encoder.layer.0.attention.self.distance_embedding.weight"] = torch.ones(5, 5)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"architectures": ["BertForTokenClassification"]}, "it must have one of BertModel, Bert"),
        ({"is_decoder": True}, "is_decoder is true; only encoders"),
        (
            {"model_type": "new", "architectures": ["NewModel"], "auto_map": {"AutoModel": "m.N"}},
            "auto_map names code in the checkpoint, which is never run",
        ),
        (without_a_tensor, "1 missing tensors, such as .encoder.layer.0.output.dense.bias"),
        (with_another_tensor, "1 unexpected tensors, such as .encoder.layer.0.*distance_emb"),
        ({"hidden_size": 32}, "tensors, such as"),
    ],
)
def test_checkpoints_that_are_refused(
    folder: Path, model: PreTrainedModel, tmp_path: Path, damage: Any, message: str
) -> None:
    linked(folder, tmp_path)
    if isinstance(damage, dict):
        change_config(tmp_path, **damage)
    else:
        tensors = load_file(folder / "model.safetensors")
        damage(tensors)
        (tmp_path / "model.safetensors").unlink()
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=message) as caught:
        encoder_engine(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs glibc's malloc")
def test_steps_reuse_the_memory_of_activations(tmp_path: Path) -> None:
    make_encoder("bert", tmp_path, hidden_size=384, intermediate_size=1536, num_hidden_layers=2)
    engine = encoder_engine(tmp_path)

    def page_faults(seed: int) -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        embed(engine, make_prompts(100, seed))
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    page_faults(0)
    assert min(map(page_faults, (1, 2, 3))) < 500  # thousands if malloc returns freed memory


# --- the offline API -----------------------------------------------------------------------------


def test_texts_are_embedded_and_compared(folder: Path, model: PreTrainedModel) -> None:
    llm = LLM(str(folder), dtype="float32", pooling_type="mean")
    texts = ["What do cats eat?", "dogs", "a b c"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer(text)["input_ids"] for text in texts]
    outputs = llm.embed(texts)
    assert [output.prompt_token_ids for output in outputs] == ids
    found = [np.array(output.outputs.embedding, np.float32) for output in outputs]
    confirm(model, ids, found, "mean")
    scores = [output.outputs.score for output in llm.score(texts[0], texts[1:])]
    wanted = [float(found[0] @ found[1]), float(found[0] @ found[2])]
    assert scores == pytest.approx(wanted, abs=1e-6)
    with pytest.raises(InvalidRequest, match="task: the model makes embeddings; it does not"):
        llm.generate("a", SamplingParams(max_tokens=1))
    with pytest.raises(InvalidRequest, match=r"prompt: has 97 tokens; at most 96 tokens: max_mod"):
        llm.embed("a " * 95)
