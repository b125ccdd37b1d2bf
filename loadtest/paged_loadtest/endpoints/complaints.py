"""Error messages for servers that cannot be measured."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from paged_backend.values.errors import ConfigError
from paged_backend.values.validation import shorten
from paged_loadtest.options import TargetOptions
from paged_loadtest.protocols import triton


def unreachable(target: TargetOptions, reason: str) -> ConfigError:
    """Create the error for an address that does not answer, or not in this protocol."""
    return ConfigError(
        f"--base-url: nobody speaks {target.backend} at {target.address} "
        f"({shorten(reason, 160, quote=False)}); start the server, or give its address and "
        "--backend"
    )


def unknown_model(target: TargetOptions, known: Iterable[str]) -> ConfigError:
    """Create the error for a server that answers but lacks the model."""
    names = ", ".join(sorted(known)) or "none"
    return ConfigError(
        f"--model: {target.address} has no model {shorten(target.model)} that is ready; "
        f"ready there: {names}"
    )


def check_inputs(target: TargetOptions, inputs: Collection[str]) -> None:
    """Check that a Triton model has the inputs that make it report token counts.

    Raises:
        ConfigError: an input is missing.
    """
    missing = [name for name in triton.NEEDED if name not in inputs]
    if missing:
        raise ConfigError(
            f"--model: {target.model} has no input {missing[0]}, by which tokens are counted; "
            "give a model with vllm_backend's inputs"
        )
