"""Loads models of transformers from safetensors, without code of the checkpoint."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import transformers

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.safetensors_files import SafetensorsFiles, read_headers
from paged_backend.models.layers import Kernels
from paged_backend.quantization.read import read_quantization
from paged_backend.values.errors import ConfigError
from paged_backend.values.options.model import ModelOptions
from paged_backend.values.validation import shorten

# Numbers that a model may compute, such as rotary tables and masks, or that a file may lack.
_SPARE_NUMBERS = 2**25

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
        values = transformers.AutoConfig.from_pretrained(
            str(folder), trust_remote_code=False, local_files_only=True
        )
        if options.load_format == "dummy":
            with torch.random.fork_rng():
                torch.manual_seed(options.seed)
                model = loader._from_config(values, **settings)
        else:
            with torch.device("meta"):
                _check_sizes(folder, loader._from_config(values, **settings))
            # Of the files in a folder, transformers would find only those with the usual names.
            tensors = {entry.name: entry.tensor for entry in SafetensorsFiles(folder)}
            model, info = loader.from_pretrained(
                None,
                config=values,
                state_dict=tensors,
                ignore_mismatched_sizes=True,  # `check` reports them, and missing tensors
                output_loading_info=True,
                **settings,
            )
            check(folder, model, info)
    except ConfigError:
        raise
    except Exception as error:  # errors of safetensors, or whatever the model's code raises
        line = " ".join(str(error).split())
        raise ConfigError(f"transformers cannot load {folder}: {shorten(line)}") from error
    finally:
        transformers.logging.set_verbosity(verbosity)
    return model.eval().requires_grad_(False).to(kernels.device)


def _check_sizes(folder: Path, model: Any) -> None:
    """Check that the files hold as many numbers as the model has, before it takes memory.

    transformers fills what a file lacks with random numbers first, and says so later. The names and
    shapes in files differ from its models' shapes, but not the numbers of elements.

    Raises:
        ConfigError: they hold less.
    """
    stored = sum(math.prod(header.shape) for header in read_headers(folder).values())
    needed = sum(parameter.numel() for parameter in model.parameters())
    tables = sum(table.numel() for table in model.buffers())
    if max(needed, tables) > stored + _SPARE_NUMBERS:
        raise ConfigError(
            f"{folder}: config.json asks for {needed} parameters and tables of {tables} numbers, "
            f"but the safetensors files hold {stored} numbers; they do not fit each other"
        )


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
