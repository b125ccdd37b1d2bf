"""The address of a server, what it reports about itself, and why it cannot be measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paged_backend.values.errors import ConfigError
from paged_backend.values.validation import shorten

PROBE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server reports about itself and its model; None for unreported values."""

    server: str
    vocab_size: int | None = None
    max_model_len: int | None = None


class Unreachable(ConfigError):
    """Raised when an address does not answer, or not in the expected protocol."""


@dataclass(frozen=True, slots=True)
class Destination:
    """An address and a model; makes the errors for a server that cannot be measured."""

    address: str
    model: str
    nobody: str  # begins the error: the option that sets the address, and who is missing there
    advice: str  # ends the error: what helps besides starting the server

    def unreachable(self, reason: str) -> Unreachable:
        """Create the error for an address that does not answer, or not in this protocol."""
        return Unreachable(
            f"{self.nobody} at {self.address} ({shorten(reason, 160, quote=False)}); "
            f"start the server, {self.advice}"
        )

    def unknown_model(self, known: Iterable[str]) -> ConfigError:
        """Create the error for a server that answers but lacks the model."""
        names = ", ".join(sorted(known)) or "none"
        return ConfigError(
            f"--model: {self.address} has no model {shorten(self.model)} that is ready; "
            f"ready there: {names}"
        )
