"""Several ranks answer as one: tokens, log-probabilities and embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from comparison import EP2, EVEN, PP2, STEPS, TP2, TP2_PP2, compare
from effort import ALL
from encoders import make_encoder
from quantized_checkpoints import awq, fp8, gptq, quantize_checkpoint
from ranks_in_threads import load_first_rank, make_ranks_engine, torch_threads_restored
from rerankers import make_reranker
from safetensors.torch import load_file, save_file

from paged_backend.engine.engine import Engine
from paged_backend.values.errors import ConfigError
from paged_backend.values.pooling_params import PoolingParams
from paged_backend.values.request import Request
from paged_backend.values.sampling_params import SamplingParams

Layouts = list[dict[str, object]]
"""The last one is always compared, the others where everything is tried."""

# Families that add nothing to those beside them but other sizes, or parts that no rank divides.
_THOROUGH = pytest.mark.thorough

# Two layers of each kind, so that each of two stages has one.
_TWICE = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
_SHORT = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2}
_FOUR_HEADS = {**EVEN, "linear_num_heads": 4}
_EVEN_EXPERTS = {**EVEN, "num_local_experts": 4}
_TWO_BLOCKS = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}


@pytest.fixture(autouse=True)
def torch_threads() -> Iterator[None]:
    """Leave torch's number of threads to other tests as it was."""
    with torch_threads_restored():
        yield


@pytest.mark.parametrize(
    ("family", "values", "layouts"),
    [
        pytest.param("llama3", EVEN, [TP2, PP2, TP2_PP2], id="dense"),
        pytest.param("qwen2", {}, [TP2, TP2_PP2], id="biases, a vocabulary that does not divide"),
        pytest.param(
            "gemma3", EVEN, [TP2, PP2, TP2_PP2], id="sliding windows, a tied embedding with a scale"
        ),
        pytest.param(
            "gemma4",
            {**EVEN, "vocab_size_per_layer_input": EVEN["vocab_size"]},
            [TP2],
            id="layers of several shapes, shared keys and values",
            marks=_THOROUGH,
        ),
        pytest.param(
            "gemma4-plain", EVEN, [TP2, TP2_PP2], id="the same without shared ones", marks=_THOROUGH
        ),
        pytest.param(
            "gemma4-moe",
            {**EVEN, "vocab_size_per_layer_input": EVEN["vocab_size"]},
            [TP2, EP2],
            id="the same with experts beside the MLP",
        ),
        pytest.param(
            "llama4", EVEN, [TP2, TP2_PP2, EP2], id="chunks, factors on what experts read"
        ),
        pytest.param("phi3", EVEN, [TP2], id="fused projections"),
        pytest.param("glm4", {}, [TP2], id="interleaved rotary pairs", marks=_THOROUGH),
        pytest.param(
            "granite", {}, [PP2], id="factors on embeddings, layers and logits", marks=_THOROUGH
        ),
        pytest.param("olmo2", {}, [PP2, TP2], id="norms of outputs, and of all queries together"),
        pytest.param("olmo3", {}, [TP2_PP2], id="the same with sliding windows", marks=_THOROUGH),
        pytest.param("olmoe", {}, [EP2], id="the same with experts", marks=_THOROUGH),
        pytest.param("qwen2-moe", EVEN, [TP2, EP2, TP2_PP2], id="experts, one of them shared"),
        pytest.param("deepseek-v2-lite", {}, [TP2], id="latent attention", marks=_THOROUGH),
        pytest.param(
            "deepseek-v3", EVEN, [EP2, TP2_PP2], id="the same with biases and groups of experts"
        ),
        pytest.param(
            "glm4-moe",
            EVEN,
            [TP2, EP2, TP2_PP2],
            id="groups of experts behind norms of heads",
            marks=_THOROUGH,
        ),
        pytest.param(
            "gpt-oss", {}, [TP2, TP2_PP2 | EP2], id="fused experts with biases, sinks, windows"
        ),
    ],
)
def test_tokens_are_those_of_one_rank(
    family: str, values: dict[str, Any], layouts: Layouts, tmp_path: Path
) -> None:
    make_checkpoint(family, tmp_path, **values)
    compare(tmp_path, layouts if ALL or family == "llama3" else layouts[-1:])


