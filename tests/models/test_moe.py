"""Mixture-of-experts layers against those of transformers, on checkpoints that it has saved."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from effort import ALL
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.families.granite import granite_hybrid_keys
from paged_backend.checkpoint.families.llama4 import llama4_keys
from paged_backend.checkpoint.moe import MoeShape, Routing, Scoring
from paged_backend.checkpoint.moe_reader import (
    read_gpt_oss,
    read_granite,
    read_llama4,
    read_mixtral,
    read_nemotron_h,
    read_olmoe,
    read_qwen2_moe,
    read_qwen3_moe,
)
from paged_backend.checkpoint.moe_tensors import moe_tensors
from paged_backend.checkpoint.stored_tensor import Parameter
from paged_backend.checkpoint.tensor_names import usual_name
from paged_backend.checkpoint.tensors import Role
from paged_backend.checkpoint.weights import load_weights, random_weights
from paged_backend.models.layers import Kernels, QuantizedKernels
from paged_backend.models.moe import MoeMLP
from paged_backend.models.quantized_experts import experts_quantized_online, quantized_experts
from paged_backend.models.quantized_linear import quantized_linear
from paged_backend.platforms.cpu.platform import BFloat16Platform, CpuPlatform
from paged_backend.platforms.cpu.torch_platform import TorchPlatform
from paged_backend.quantization.online import ONLINE_FORMATS
from paged_backend.quantization.read import read_quantization
from paged_backend.tools.quantize import scheme_of
from paged_backend.values.errors import ConfigError

_SIZES = {
    "vocab_size": 50,
    "hidden_size": 72,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 3,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.15,
}
_MAMBA = {"mamba_n_heads": 9, "mamba_d_head": 16}
_QWEN = {"moe_intermediate_size": 36, "num_experts": 10}
_FAMILIES: dict[str, tuple[dict[str, Any], Callable[[ConfigFile], MoeShape | None]]] = {
    "mixtral": ({"model_type": "mixtral", "num_local_experts": 6}, read_mixtral),
    "qwen2_moe": (
        {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 52, **_QWEN},
        read_qwen2_moe,
    ),
    "qwen3_moe": ({"model_type": "qwen3_moe", "norm_topk_prob": True, **_QWEN}, read_qwen3_moe),
    "olmoe": ({"model_type": "olmoe", "num_experts": 6}, read_olmoe),
    "olmoe-all": ({"model_type": "olmoe", "num_experts": 3, "norm_topk_prob": True}, read_olmoe),
    "gpt_oss": ({"model_type": "gpt_oss", "num_local_experts": 6, "head_dim": 18}, read_gpt_oss),
    "granite": (
        {"model_type": "granitemoehybrid", "num_local_experts": 6, **_MAMBA},
        lambda config: read_granite(granite_hybrid_keys(config)),
    ),
    "llama4": (
        {"model_type": "llama4_text", "num_local_experts": 6, "intermediate_size_mlp": 48},
        lambda config: read_llama4(llama4_keys(config)),
    ),
    "nemotron": (
        {
            "model_type": "nemotron_h",
            "layers_block_type": ["moe"],
            "moe_intermediate_size": 36,
            "moe_latent_size": 28,
            "moe_shared_expert_intermediate_size": 52,
            "n_group": 4,
            "n_routed_experts": 12,
            "routed_scaling_factor": 1.7,
            "topk_group": 2,
        },
        read_nemotron_h,
    ),
}
_GPT_OSS_SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 3}
_LAYER, _FILE = "model.layers.0", "model.safetensors"
CPU, TORCH = CpuPlatform(), TorchPlatform(torch.float32)
on_each_platform = pytest.mark.parametrize("platform", [CPU, TORCH], ids=["cpu", "torch"])
on_each_family = pytest.mark.parametrize("family", _FAMILIES)


class Saved:
    """A model of transformers with random weights, and its checkpoint."""

    def __init__(self, family: str, folder: Path) -> None:
        values, self.read = _FAMILIES[family]
        torch.manual_seed(3)
        config = AutoConfig.for_model(**{**_SIZES, **values})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "bias" in name:
                    parameter.normal_(0, 0.5)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.normal_(0, 0.2)
        model.save_pretrained(folder)
        self.folder = folder
        names = {"granite": "block_sparse_moe", "llama4": "feed_forward", "nemotron": "mixer"}
        name = names.get(family, "mlp")
        self.mlp: nn.Module = getattr(model.model.layers[0], name)

    @property
    def shape(self) -> MoeShape:
        moe = self.read(ConfigFile.read(self.folder / "config.json"))
        assert moe is not None
        return moe

    def __call__(self, x: Tensor) -> Tensor:
        """The output of transformers' layer for rows `x`."""
        with torch.no_grad():
            out = self.mlp(x.unsqueeze(0))
        return (out[0] if isinstance(out, tuple) else out).squeeze(0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    made: dict[str, Saved] = {}

    def make(family: str) -> Saved:
        if family not in made:
            made[family] = Saved(family, tmp_path_factory.mktemp(family))
        return made[family]

    return make


def stored_shapes(folder: Path) -> dict[str, list[int]]:
    """The shapes of the checkpoint's tensors, by their usual names."""
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {usual_name(name): file.get_slice(name).get_shape() for name in file.keys()}


def load(moe: MoeShape, folder: Path, kernels: Kernels) -> MoeMLP:
    """The layer with its weights; other tensors of the checkpoint are read to nowhere."""
    prefix = f"{_LAYER}.{moe.names.module}"
    layer = MoeMLP(moe, prefix, kernels)
    own = {f"{prefix}.{name}": place for name, place in layer.parameters().items()}
    places: dict[str, Parameter] = dict(own)
    for name, shape in stored_shapes(folder).items():
        places.setdefault(name, torch.empty(shape))
    load_weights(folder, places)
    layer.pack()
    return layer


def some_rows(count: int = 40) -> Tensor:
    torch.manual_seed(5)
    return torch.randn(count, _SIZES["hidden_size"])


@pytest.mark.sampled
@on_each_platform
@on_each_family
def test_equals_transformers(family: str, platform: Kernels, saved: Callable[[str], Saved]) -> None:
    model = saved(family)
    layer = load(model.shape, model.folder, platform)
    x = some_rows()
    wanted = model(x)
    assert wanted.abs().mean() > 0.02
    torch.testing.assert_close(layer(x), wanted, rtol=1e-5, atol=1e-5)
    total = torch.ones_like(x)
    layer.add_to(total, x)
    torch.testing.assert_close(total, wanted + 1, rtol=1e-5, atol=1e-5)


@on_each_family
def test_bf16_is_close(family: str, saved: Callable[[str], Saved]) -> None:
    model = saved(family)
    out = load(model.shape, model.folder, BFloat16Platform(amx=False))(some_rows())
    error = (out - model(some_rows())).norm() / out.norm()
    assert 1e-4 < error < 1e-2


@pytest.mark.sampled
@on_each_platform
@on_each_family
def test_a_row_alone_is_the_row_in_a_batch(
    family: str, platform: Kernels, saved: Callable[[str], Saved]
) -> None:
    model = saved(family)
    layer = load(model.shape, model.folder, platform)
    x = some_rows(64)
    ids, weights = layer.router(x)
    inputs = torch.randn(64, model.shape.expert_size)
    together = layer.experts(inputs, ids, weights)
    for row in range(0, 64, 1 if ALL else 5):
        alone = x[row : row + 1]
        own_ids, own_weights = layer.router(alone)
        assert torch.equal(own_ids[0], ids[row]) and torch.equal(own_weights[0], weights[row])
        output = layer.experts(inputs[row : row + 1], own_ids, own_weights)
        assert torch.equal(output[0], together[row])
        if platform is CPU:  # the linear layers of the other one are torch's
            assert torch.equal(layer(alone)[0], layer(x)[row])


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("qwen2_moe", {"shared_expert": None}),
        ("qwen3_moe", {"routing": Routing(3, norm_topk_prob=False)}),
        ("mixtral", {"routing": Routing(3, norm_topk_prob=False)}),
        ("olmoe", {"routing": Routing(3, norm_topk_prob=True)}),
        ("gpt_oss", {"routing": Routing(3, Scoring.SOFTMAX)}),
        ("mixtral", {"routing": Routing(2, norm_topk_prob=True)}),
        ("granite", {"routing": Routing(3, Scoring.SOFTMAX)}),
        ("llama4", {"routing": Routing(3, Scoring.SIGMOID)}),
        ("llama4", {"shared_expert": None}),
        ("nemotron", {"routing": Routing(3, Scoring.SIGMOID, True, 1.7, True)}),
        ("nemotron", {"shared_expert": None}),
    ],
)
def test_another_layer_is_noticed(
    family: str, change: Mapping[str, Any], saved: Callable[[str], Saved]
) -> None:
    model = saved(family)
    layer = load(replace(model.shape, **change), model.folder, CPU)
    assert (layer(some_rows()) - model(some_rows())).abs().max() > 1e-2


