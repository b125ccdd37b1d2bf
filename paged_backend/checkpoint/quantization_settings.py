"""Finds what a checkpoint says about its quantization, in the places where tools write it."""

from __future__ import annotations

from pathlib import Path

from paged_backend.checkpoint.config_file import ConfigFile

_SECTIONS = ("quantization_config", "compression_config")
# Files of ModelOpt, of AutoGPTQ and GPTQModel (and some versions of AutoAWQ), and of AutoAWQ.
_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
_AWQ_KEYS = ("w_bit", "q_group_size", "zero_point")  # which no other tool writes


def settings_in_config(config: ConfigFile) -> ConfigFile | None:
    """Return the settings in config.json, which may stand in the section of the text model.

    Raises:
        ConfigError: a key holds no object.
    """
    for part in (config, config.section("text_config")):
        for key in _SECTIONS:
            section = None if part is None else part.section(key)
            if section is not None:
                return section
    return None


def settings_beside_config(folder: Path) -> ConfigFile | None:
    """Return the settings in a file of a folder.

    Raises:
        ConfigError: a file cannot be read, or two files name different methods.
    """
    files = [ConfigFile.read(folder / name) for name in _FILES if (folder / name).exists()]
    methods = list(dict.fromkeys(map(method_of, files)))
    if len(methods) > 1:
        raise files[0].error(
            "quant_method", f"is {methods[0]}, but another file next to it says {methods[1]}"
        )
    return files[0] if files else None


def says_quantized(folder: Path, config: ConfigFile) -> bool:
    """Return whether a checkpoint says that it is quantized.

    Raises:
        ConfigError: a file cannot be read.
    """
    return settings_in_config(config) is not None or settings_beside_config(folder) is not None


def method_of(settings: ConfigFile) -> str:
    """Return the method that settings name, or that their keys show; empty if neither.

    Raises:
        ConfigError: the name is not a string.
    """
    method = settings.text("quant_method", "").lower()
    if method:
        return "compressed-tensors" if method == "compressed_tensors" else method
    if "quant_algo" in (settings.section("quantization") or settings):
        return "modelopt"
    if any(key in settings for key in _AWQ_KEYS):
        return "awq"
    return "gptq" if "bits" in settings and "group_size" in settings else ""