@pytest.mark.parametrize(
    ("family", "values", "layouts"),
    [
        pytest.param("qwen3-next", _TWICE, [TP2, PP2, EP2], id="gated delta, fused projections"),
        pytest.param("qwen3.5", _TWICE, [TP2_PP2], id="gated delta, sections"),
        pytest.param(
            "olmo-hybrid", {}, [TP2], id="gated delta, separate projections", marks=_THOROUGH
        ),
        pytest.param("bamba", {}, [TP2], id="Mamba-2, a group of heads for each rank"),
        pytest.param("granite-hybrid-rope", _TWICE, [TP2_PP2], id="Mamba-2, one group with a norm"),
        pytest.param("falcon-h1", {}, [TP2_PP2, TP2], id="Mamba-2 beside attention"),
        pytest.param("lfm2-bias", _SHORT, [PP2, TP2], id="short convolutions with biases"),
        pytest.param("lfm2-moe", {}, [EP2], id="short convolutions and experts", marks=_THOROUGH),
        pytest.param("jamba", {}, [TP2, EP2], id="Mamba with a bias, and experts"),
        pytest.param("mamba", {}, [TP2, TP2_PP2], id="Mamba without attention", marks=_THOROUGH),
        pytest.param("falcon-mamba", {}, [TP2], id="Mamba with norms that have no weights"),
        pytest.param("mamba2", {}, [PP2, TP2], id="Mamba-2 without attention", marks=_THOROUGH),
        pytest.param("zamba2", {}, [TP2], id="blocks that layers share"),
        pytest.param("kimi-linear", _FOUR_HEADS, [TP2, EP2], id="gated delta by channels"),
        pytest.param(
            "granite-hybrid-moe",
            _EVEN_EXPERTS,
            [TP2, EP2],
            id="experts beside an MLP",
            marks=_THOROUGH,
        ),
        pytest.param("nemotron-h-latent", {}, [TP2, EP2], id="experts of projected rows"),
        pytest.param("recurrent-gemma", _TWO_BLOCKS, [TP2], id="RG-LRU"),
    ],
)
def test_tokens_of_states_are_those_of_one_rank(
    family: str, values: dict[str, Any], layouts: Layouts, tmp_path: Path
) -> None:
    """States of some families are so large that half of a small pool would not hold them."""
    make_checkpoint(family, tmp_path, **values)
    tried = layouts if ALL else layouts[-1:]
    compare(tmp_path, tried, preempted=family in ("lfm2-bias", "recurrent-gemma"))


def test_three_stages_that_have_different_layers(tmp_path: Path) -> None:
    """Only the second stage has a layer that sees all positions.

    The embedding, which is also the output layer, is stored by the name of the latter.
    """
    layers = ["sliding_attention"] * 3 + ["full_attention", "sliding_attention"]
    make_checkpoint("gemma3", tmp_path, num_hidden_layers=5, layer_types=layers)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, file, {"format": "pt"})
    compare(tmp_path, [{"pipeline_parallel_size": 3}], tolerance=0)


@pytest.mark.parametrize(
    ("family", "quantization", "layouts"),
    [
        pytest.param("qwen3-moe", "int8", [TP2_PP2], marks=_THOROUGH),
        ("gpt-oss", "int8", [TP2_PP2, TP2]),
        ("llama3", "int4", [TP2_PP2, TP2]),
    ],
)
def test_rounded_weights(family: str, quantization: str, layouts: Layouts, tmp_path: Path) -> None:
    """int8 layers round their inputs, each row by the largest number of all ranks.

    A sum of experts differs in its last bit, and so a number may be rounded to the next integer.
    """
    make_checkpoint(family, tmp_path)
    tried = layouts if ALL else layouts[-1:]
    compare(tmp_path, tried, quantization=quantization, tolerance=0.05)


@pytest.mark.parametrize(
    ("family", "values", "layouts"),
    [
        pytest.param("llama3", EVEN, [TP2, TP2_PP2], id="dense", marks=_THOROUGH),
        pytest.param("phi3", {}, [TP2], id="fused projections", marks=_THOROUGH),
        pytest.param(
            "llama3", {"attention_bias": True, "mlp_bias": True}, [TP2], id="biases of sums"
        ),
        pytest.param("gemma3", EVEN, [TP2_PP2], id="a tied embedding, which is int8, too"),
    ],
)
def test_int8_layers_have_the_bits_of_one_rank(
    family: str, values: dict[str, Any], layouts: Layouts, tmp_path: Path
) -> None:
    """Integers are added up before they are scaled.

    Each rank computes whole vectors of the MLP; the rest of a row may be rounded in another way.
    """
    make_checkpoint(family, tmp_path, intermediate_size=128, **values)
    compare(tmp_path, layouts if ALL else layouts[-1:], quantization="int8", tolerance=0)


@pytest.mark.parametrize(
    ("config", "writer"),
    [
        pytest.param(
            {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True},
            gptq(4, 16, act_order=True),
            id="GPTQ with act-order",
        ),
        pytest.param(
            {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True},
            awq(16),
            id="AWQ",
        ),
        pytest.param(
            {"quant_method": "fp8", "weight_block_size": [48, 40]},
            fp8(48, 40, "weight_scale_inv"),
            id="blocks that no share begins with",
        ),
    ],
)
def test_quantized_checkpoints(config: dict[str, Any], writer: Any, tmp_path: Path) -> None:
    model = make_checkpoint("llama3", tmp_path)
    quantize_checkpoint(model, tmp_path, config, lambda layer: writer)
    compare(tmp_path, [TP2, PP2] if ALL else [TP2])


