"""Reads how a checkpoint is quantized."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.errors import ConfigError
from paged_backend.quantization.compressed_tensors import read_compressed_tensors
from paged_backend.quantization.formats import Quantization
from paged_backend.quantization.fp8 import read_fp8, read_modelopt
from paged_backend.quantization.gptq_awq import read_awq, read_gptq
from paged_backend.quantization.mxfp4 import read_mxfp4
from paged_backend.validation import shorten


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

_MODELOPT_FILE = "hf_quant_config.json"


def read_quantization(folder: Path, config: ConfigFile) -> Quantization | None:
    """Read how the checkpoint in a folder is quantized; None if it is not.

    Args:
        folder: the checkpoint.
        config: its config.json.

    Raises:
        ConfigError: a key is missing or wrong, or the method is not supported.
    """
    section = config.section("quantization_config") or config.section("compression_config")
    if section is None:
        path = folder / _MODELOPT_FILE
        return read_modelopt(ConfigFile.read(path)) if path.exists() else None
    method = section.text("quant_method", "")
    if method not in QUANTIZATION_METHODS:
        supported = ", ".join(QUANTIZATION_METHODS)
        raise section.error("quant_method", f"is {shorten(method)}; supported: {supported}")
    return QUANTIZATION_METHODS[method](section)


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
