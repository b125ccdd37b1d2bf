"""Generates flags from the engine's options: names, defaults and help have one definition."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from paged_backend.values.config import EngineConfig
from paged_backend.values.engine_args import alias, from_mapping, other_names
from paged_backend.values.flags import add_flags, flag_values
from paged_backend.values.options.cache import CacheOptions
from paged_backend.values.options.chat_template import ChatTemplateOptions, resolved_path
from paged_backend.values.options.cpu import CpuOptions
from paged_backend.values.options.generation import GenerationOptions, resolved_source
from paged_backend.values.options.lifetime import LifetimeOptions
from paged_backend.values.options.limits import LimitOptions
from paged_backend.values.options.lora import LoraOptions
from paged_backend.values.options.model import ModelOptions
from paged_backend.values.options.nodes import NodeOptions
from paged_backend.values.options.parallel import ParallelOptions
from paged_backend.values.options.reporting import ReportingOptions
from paged_backend.values.options.responses import ResponseOptions
from paged_backend.values.options.scheduling import SchedulingOptions
from paged_backend.values.options.speculation import OPTION, SpeculativeConfig
from paged_backend.values.validation import DataclassInstance

_OTHER = "vllm_"  # prefix of `dest` for flags that are not fields of EngineConfig

_FIRST = {
    "device", "dtype", "quantization", "max_model_len", "max_num_seqs",
    "gpu_memory_utilization", "kv_cache_dtype", "tool_call_parser", "enable_auto_tool_choice",
    "reasoning_parser",
}  # fmt: skip
_CONCERNS: dict[str, type[DataclassInstance]] = {
    "model": ModelOptions,
    "steps and their order": SchedulingOptions,
    "KV cache": CacheOptions,
    "LoRA adapters": LoraOptions,
    "CPUs": CpuOptions,
    "ranks": ParallelOptions,
    "several hosts": NodeOptions,
    "chat templates": ChatTemplateOptions,
    "sampling defaults": GenerationOptions,
    "answers": ResponseOptions,
    "limits of requests": LimitOptions,
    "faults and shutdown": LifetimeOptions,
    "logs and metrics": ReportingOptions,
}

_KEY_FILES = ("prefix_cache_key_file", "cluster_key_file")
_FLAGS_OF_COMMANDS = {"served_model_name"}

Subparsers = Any
"""What ``ArgumentParser.add_subparsers`` returns; argparse does not name its type."""


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add ``MODEL`` and a flag for each option of :class:`EngineConfig`, grouped by concern.

    The other engine arguments of vLLM become flags that the help does not show.
    """
    model = next(spec for spec in fields(EngineConfig) if spec.name == "model")
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", default=model.default, help=model.metadata["help"]
    )
    names = [spec.name for spec in fields(EngineConfig)]
    first = parser.add_argument_group("what most deployments set")
    add_flags(first, EngineConfig, leave_out=set(names) - _FIRST, alias=alias)
    for title, concern in _CONCERNS.items():
        add_flags(
            parser.add_argument_group(title), concern, leave_out={"model", *_FIRST}, alias=alias
        )
    engine = parser.add_argument_group("other engine arguments of vLLM")
    for name in sorted(set(other_names()) - _FLAGS_OF_COMMANDS):
        flag = name.replace("_", "-")
        dest, hidden = _OTHER + name, argparse.SUPPRESS
        engine.add_argument(
            f"--{flag}", dest=dest, nargs="?", const=True, default=hidden, help=hidden
        )
        engine.add_argument(
            f"--no-{flag}", dest=dest, action="store_false", default=hidden, help=hidden
        )


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The model, the options that differ from their defaults, and vLLM's other engine arguments.

    Paths of folders and files are absolute.

    Raises:
        ConfigError: an option lies outside its range, or needs a feature that this engine lacks.
    """
    values = flag_values(args, EngineConfig)
    others = {
        name.removeprefix(_OTHER): value
        for name, value in vars(args).items()
        if name.startswith(_OTHER)
    }
    for name in ("model", "tokenizer", "download_dir", "runtime_lora_folder", *_KEY_FILES):
        # A cache folder and a key may be made later.
        is_new = name in ("download_dir", *_KEY_FILES)
        if values[name] is not None and (is_new or Path(values[name]).exists()):
            values[name] = str(Path(values[name]).expanduser().resolve())
    if isinstance(values["lora_modules"], dict):
        values["lora_modules"] = {
            name: str(Path(folder).expanduser().resolve()) if isinstance(folder, str) else folder
            for name, folder in values["lora_modules"].items()
        }
    values[OPTION] = SpeculativeConfig.resolved(values[OPTION], Path.cwd())
    values["generation_config"] = resolved_source(values["generation_config"], Path.cwd())
    if values["chat_template"] is not None:
        values["chat_template"] = resolved_path(values["chat_template"], Path.cwd())
    defaults = {spec.name: spec.default for spec in fields(EngineConfig)}
    changed = {
        name: value for name, value in values.items() if name == "model" or value != defaults[name]
    }
    from_mapping(changed | others)
    return changed | others
