"""A LoRA adapter by its name and folder."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """The adapter of an offline request; the fields are vLLM's.

    Attributes:
        lora_name: the name, by which the adapter is loaded once.
        lora_int_id: vLLM's number of the adapter; it has no effect.
        lora_path: the folder that PEFT has saved.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str


def unsupported(name: str, known: list[str]) -> str:
    """Return vLLM backend's text for a name without an adapter."""
    return f"LoRA {name} is not supported, we currently support {known}"


NOT_ENABLED = "LoRA feature is not enabled."
"""vLLM backend's text for an adapter where the option ``enable_lora`` is off."""