@pytest.mark.parametrize(("family", "quantization"), [("gpt-oss", "int8"), ("llama3", None)])
def test_experts_as_a_whole(family: str, quantization: str | None, tmp_path: Path) -> None:
    """The option has no effect on a model without experts."""
    make_checkpoint(family, tmp_path)
    compare(tmp_path, [EP2], quantization=quantization, tolerance=0.05 if quantization else 1e-4)


def test_two_ranks_have_the_same_head_if_there_is_one(tmp_path: Path) -> None:
    make_checkpoint("llama3", tmp_path, num_attention_heads=4, num_key_value_heads=1, head_dim=16)
    compare(tmp_path, [TP2])


def test_four_ranks_share_two_heads_and_sum_in_one_order(tmp_path: Path) -> None:
    make_checkpoint("llama3", tmp_path, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    compare(tmp_path, [{"tensor_parallel_size": 4}])


@pytest.mark.parametrize("family", [pytest.param("qwen3", marks=_THOROUGH), "gpt-oss"])
def test_random_weights_are_those_of_one_rank(family: str, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path, **EVEN)
    compare(tmp_path, [TP2_PP2], load_format="dummy")


@pytest.mark.parametrize("kind", ["mean", "last"])
def test_embeddings(kind: str, tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path, **EVEN)
    prompts = [list(range(3, 3 + size)) for size in (1, 30, 90)]
    options = {"task": "embed", "pooling_type": kind, **STEPS}
    one = embeddings(make_ranks_engine(tmp_path, **options), prompts)
    for layout in (TP2, PP2, TP2_PP2) if ALL else (TP2_PP2,):
        several = embeddings(make_ranks_engine(tmp_path, **options, **layout), prompts)
        assert torch.allclose(one, several, atol=1e-5), layout


def embeddings(engine: Engine, prompts: list[list[int]]) -> torch.Tensor:
    for index, prompt in enumerate(prompts):
        engine.add_request(Request(str(index), prompt, SamplingParams(), pooling=PoolingParams()))
    found: dict[str, bytes] = {}
    while engine.has_unfinished:
        for output in engine.step():
            assert output.pooled is not None
            found[output.request_id] = output.pooled
    rows = [bytearray(found[str(index)]) for index in range(len(prompts))]
    return torch.stack([torch.frombuffer(row, dtype=torch.float32) for row in rows])


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "num_ranks", "message"),
    [
        ("smollm", 2, "must divide the model's 3 heads of queries; got 2"),
        ("qwen3-next", 4, "must divide the model's 2 heads of keys of linear_attn; got 4"),
        ("bamba", 4, "must divide the model's 2 groups of heads of mamba; got 4"),
        ("minimax", 2, "can only be 1 for lightning attention; got 2"),
        ("llama3", 3, "must divide the model's 8 heads of queries; got 3"),
        ("gpt2", 2, "can only be 1 for GPT2LMHeadModel, for which transformers has no plan"),
        ("cohere2", 3, "must divide the model's 4 num_attention_heads; got 3"),
    ],
)
def test_models_that_ranks_cannot_divide(
    family: str, num_ranks: int, message: str, tmp_path: Path
) -> None:
    make_checkpoint(family, tmp_path)
    with pytest.raises(ConfigError, match=f"^option tensor_parallel_size {message}"):
        load_first_rank(tmp_path, tensor_parallel_size=num_ranks)


def test_models_that_stages_cannot_compute(tmp_path: Path) -> None:
    make_checkpoint("llama3", tmp_path / "decoder", num_hidden_layers=2)
    make_checkpoint("gpt2", tmp_path / "fallback")
    make_encoder("bert", tmp_path / "encoder")
    make_reranker("qwen3", tmp_path / "reranker")
    make_checkpoint("zamba2", tmp_path / "shared")
    for name, message in (
        ("decoder", "must be at most 2, the number of the model's layers; got 3"),
        ("fallback", "can only be 1 for GPT2LMHeadModel, for which transformers has no plan"),
        ("encoder", "can only be 1 for an encoder; got 3"),
        ("shared", "can only be 1 for a model with blocks that layers share; got 3"),
        ("reranker", "can only be 1 for a model that scores pairs of texts; got 3"),
    ):
        with pytest.raises(ConfigError, match=f"^option pipeline_parallel_size {message}"):
            load_first_rank(tmp_path / name, pipeline_parallel_size=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"pipeline_parallel_size": 9, "tensor_parallel_size": 8},
            "option pipeline_parallel_size times tensor_parallel_size must be at most 64",
        ),
        ({"tensor_parallel_size": 0}, "option tensor_parallel_size must be .*, got 0"),
        (
            {"tensor_parallel_size": 2, "cpu_cores": "0"},
            "option cpu_cores must have a core for each",
        ),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    make_checkpoint("llama3", tmp_path)
    with pytest.raises(ConfigError, match=message):
        load_first_rank(tmp_path, **options)
