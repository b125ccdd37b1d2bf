"""What a user is told about a server that cannot be measured."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from paged_backend.errors import ConfigError
from paged_backend.validation import shorten
from paged_loadtest.options import TargetOptions
from paged_loadtest.protocols import triton


def unreachable(target: TargetOptions, reason: str) -> ConfigError:
    """Nobody answers there, or not in this protocol."""
    return ConfigError(
        f"--base-url: nobody speaks {target.backend} at {target.address} "
        f"({shorten(reason, 160, quote=False)}); start the server, or give its address and "
        "--backend"
    )


def unknown_model(target: TargetOptions, known: Iterable[str]) -> ConfigError:
    """Somebody answers, but has no such model."""
    names = ", ".join(sorted(known)) or "none"
    return ConfigError(
        f"--model: {target.address} has no model {shorten(target.model)} that is ready; "
        f"ready there: {names}"
    )


def check_inputs(target: TargetOptions, inputs: Collection[str]) -> None:
    """See that a model of Triton's counts its tokens.

    Raises:
        ConfigError: it does not.
    """
    missing = [name for name in triton.NEEDED if name not in inputs]
    if missing:
        raise ConfigError(
            f"--model: {target.model} has no input {missing[0]}, by which tokens are counted; "
            "give a model with vllm_backend's inputs"
        )
