"""Command-line flags made from checked fields: names, defaults and help are written once."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from dataclasses import fields
from functools import partial
from typing import Any

from paged_backend.values.validation import DataclassInstance, Rule, from_string


def add_flags(
    group: argparse.ArgumentParser | argparse._ArgumentGroup,
    cls: type[DataclassInstance],
    *,
    leave_out: Collection[str] = (),
    alias: Callable[[str, str], str] = lambda name, value: value,
) -> None:
    """Add a flag for each field of a dataclass with fields made by ``validation.checked``.

    Args:
        group: where the flags are added.
        cls: the dataclass.
        leave_out: fields without a flag.
        alias: returns the value of a field that a text stands for.
    """
    for spec in fields(cls):
        if spec.name in leave_out:
            continue
        rule: Rule = spec.metadata["rule"]
        shown = "" if spec.default is None else f" (default: {spec.default})"
        flag, help = "--" + spec.name.replace("_", "-"), spec.metadata["help"] + shown
        if rule.kind is bool:
            action = argparse.BooleanOptionalAction
            group.add_argument(flag, action=action, default=spec.default, help=help)
        else:
            kind: Callable[[str], Any] = rule.kind
            if rule.kind is str:
                kind = partial(alias, spec.name)
            elif rule.kind is dict:
                kind = partial(from_string, dict)
            choices = rule.choices or None
            group.add_argument(flag, type=kind, choices=choices, default=spec.default, help=help)


def flag_values(args: argparse.Namespace, cls: type[DataclassInstance]) -> dict[str, Any]:
    """Return the value of the flag of each field of the dataclass."""
    return {spec.name: getattr(args, spec.name) for spec in fields(cls)}
