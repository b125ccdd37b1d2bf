"""Reads how a checkpoint is quantized."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.quantization_settings import (
    method_of,
    settings_beside_config,
    settings_in_config,
)
from paged_backend.quantization.compressed_tensors import read_compressed_tensors
from paged_backend.quantization.formats import Quantization
from paged_backend.quantization.fp8 import read_fp8, read_modelopt
from paged_backend.quantization.gptq_awq import read_awq, read_gptq
from paged_backend.quantization.mxfp4 import read_mxfp4
from paged_backend.quantization.stored import (
    as_stored,
    fused_layers,
    holds_quantized,
    stored_headers,
)
from paged_backend.values.errors import ConfigError
from paged_backend.values.validation import shorten


def _read_gguf(config: ConfigFile) -> Quantization:
    # The tensors of a GGUF file are dequantized as they are read, so no layer has a format.
    return Quantization("gguf", lambda layer: None)


QUANTIZATION_METHODS: dict[str, Callable[[ConfigFile], Quantization]] = {
    "awq": read_awq,
    "compressed-tensors": read_compressed_tensors,
    "fp8": read_fp8,
    "gguf": _read_gguf,
    "gptq": read_gptq,
    "modelopt": read_modelopt,
    "mxfp4": read_mxfp4,
}
"""Readers of a quantization_config, by its ``quant_method``."""


def read_quantization(folder: Path, config: ConfigFile) -> Quantization | None:
    """Read how the checkpoint in a folder is quantized; None if it is not.

    Which layers are quantized is what the checkpoint's files hold, if they are there.

    Args:
        folder: the checkpoint.
        config: its config.json.

    Raises:
        ConfigError: a key is missing or wrong, the method is not supported, or a file of weights is
            damaged.
    """
    section = settings_in_config(config)
    settings = settings_beside_config(folder) if section is None else section
    if settings is None:
        return None
    method = method_of(settings)
    if method not in QUANTIZATION_METHODS:
        supported = ", ".join(QUANTIZATION_METHODS)
        raise settings.error("quant_method", f"is {shorten(method)}; supported: {supported}")
    quantization = QUANTIZATION_METHODS[method](settings)
    headers = stored_headers(folder)
    is_float = headers and not holds_quantized(headers)
    if section is None and is_float and quantization.kv_cache_dtype == "auto":
        return None  # a tool has left the file next to weights in floating point
    return as_stored(quantization, headers, fused_layers(config))


def check_option(option: str | None, quantization: Quantization) -> None:
    """Check the option ``quantization`` against the checkpoint; None means that it is left out.

    Raises:
        ConfigError: they differ.
    """
    if option not in (None, quantization.method):
        raise ConfigError(
            f"option quantization must be null or {quantization.method}, as the checkpoint is "
            f"quantized, got {shorten(option)}"
        )
