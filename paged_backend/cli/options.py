"""Flags made from the engine's options, so that names, defaults and help are written once."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from paged_backend.config import EngineConfig
from paged_backend.validation import Rule

Subparsers = Any
"""What ``ArgumentParser.add_subparsers`` returns; argparse does not name its type."""


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add ``MODEL`` and a flag for each option of :class:`EngineConfig`."""
    group = parser.add_argument_group("engine")
    for spec in fields(EngineConfig):
        rule: Rule = spec.metadata["rule"]
        help = spec.metadata["help"]
        if spec.name == "model":
            parser.add_argument(
                "model", metavar="MODEL", nargs="?", default=spec.default, help=help
            )
            continue
        flag = "--" + spec.name.replace("_", "-")
        shown = "" if spec.default is None else f" (default: {spec.default})"
        if rule.kind is bool:
            action = argparse.BooleanOptionalAction
            group.add_argument(flag, action=action, default=spec.default, help=help + shown)
        else:
            kind, choices = rule.kind, rule.choices or None
            group.add_argument(
                flag, type=kind, choices=choices, default=spec.default, help=help + shown
            )


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options that differ from their defaults, with folders as absolute paths.

    Raises:
        ConfigError: an option lies outside its range.
    """
    values = {spec.name: getattr(args, spec.name) for spec in fields(EngineConfig)}
    for name in ("model", "tokenizer"):
        if values[name] is not None and Path(values[name]).is_dir():
            values[name] = str(Path(values[name]).resolve())
    EngineConfig.from_mapping(values)
    defaults = {spec.name: spec.default for spec in fields(EngineConfig)}
    return {
        name: value for name, value in values.items() if name == "model" or value != defaults[name]
    }
