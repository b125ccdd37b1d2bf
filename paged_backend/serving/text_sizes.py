"""Limits on the text that a request to ``postprocess`` asks for; checked before any is made."""

from __future__ import annotations

from collections.abc import Collection

from paged_backend.serving.fields import Tensors
from paged_backend.serving.requests.tool_use import PARSED
from paged_backend.values.contract import PARSED_TEXT
from paged_backend.values.errors import InvalidRequest

MAX_COMPLETIONS = 64  # the highest value of max_n
MAX_ECHO = 2**26  # characters of a prompt, times the completions that repeat it


def num_ids(tensors: Tensors) -> int:
    """Return the number of token ids that become text."""
    return tensors["output_ids"].size + tensors["context_ids"].size


def num_characters(tensors: Tensors, prompt: str) -> int:
    """Return the length of the text that is not made of token ids."""
    parsed = tensors[PARSED_TEXT].flat if PARSED_TEXT in tensors else ()
    return len(prompt) * tensors["finish_reason"].size + sum(map(len, parsed))


def check_sizes(tensors: Tensors, prompt: str, wanted: Collection[str]) -> None:
    """Refuse a request with a text that is larger than an answer of the model.

    Raises:
        InvalidRequest: there are too many completions, not one parsed text for each, or the prompt
            is too long to be repeated as often.
    """
    number = tensors["finish_reason"].size
    if number > MAX_COMPLETIONS:
        raise InvalidRequest("finish_reason", f"at most {MAX_COMPLETIONS} elements, got {number}")
    if PARSED_TEXT in tensors:
        size = tensors[PARSED_TEXT].size
        if size != number:
            raise InvalidRequest(PARSED_TEXT, f"has {size} elements for {number} completions")
    elif not PARSED.isdisjoint(wanted):
        raise InvalidRequest(PARSED_TEXT, "is missing")
    if len(prompt) * number > MAX_ECHO:
        raise InvalidRequest(
            "pass_through",
            f"has a prompt of {len(prompt)} characters for {number} completions, at most "
            f"{MAX_ECHO} characters in all",
        )
