"""Tiny quantized checkpoints: each format written by its own library or by an independent writer.

A writer returns the stored tensors of a weight and the weight that they stand for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

Stored = dict[str, Tensor]
Writer = Callable[[Tensor], tuple[Stored, Tensor]]
FP8 = torch.float8_e4m3fn


def compressed(stored_format: str, scale_dtype: torch.dtype, **args: Any) -> Writer:
    """A writer of compressed-tensors, which compresses and decompresses by itself."""
    # Here, as the machine with a GPU does not have it.
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    arguments = QuantizationArgs(**args)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    compressor = BaseCompressor.get_value_from_registry(stored_format)

    def write(weight: Tensor) -> tuple[Stored, Tensor]:
        outputs, inputs = weight.shape
        strategy = str(arguments.strategy)
        if strategy == "tensor":
            blocks = outputs, inputs
        elif strategy == "block":
            blocks = tuple(arguments.block_structure)
        else:
            blocks = 1, arguments.group_size or inputs
        shape = (-(-outputs // blocks[0]), -(-inputs // blocks[1]))
        limit = 448 if arguments.type == "float" else 2 ** (arguments.num_bits - 1)
        scale = (weight.abs().max() / limit * (0.5 + torch.rand(shape))).to(scale_dtype)
        state = {"weight": weight.to(scale_dtype), "weight_scale": scale}
        if strategy == "tensor":
            state["weight_scale"] = scale.view(1)
        if not arguments.symmetric:
            zeros = torch.randint(-3, 3, shape, dtype=torch.int8)
            state["weight_zero_point"] = zeros
        stored = compressor.compress(state, scheme)
        return stored, compressor.decompress(stored, scheme)["weight"]

    return write


def pack(values: Tensor, bits: int) -> Tensor:
    """Rows of numbers as int32 words, low bits first, by Python's integers of any length."""
    rows = []
    for row in values.tolist():
        number = sum(value << (bits * index) for index, value in enumerate(row))
        count = -(-len(row) * bits // 32)
        words = [(number >> (32 * word)) & 0xFFFFFFFF for word in range(count)]
        rows.append([word - 2**32 if word >= 2**31 else word for word in words])
    return torch.tensor(rows, dtype=torch.int32)


def gptq(bits: int, group_size: int, *, version: int = 1, act_order: bool = False) -> Writer:
    """A writer of GPTQ that gives random numbers and the float16 weight that they stand for."""

    def write(weight: Tensor) -> tuple[Stored, Tensor]:
        outputs, inputs = weight.shape
        size = group_size if group_size > 0 else inputs
        groups = -(-inputs // size)
        values = torch.randint(0, 2**bits, (inputs, outputs))
        zeros = torch.randint(0, 2**bits, (groups, outputs))
        scales = (0.05 + 0.1 * torch.rand(groups, outputs)).half() / 2 ** (bits - 1)
        index = torch.arange(inputs, dtype=torch.int32) // size
        if act_order:
            index = index[torch.randperm(inputs)]
        stored_zeros = (zeros - (1 if version == 1 else 0)) % 2**bits
        stored = {
            "qweight": pack(values.t(), bits).t().contiguous(),
            "qzeros": pack(stored_zeros, bits),
            "scales": scales,
            "g_idx": index,
        }
        spread = index.long()
        dense = (values - zeros[spread]).half() * scales[spread]
        return stored, dense.t()

    return write


def awq(group_size: int) -> Writer:
    """A writer of AWQ that gives random numbers and the float16 weight that they stand for."""

    def words(values: Tensor) -> Tensor:
        order = [0, 2, 4, 6, 1, 3, 5, 7]  # the neighbor that each nibble holds
        return pack(values.view(len(values), -1, 8)[:, :, order].flatten(1), 4)

    def write(weight: Tensor) -> tuple[Stored, Tensor]:
        outputs, inputs = weight.shape
        groups = -(-inputs // group_size)
        values = torch.randint(0, 16, (inputs, outputs))
        zeros = torch.randint(0, 16, (groups, outputs))
        scales = (0.02 * torch.rand(groups, outputs) + 0.001).half()
        stored = {"qweight": words(values), "qzeros": words(zeros), "scales": scales}
        spread = torch.arange(inputs) // group_size
        return stored, ((values - zeros[spread]).half() * scales[spread]).t()

    return write


def fp8(rows: int, columns: int, scale_name: str) -> Writer:
    """A writer of float8 values with a float32 scale for each block of rows x columns."""

    def write(weight: Tensor) -> tuple[Stored, Tensor]:
        outputs, inputs = weight.shape
        blocks = torch.rand(-(-outputs // rows), -(-inputs // columns)) * 0.001 + 0.0005
        scales = blocks.repeat_interleave(rows, 0)[:outputs].repeat_interleave(columns, 1)
        scales = scales[:, :inputs]
        values = (weight / scales).clamp(-448, 448).to(FP8)
        dense = values.float() * scales
        stored_scales = blocks.view(()) if blocks.numel() == 1 else blocks
        return {"weight": values, scale_name: stored_scales}, dense

    return write


def quantize_checkpoint(
    model: PreTrainedModel,
    folder: Path,
    config: dict[str, Any],
    writer_of: Callable[[str], Writer | None],
) -> dict[str, Tensor]:
    """Write the checkpoint in `folder` again with quantized layers; returns their dense weights.

    The model gets the weights that the stored tensors stand for.
    """
    torch.manual_seed(1)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    dense: dict[str, Tensor] = {}
    for name in [name for name in state if name.endswith("_proj.weight")]:
        layer = name.removesuffix(".weight")
        writer = writer_of(layer)
        if writer is None:
            continue
        stored, dense[layer] = writer(state.pop(name))
        state |= {f"{layer}.{suffix}": tensor for suffix, tensor in stored.items()}
        model.get_parameter(name).data = dense[layer].float()
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    save_file({name: t.contiguous() for name, t in state.items()}, folder / "model.safetensors")
    path = folder / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"quantization_config": config}))
    return dense
