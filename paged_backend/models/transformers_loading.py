"""Loads models of transformers from safetensors, without code of the checkpoint."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import transformers

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.errors import ConfigError
from paged_backend.models.layers import Kernels
from paged_backend.options.model import ModelOptions
from paged_backend.quantization.read import read_quantization
from paged_backend.validation import shorten

CheckTensors = Callable[[Path, Any, dict[str, Any]], None]
"""Checks the folder, the model and transformers' report on the tensors; raises ConfigError."""


def check_not_quantized(options: ModelOptions, folder: Path, file: ConfigFile) -> None:
    """Refuse quantized weights.

    Raises:
        ConfigError: the option asks for them, or the checkpoint has them.
    """
    if options.quantization is not None or read_quantization(folder, file) is not None:
        raise ConfigError("quantized weights are not supported by model_impl transformers")


def load_pretrained(
    name: str, options: ModelOptions, folder: Path, kernels: Kernels, check: CheckTensors
) -> Any:
    """Load a model with its own attention, or make random weights of its shape (`load_format`).

    Args:
        name: the class in transformers. It is made without a pooling layer, where it has one.
        options: the engine's options.
        folder: the checkpoint.
        kernels: the platform.
        check: decides which tensors may be missing, or more than the model needs.

    Raises:
        ConfigError: transformers cannot load it, or `check` refuses it.
    """
    loader = getattr(transformers, name)
    settings: dict[str, Any] = {"dtype": kernels.dtype, "attn_implementation": "eager"}
    if "add_pooling_layer" in inspect.signature(loader.__init__).parameters:
        settings["add_pooling_layer"] = False
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(logging.ERROR)  # `check` says what matters, in one line
    try:
        if options.load_format == "dummy":
            with torch.random.fork_rng():
                torch.manual_seed(options.seed)
                values = transformers.AutoConfig.from_pretrained(
                    str(folder), trust_remote_code=False, local_files_only=True
                )
                model = loader._from_config(values, **settings)
        else:
            model, info = loader.from_pretrained(
                str(folder),
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # `check` reports them, and missing tensors
                output_loading_info=True,
                **settings,
            )
            check(folder, model, info)
    except ConfigError:
        raise
    except Exception as error:  # of safetensors, or whatever the model's code raises
        line = " ".join(str(error).split())
        raise ConfigError(f"transformers cannot load {folder}: {shorten(line)}") from error
    finally:
        transformers.logging.set_verbosity(verbosity)
    return model.eval().requires_grad_(False).to(kernels.device)


def tensor_names(info: dict[str, Any], problem: str) -> list[str]:
    """Return the names of the tensors that transformers reports as missing, mismatched ..."""
    keys = info.get(f"{problem}_keys") or ()
    return sorted(key if isinstance(key, str) else key[0] for key in keys)


def refuse_tensors(folder: Path, problem: str, names: Iterable[str]) -> None:
    """Refuse a checkpoint with such tensors.

    Raises:
        ConfigError: there is a name.
    """
    found = list(names)
    if found:
        raise ConfigError(f"{folder}: {len(found)} {problem} tensors, such as {shorten(found[0])}")
