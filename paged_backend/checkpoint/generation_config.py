"""Reads the defaults of sampling parameters that the author of a checkpoint recommends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.values.log import LOG
from paged_backend.values.options.generation import (
    CHECKPOINT,
    FILE_NAME,
    NEUTRAL,
    GenerationOptions,
)
from paged_backend.values.sampling_defaults import PARAMETERS, RULES, SamplingDefaults
from paged_backend.values.validation import shorten

_LIMIT = "max_new_tokens"


def read_sampling_defaults(checkpoint: Path, options: GenerationOptions) -> SamplingDefaults:
    """Read the defaults that the options ask for, and log them in one line.

    The author's ``max_new_tokens`` is a default only. The operator's, in a folder or an override,
    is a limit for all requests, too, as in vLLM.

    Args:
        checkpoint: the folder of the model, or its GGUF file, which has no such defaults.
        options: where the defaults come from.

    Raises:
        ConfigError: the file cannot be read, or a value is one that no request could have.
    """
    source, overrides = options.generation_config, options.override_generation_config or {}
    folder = checkpoint if source == CHECKPOINT else Path(source)
    path = folder / FILE_NAME
    values: dict[str, Any] = {}
    if source != NEUTRAL and path.exists():
        values = _read(path, without=overrides)
    values |= {key: value for key, value in overrides.items() if value is not None}
    if values:
        _log(path, values, overrides)
    is_operators = source not in (CHECKPOINT, NEUTRAL) or _LIMIT in overrides
    return SamplingDefaults(
        **{PARAMETERS[key]: value for key, value in values.items()},
        max_tokens_limit=values.get(_LIMIT) if is_operators else None,
    )


def _read(path: Path, without: dict[str, Any]) -> dict[str, Any]:
    """Return the checked values of a file, except those that are replaced anyway."""
    file = ConfigFile.read(path)
    found = {key: file.value(key) for key in RULES if key not in without}
    values = {key: value for key, value in found.items() if value is not None}
    for key, value in values.items():
        if not RULES[key].accepts(value):
            problem = f"must be {RULES[key].describe()}, got {shorten(value)}"
            hint = f"the option generation_config: {NEUTRAL} takes no default of the file"
            raise file.error(key, f"{problem}; {hint}")
    return values


def _log(path: Path, values: dict[str, Any], overrides: dict[str, Any]) -> None:
    sources = [str(path)] if values.keys() - overrides.keys() else []
    if values.keys() & overrides.keys():
        sources.append("the option override_generation_config")
    LOG.info(
        "defaults of requests by %s: %s",
        " and ".join(sources),
        ", ".join(f"{PARAMETERS[key]}={value}" for key, value in values.items()),
    )
