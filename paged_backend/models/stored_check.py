"""Compares the sizes in config.json with the headers of a checkpoint's files.

It comes before any memory is taken for the model: a file of a hundred bytes can name sizes for
which no machine has room.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from paged_backend.checkpoint.registry import tensors_of
from paged_backend.checkpoint.shape import ModelShape
from paged_backend.checkpoint.tensors import TensorSpec
from paged_backend.checkpoint.tied_embeddings import EMBEDDING, OUTPUT_LAYER, only_output_layer
from paged_backend.quantization.formats import Quantization
from paged_backend.quantization.mxfp4 import Mxfp4Format
from paged_backend.quantization.stored import usual_headers
from paged_backend.values.errors import ConfigError

_WEIGHT = ".weight"
# The tensors that have the sizes of a quantized layer; scales are checked when they are read.
_NUMBERS = ("weight", "qweight", "weight_packed")


def check_stored(folder: Path, shape: ModelShape, quantization: Quantization | None) -> None:
    """Check that the files hold the tensors of a model, with their shapes.

    Args:
        folder: the checkpoint, in safetensors files.
        shape: what config.json says.
        quantization: how the checkpoint is quantized; None if it is not.

    Raises:
        ConfigError: a tensor is missing or has another shape, or a file is damaged.
    """
    headers = dict(usual_headers(folder))
    if shape.tied_embeddings and only_output_layer(headers):
        headers[EMBEDDING] = headers[OUTPUT_LAYER]
    missing = []
    for spec_name, spec in tensors_of(shape).items():
        for name, wanted in _stored(spec_name, spec, quantization):
            header = headers.get(name)
            if header is None:
                missing.append(name)
            elif _sizes(header.shape) != _sizes(wanted):
                raise ConfigError(
                    f"{header.file}: tensor {name} has shape {list(header.shape)}, but config.json "
                    f"asks for {list(wanted)}"
                )
    if missing:
        tensors = "1 tensor is" if len(missing) == 1 else f"{len(missing)} tensors are"
        raise ConfigError(
            f"{folder}: {tensors} missing, such as {min(missing)}; config.json does not fit the "
            "safetensors files, or they are not complete: download them again"
        )


def _stored(
    name: str, spec: TensorSpec, quantization: Quantization | None
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and shapes of the tensors that hold the numbers of one tensor."""
    layer = name.removesuffix(_WEIGHT)
    is_linear = layer != name and len(spec.shape) == 2
    is_fused = layer == name and len(spec.shape) == 3
    module = layer.rpartition(".")[0] if is_fused else layer
    can_be_quantized = quantization is not None and (is_linear or is_fused)
    weight_format = quantization.format_of(module) if quantization and can_be_quantized else None
    if weight_format is None:
        yield name, spec.shape
    elif is_linear:
        for suffix, kind in weight_format.tensors(*spec.shape).items():
            if suffix in _NUMBERS:
                yield f"{layer}.{suffix}", kind.shape
    elif isinstance(weight_format, Mxfp4Format):
        count, inputs, outputs = spec.shape
        shape = weight_format.tensors(outputs, inputs)["blocks"].shape
        yield f"{name}_blocks", (count, *shape)


def _sizes(shape: tuple[int, ...]) -> list[int]:
    """Return the sizes that count: a tensor with one row may be stored without that dimension."""
    return [size for size in shape if size != 1]
