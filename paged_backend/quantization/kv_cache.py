"""Reads the format of the KV cache that a quantized checkpoint is made for."""

from __future__ import annotations

from paged_backend.checkpoint.config_file import ConfigFile

_MODELOPT = "kv_cache_quant_algo"
_SCHEME = "kv_cache_scheme"


def read_kv_cache_dtype(config: ConfigFile) -> str:
    """Return the value of the option ``kv_cache_dtype`` that a checkpoint is made for.

    Args:
        config: the quantization_config of any tool.

    Raises:
        ConfigError: the format is not supported.
    """
    if config.value(_MODELOPT) is not None:
        config.text(_MODELOPT, "", ("FP8",))
        return "fp8"
    if config.value(_SCHEME) == "static":  # AutoFP8
        return "fp8"
    scheme = config.section(_SCHEME)
    if scheme is None:
        return "auto"
    scheme.text("type", "float", ("float",))
    if scheme.integer("num_bits", 8) != 8:
        raise scheme.error("num_bits", f"must be 8, got {scheme.value('num_bits')}")
    return "fp8"