@on_each_family
def test_names_and_shapes_are_those_of_the_checkpoint(
    family: str, saved: Callable[[str], Saved]
) -> None:
    model = saved(family)
    stored = {
        name.removeprefix(f"{_LAYER}."): tuple(shape)
        for name, shape in stored_shapes(model.folder).items()
        if f"{_LAYER}.{model.shape.names.module}." in name
    }
    specs = dict(moe_tensors(model.shape))
    assert {name: spec.shape for name, spec in specs.items()} == stored
    layer = MoeMLP(model.shape, "", CPU).parameters()
    module = model.shape.names.module
    assert {f"{module}.{name}" for name in layer} == set(stored)


@on_each_family
def test_ranks_can_divide_each_expert(family: str, saved: Callable[[str], Saved]) -> None:
    moe = saved(family).shape
    for name, spec in moe_tensors(moe):
        if ".experts." in name and spec.shard is not None:  # the dimension of the inner size
            assert spec.shape[spec.shard] in (moe.intermediate_size, 2 * moe.intermediate_size)
        is_whole = "latent_proj" in name or spec.role in (Role.ROUTER, Role.BIAS)
        assert (spec.shard is not None) or is_whole


def test_dummy_weights(saved: Callable[[str], Saved]) -> None:
    moe = saved("gpt_oss").shape
    layer = MoeMLP(moe, "", CPU)
    specs = {name.removeprefix("mlp."): spec for name, spec in moe_tensors(moe)}
    random_weights(layer.parameters(), specs, seed=0)
    layer.pack()
    assert layer(some_rows()).isfinite().all()


