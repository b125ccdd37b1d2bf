"""Flags made from the engine's options, so that names, defaults and help are written once."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from paged_backend.config import EngineConfig
from paged_backend.flags import add_flags, flag_values

Subparsers = Any
"""What ``ArgumentParser.add_subparsers`` returns; argparse does not name its type."""


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add ``MODEL`` and a flag for each option of :class:`EngineConfig`."""
    model = next(spec for spec in fields(EngineConfig) if spec.name == "model")
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", default=model.default, help=model.metadata["help"]
    )
    add_flags(parser.add_argument_group("engine"), EngineConfig, leave_out=["model"])


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options that differ from their defaults, with folders as absolute paths.

    Raises:
        ConfigError: an option lies outside its range.
    """
    values = flag_values(args, EngineConfig)
    for name in ("model", "tokenizer"):
        if values[name] is not None and Path(values[name]).is_dir():
            values[name] = str(Path(values[name]).resolve())
    EngineConfig.from_mapping(values)
    defaults = {spec.name: spec.default for spec in fields(EngineConfig)}
    return {
        name: value for name, value in values.items() if name == "model" or value != defaults[name]
    }
