"""A LoRA adapter by its name, number and folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

MAX_NAME_LENGTH = 256  # characters
PACKED_WEIGHTS, PACKED_CONFIG = "lora_weights", "lora_config"
"""The arrays of an adapter that a request brings."""
PACKED_FILE = "packed_adapter.safetensors"
"""The file of these arrays, in the folder of such an adapter."""


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """The adapter of a request; the fields are vLLM's.

    Attributes:
        lora_name: the name by which clients know it.
        lora_int_id: its number. The weights are read again for another number, although the name
            and the folder are the same.
        lora_path: the folder that PEFT has saved.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str


def numbered(modules: Mapping[str, str]) -> dict[str, LoRARequest]:
    """Return the adapters of the option ``lora_modules`` by their names, numbered from 1."""
    return {
        name: LoRARequest(name, number, folder)
        for number, (name, folder) in enumerate(modules.items(), 1)
    }


def unsupported(name: str, known: Iterable[str]) -> str:
    """Return vLLM backend's text for a name without an adapter."""
    return f"LoRA {name} is not supported, we currently support {list(known)}"


NOT_ENABLED = "LoRA feature is not enabled."
"""vLLM backend's text for an adapter where the option ``enable_lora`` is off."""
