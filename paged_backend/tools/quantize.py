"""Writes checkpoints of compressed-tensors from checkpoints in floating point."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from paged_backend.checkpoint.hub import resolve_model
from paged_backend.checkpoint.model_config import ModelConfig, load_model_config
from paged_backend.checkpoint.registry import tensors_of
from paged_backend.checkpoint.safetensors_files import open_tensors, weight_files
from paged_backend.checkpoint.tensors import Role
from paged_backend.checkpoint.weight_index import INDEX
from paged_backend.quantization.bits import pack_int4
from paged_backend.quantization.read import read_quantization
from paged_backend.quantization.round import Fp8Rounding, IntegerRounding, Rounding
from paged_backend.quantization.weight import QuantizedWeight
from paged_backend.values.errors import ConfigError

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", INDEX)


@dataclass(frozen=True, slots=True)
class Scheme:
    """A format of compressed-tensors.

    Attributes:
        rounding: how weights are rounded.
        group_size: inputs that share a scale; 0 stands for all.
        store: returns the stored tensors of a weight, by suffix.
        config: what quantization_config says, except for the layers that are left out.
    """

    rounding: Rounding
    group_size: int
    store: Callable[[QuantizedWeight], Mapping[str, Tensor]]
    config: Mapping[str, Any]


def scheme_of(name: str, group_size: int) -> Scheme:
    """Return the scheme w8a8, w4a16 (which has groups) or fp8."""
    if name == "w4a16":
        weights = _arguments("int", 4, strategy="group", group_size=group_size)
        rounding = IntegerRounding(4, group_size)
        return Scheme(rounding, group_size, _packed, _config("pack-quantized", weights, None))
    kind = "int" if name == "w8a8" else "float"
    channels = _arguments(kind, 8, strategy="channel")
    tokens = _arguments(kind, 8, strategy="token") | {"dynamic": True}
    rounding_to_8: Rounding = IntegerRounding(8) if kind == "int" else Fp8Rounding()
    return Scheme(rounding_to_8, 0, _plain, _config(f"{kind}-quantized", channels, tokens))


def quantize_checkpoint(model: str, output: Path, scheme: Scheme) -> None:
    """Write a checkpoint, a folder or an id, to a new folder, with quantized linear layers.

    The embedding, the output layer, routers, norms and biases stay as they are; other files are
    copied.

    Raises:
        ConfigError: the checkpoint cannot be read or is quantized, its sizes do not fit the
            groups, or the new folder exists.
    """
    folder = resolve_model(model)
    config = load_model_config(folder)
    if read_quantization(folder, config.file) is not None:
        raise ConfigError(f"{folder} is quantized already")
    if output.exists():
        raise ConfigError(f"{output} exists; give a new folder")
    files = weight_files(folder)
    linear = _linear_weights(config, scheme.group_size)
    output.mkdir(parents=True)
    index: dict[str, str] = {}
    for file in tqdm(files, desc="Quantizing", unit="file", disable=None):
        tensors = _quantized(file, linear, scheme)
        save_file(tensors, output / file.name, {"format": "pt"})
        index |= dict.fromkeys(tensors, file.name)
    if len(files) > 1:
        (output / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}, indent=2))
    for path in folder.iterdir():
        if path.is_file() and not path.name.endswith(_WEIGHTS):
            shutil.copyfile(path, output / path.name)
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    values["quantization_config"] = {**scheme.config, "ignore": ["lm_head", *_routers(config)]}
    (output / "config.json").write_text(json.dumps(values, indent=2) + "\n")


def _linear_weights(config: ModelConfig, group_size: int) -> set[str]:
    """The names of the weights to quantize."""
    quantized = Role.LINEAR, Role.EXPERT
    linear = {n: spec for n, spec in tensors_of(config).items() if spec.role in quantized}
    for name, spec in linear.items():
        if len(spec.shape) != 2:
            raise ConfigError(f"{name} holds all experts of a layer, which cannot be quantized")
        if group_size and spec.shape[1] % group_size:
            raise ConfigError(
                f"option group-size must divide the {spec.shape[1]} inputs of {name}, got "
                f"{group_size}"
            )
    return set(linear)


def _routers(config: ModelConfig) -> list[str]:
    """The names of the layers that choose or weigh experts, which are not quantized."""
    specs = tensors_of(config).items()
    return [name.removesuffix(".weight") for name, spec in specs if spec.role is Role.ROUTER]


def _quantized(file: Path, linear: set[str], scheme: Scheme) -> dict[str, Tensor]:
    """Return the tensors of a file, with quantized weights of linear layers."""
    tensors = {}
    with open_tensors(file) as stored:
        for name in stored.keys():
            tensor = stored.get_tensor(name)
            if name not in linear:
                tensors[name] = tensor
                continue
            layer = name.removesuffix(".weight")
            weight = scheme.rounding.quantize(tensor, tensor.dtype)
            for suffix, value in scheme.store(weight).items():
                tensors[f"{layer}.{suffix}"] = value
    return tensors


def _plain(weight: QuantizedWeight) -> Mapping[str, Tensor]:
    return {"weight": weight.values, "weight_scale": weight.scales}


def _packed(weight: QuantizedWeight) -> Mapping[str, Tensor]:
    return {
        "weight_packed": pack_int4(weight.values + 8),
        "weight_scale": weight.scales,
        "weight_shape": torch.tensor(weight.values.shape),
    }


def _arguments(kind: str, bits: int, **others: object) -> dict[str, Any]:
    return {"type": kind, "num_bits": bits, "symmetric": True, "dynamic": False, **others}


def _config(
    stored_format: str, weights: dict[str, Any], activations: dict[str, Any] | None
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": stored_format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
    }