def test_a_missing_expert(saved: Callable[[str], Saved], tmp_path: Path) -> None:
    tensors = load_file(saved("olmoe").folder / "model.safetensors")
    del tensors[f"{_LAYER}.mlp.experts.4.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"1 tensor is missing.*mlp\.experts\.4\.up_proj\.weight"):
        load(saved("olmoe").shape, tmp_path, CPU)


def test_an_expert_of_another_size(saved: Callable[[str], Saved], tmp_path: Path) -> None:
    tensors = load_file(saved("gpt_oss").folder / "model.safetensors")
    name = f"{_LAYER}.mlp.experts.gate_up_proj"
    tensors[name] = tensors[name][..., :-2].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    wanted = r"model\.safetensors.*gate_up_proj has shape \[6, 72, 78\]"
    with pytest.raises(ConfigError, match=wanted):
        load(saved("gpt_oss").shape, tmp_path, CPU)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"num_experts_per_tok": 7},
            "num_experts_per_tok must be an integer from 1 up to 6, got 7",
        ),
        (
            {"num_experts_per_tok": 0},
            "num_experts_per_tok must be an integer from 1 up to 6, got 0",
        ),
        ({"num_experts_per_tok": None}, "num_experts_per_tok is missing"),
        ({"num_experts": None}, "num_experts is missing"),
        ({"scoring_func": "relu"}, "scoring_func must be one of softmax, sigmoid, got 'relu'"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob must be true or false, got 'yes'"),
    ],
)
def test_bad_configs_name_the_file_and_the_key(
    changes: dict[str, Any], words: str, saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    config = json.loads((saved("olmoe").folder / "config.json").read_text())
    path.write_text(json.dumps(config | changes))
    with pytest.raises(ConfigError) as raised:
        read_olmoe(ConfigFile.read(path))
    assert str(raised.value).startswith(f"{path}: {words}")
    assert "\n" not in str(raised.value)


def test_the_scoring_function_of_a_config(saved: Callable[[str], Saved], tmp_path: Path) -> None:
    config = json.loads((saved("olmoe").folder / "config.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | {"scoring_func": "sigmoid"}))
    assert read_olmoe(ConfigFile.read(path)).routing.scoring is Scoring.SIGMOID


# --- quantized ------------------------------------------------------------------------------------


def quantize(model: Saved, scheme_name: str, folder: Path, ignored: list[str]) -> dict[str, Tensor]:
    """Write the checkpoint with quantized experts; returns their weights as they should be read."""
    scheme = scheme_of(scheme_name, 32)
    tensors, dense = {}, {}
    for name, tensor in load_file(model.folder / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        dense[name] = tensors[name] = tensor
        if "experts." in name and layer not in ignored:
            weight = scheme.rounding.quantize(tensor, torch.float32)
            del tensors[name]
            tensors |= {f"{layer}.{part}": value for part, value in scheme.store(weight).items()}
            dense[name] = weight.dequantize()
    save_file(tensors, folder / "model.safetensors")
    config = {"quantization_config": {**scheme.config, "ignore": [*ignored, "re:.*gate$"]}}
    (folder / "config.json").write_text(json.dumps(config))
    return dense


def quantized(folder: Path, kernels: Kernels) -> Kernels:
    """The kernels for a quantized checkpoint."""
    quantization = read_quantization(folder, ConfigFile.read(folder / "config.json"))
    assert quantization is not None
    return QuantizedKernels(
        kernels,
        lambda spec, platform: quantized_linear(spec, quantization, platform),
        lambda spec, platform: quantized_experts(spec, quantization.format_of, platform),
    )


def norm_of_error(out: Tensor, wanted: Tensor) -> float:
    return float((out - wanted).norm() / wanted.norm())


@on_each_platform
@pytest.mark.parametrize("ignored", [[], [f"{_LAYER}.mlp.experts.2.up_proj"]])
@pytest.mark.parametrize(("scheme", "error"), [("w8a8", 2e-2), ("fp8", 1e-5)])
def test_a_quantized_checkpoint(
    scheme: str,
    error: float,
    ignored: list[str],
    platform: Kernels,
    saved: Callable[[str], Saved],
    tmp_path: Path,
) -> None:
    """Some experts may be left out; int8 rounds the inputs of experts if it is used for all."""
    model = saved("olmoe")
    dense = quantize(model, scheme, tmp_path, ignored)
    (plain := tmp_path / "plain").mkdir()
    save_file(dense, plain / "model.safetensors")
    x = some_rows()
    wanted = load(model.shape, plain, platform)(x)
    out = load(model.shape, tmp_path, quantized(tmp_path, platform))(x)
    assert norm_of_error(out, wanted) < (error if not ignored else 1e-5)
    if scheme == "w8a8" and not ignored:
        assert norm_of_error(out, wanted) > 1e-4
    assert norm_of_error(wanted, model(x)) > 1e-4  # the weights are rounded


def test_a_fused_tensor_has_no_format_of_separate_weights(
    saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    config = {"quantization_config": {**scheme_of("w8a8", 32).config, "ignore": []}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    wanted = r"quantization_config: the experts model\.layers\.0\.mlp\.experts must be in MXFP4"
    with pytest.raises(ConfigError, match=wanted):
        MoeMLP(saved("gpt_oss").shape, f"{_LAYER}.mlp", quantized(tmp_path, CPU))


def mxfp4_checkpoint(folder: Path) -> tuple[MoeShape, dict[str, Tensor]]:
    """Write experts in the form of gpt-oss on the hub; returns them as transformers reads them."""
    hidden, inner, count = 64, 96, 3
    moe = read_gpt_oss(ConfigFile({**_GPT_OSS_SIZES, "num_experts_per_tok": 2}, "config.json"))
    torch.manual_seed(2)
    tensors, dense = {}, {}
    for name, spec in moe_tensors(moe):
        if spec.role is not Role.EXPERT:
            tensors[name] = dense[name] = torch.randn(spec.shape)
    for part, outputs, inputs in (
        ("gate_up_proj", 2 * inner, hidden),
        ("down_proj", hidden, inner),
    ):
        blocks = torch.randint(256, (count, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 126, (count, outputs, inputs // 32), dtype=torch.uint8)
        name = f"mlp.experts.{part}"
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        dense[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    save_file({f"{_LAYER}.{name}": value for name, value in tensors.items()}, folder / _FILE)
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    section = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    (folder / "config.json").write_text(json.dumps({"quantization_config": section}))
    return moe, dense


@on_each_platform
def test_mxfp4_is_read_as_transformers_reads_it(platform: Kernels, tmp_path: Path) -> None:
    moe, dense = mxfp4_checkpoint(tmp_path)
    (plain := tmp_path / "plain").mkdir()
    save_file({f"{_LAYER}.{name}": value for name, value in dense.items()}, plain / _FILE)
    torch.manual_seed(4)
    x = torch.randn(20, 64)
    wanted = load(moe, plain, platform)(x)
    out = load(moe, tmp_path, quantized(tmp_path, platform))(x)
    assert wanted.abs().mean() > 0.1
    assert torch.equal(out, wanted)


def test_an_exponent_of_mxfp4_that_is_no_number(tmp_path: Path) -> None:
    moe, _ = mxfp4_checkpoint(tmp_path)
    tensors = load_file(tmp_path / _FILE)
    tensors[f"{_LAYER}.mlp.experts.down_proj_scales"][1, 2, 0] = 255
    save_file(tensors, tmp_path / _FILE)
    with pytest.raises(ConfigError, match=r"down_proj_scales.*scales must be at most 254"):
        load(moe, tmp_path, quantized(tmp_path, CPU))


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "error"), [("int8", 0.03), ("fp8", 0.1), ("int4", 0.25)])
@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss", "granite", "nemotron"])
def test_weights_are_quantized_as_they_are_loaded(
    family: str, name: str, error: float, saved: Callable[[str], Saved]
) -> None:
    model = saved(family)
    online = QuantizedKernels(
        CPU,
        lambda spec, platform: platform.linear(spec),
        lambda spec, platform: experts_quantized_online(spec, ONLINE_FORMATS[name], platform),
    )
    x = some_rows()
    out = load(model.shape, model.folder, online)(x)
    assert error / 30 < norm_of_error(out, model(x)) < error
