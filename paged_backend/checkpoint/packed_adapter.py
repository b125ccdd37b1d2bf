"""Reads LoRA adapters in TensorRT-LLM's packed form, which requests bring along.

``lora_weights`` has a row for each module of each layer. A row holds the first matrix [rank,
inputs], then the second one [outputs, rank], which is scaled already, and then zeros up to the
length of the longest row. ``lora_config`` has a row with the number of the module's kind, the layer
and the rank. The form is that of TensorRT-LLM's documentation of LoRA. The modules that the kinds
stand for are those of its converter for Llama.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from paged_backend.checkpoint.peft import Adapter, LowRank, ModuleSizes
from paged_backend.checkpoint.safetensors_files import open_tensors
from paged_backend.values.errors import ConfigError
from paged_backend.values.lora import PACKED_CONFIG as CONFIG
from paged_backend.values.lora import PACKED_FILE as FILE
from paged_backend.values.lora import PACKED_WEIGHTS as WEIGHTS

# The kinds of modules by their numbers, with the last parts of the names that the modules have in
# checkpoints. Several modules have one row: it has the outputs of one after those of the other.
_KINDS: dict[int, tuple[str, ...]] = {
    0: ("q_proj", "k_proj", "v_proj"),  # attn_qkv
    1: ("q_proj",),  # attn_q
    2: ("k_proj",),  # attn_k
    3: ("v_proj",),  # attn_v
    4: ("o_proj",),  # attn_dense
    5: ("gate_proj",),  # mlp_h_to_4h
    6: ("down_proj",),  # mlp_4h_to_h
    7: ("up_proj",),  # mlp_gate
}
_MODULE = re.compile(r"(?:.*\.)?layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)")

_Places = Mapping[tuple[int, str], str]
"""The names of modules by their layer and the last part of their name."""


class _Row(NamedTuple):
    """What `lora_config` says about a row."""

    number: int  # index of the row, for errors
    kind: int
    layer: int
    rank: int

    def error(self, tensor: str, problem: str) -> ConfigError:
        """Return an error about this row of a tensor."""
        return ConfigError(f"{tensor}: row {self.number} {problem}")


def is_packed(folder: Path) -> bool:
    """Return True if a folder has an adapter in the packed form."""
    return (folder / FILE).exists()


def read_packed(
    folder: Path,
    sizes: Mapping[str, ModuleSizes],
    max_rank: int,
    is_elsewhere: Callable[[str], bool] = lambda name: False,
) -> Adapter:
    """Read an adapter, and check it against the model.

    Args:
        folder: has the arrays in a file: `WEIGHTS` [modules, longest row] in float16, and `CONFIG`
            [modules, 3] in int32.
        sizes: the sizes of all modules here that can have adapters, by their names.
        max_rank: the largest rank.
        is_elsewhere: whether another stage has the module of a name. That stage checks its weights.

    Raises:
        ConfigError: the adapter does not fit; the message names the tensor and the row.
    """
    with open_tensors(folder / FILE) as tensors:
        weights, config = tensors.get_tensor(WEIGHTS), tensors.get_tensor(CONFIG)
    places = _places_of(sizes)
    modules: dict[str, LowRank] = {}
    for number, values in enumerate(config.tolist()):
        row = _Row(number, *values)
        if not 1 <= row.rank <= max_rank:
            raise row.error(
                CONFIG, f"has the rank {row.rank}; it must be from 1 to max_lora_rank ({max_rank})"
            )
        if row.kind not in _KINDS:
            kinds = ", ".join(map(str, _KINDS))
            raise row.error(CONFIG, f"has the module {row.kind}; only {kinds} are supported")
        if is_elsewhere(f"model.layers.{row.layer}"):
            continue
        names = _names_of(row, places)
        for name in names:
            if name in modules:
                raise row.error(CONFIG, f"is the second one for {name}")
        parts = _read_row(row, weights[number], [sizes[name] for name in names])
        modules.update(zip(names, parts, strict=True))
    digest = hashlib.sha256()  # the same in all stages
    for tensor in (config, weights):
        digest.update(f"{tensor.dtype} {list(tensor.shape)} ".encode())
        digest.update(tensor.numpy().tobytes())
    return Adapter(digest.hexdigest(), modules)


def _places_of(sizes: Mapping[str, ModuleSizes]) -> _Places:
    found = ((_MODULE.fullmatch(name), name) for name in sizes)
    return {(int(match[1]), match[2]): name for match, name in found if match is not None}


def _names_of(row: _Row, places: _Places) -> list[str]:
    """Return the names of the modules that a row stands for."""
    names = []
    for part in _KINDS[row.kind]:
        name = places.get((row.layer, part))
        if name is None:
            raise row.error(
                CONFIG, f"stands for {part} of layer {row.layer}, which can have no adapter here"
            )
        names.append(name)
    return names


def _read_row(row: _Row, values: Tensor, sizes: list[ModuleSizes]) -> list[LowRank]:
    """Return the matrices of the modules that a row [width] stands for."""
    rank, inputs = row.rank, sizes[0].inputs
    outputs = [size.outputs for size in sizes]
    length = rank * (inputs + sum(outputs))
    if len(values) < length:
        raise row.error(
            WEIGHTS, f"has {len(values)} numbers; the model and the rank ask for {length}"
        )
    if values[length:].any():
        raise row.error(
            WEIGHTS, f"goes on after the {length} numbers that the model and the rank ask for"
        )
    values = values[:length].float()
    a = values[: rank * inputs].view(rank, inputs).t().contiguous()
    b = values[rank * inputs :].view(sum(outputs), rank)
    return [LowRank(a, part.t().contiguous()) for part in torch.split(b, outputs)]
