"""The parameters of beam search, and the names that other servers have for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paged_backend.values.errors import InvalidRequest
from paged_backend.values.validation import from_string, shorten

MAX_BEAM_WIDTH = 16  # the highest value of max_beam_width, which is 8 by default
MAX_CANDIDATES = 32  # candidates of a beam; the GPU kernel finds no more
MAX_LENGTH_PENALTY = 4.0  # beyond it, scores of long outputs overflow float32
# What beams cannot be combined with: the values that change nothing, the preferred one first.
_EXCLUDED: dict[str, tuple[object, ...]] = {
    "temperature": (0,),
    "top_k": (0, -1, 1),
    "top_p": (1,),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "seed": (None,),
    "min_tokens": (0,),
    "stop": ((), [], ""),
    "prompt_logprobs": (None,),
    "return_context_logits": (False,),
    "return_generation_logits": (False,),
    "logit_bias": ((), [], {}),
    "allowed_token_ids": ((), []),
    "bad_words": ((), []),
    "bad_words_token_ids": ((), []),
    "structured_outputs": (None,),
}
_ONLY_BEAMS = {"length_penalty": 1.0, "early_stopping": False}


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """Parameters of :meth:`paged_backend.LLM.beam_search`; names and defaults are vLLM's.

    Attributes:
        beam_width: number of beams, and of answers.
        max_tokens: number of tokens after which an answer is complete.
        ignore_eos: go on after the end-of-sequence token.
        temperature: only 0, because beams are not sampled.
        length_penalty: answers are compared by the sum of logprobs / length ** length_penalty.
        early_stopping: when the search ends, as in transformers: True, False or "never".
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    early_stopping: bool | str = False


def read_beams(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a request with beam search under this engine's own names.

    ``use_beam_search`` makes ``n`` the width, and ``num_return_sequences`` is another name of
    ``n``, which defaults to 1. Beams are not sampled, so ``temperature`` becomes 0.

    Args:
        values: the parameters; a text can stand for a number or a truth value.

    Raises:
        InvalidRequest: a parameter cannot be combined with beams.
    """
    kept = dict(values)
    uses = _truth("use_beam_search", kept.pop("use_beam_search", None))
    number = _number(int, kept.pop("num_return_sequences", None))
    for name, kind in (("beam_width", int), ("length_penalty", float)):
        if name in kept:
            kept[name] = _number(kind, kept[name])
    if number is not None and kept.setdefault("n", number) != number:
        raise InvalidRequest("n", f"must equal num_return_sequences ({number}), got {kept['n']}")
    if uses and kept.get("beam_width") is None:
        kept["beam_width"] = kept.get("n", 1)
    if kept.get("early_stopping") != "never":
        kept["early_stopping"] = _truth("early_stopping", kept.get("early_stopping"))
    if kept.get("beam_width") in (None, 1) and not uses:
        return kept
    for name, neutral in _EXCLUDED.items():
        if kept.get(name) is not None and not any(kept[name] == value for value in neutral):
            wanted = "left out" if neutral[0] in (None, ()) else str(neutral[0]).lower()
            raise InvalidRequest(
                name, f"must be {wanted} with beam search, got {shorten(kept[name])}"
            )
    return kept | {"temperature": 0.0, "top_k": 0}


def check_beams(beam_width: int, n: int, length_penalty: float, early_stopping: object) -> None:
    """Check the parameters of beam search together.

    Raises:
        InvalidRequest: naming the parameter and what it accepts.
    """
    if beam_width == 1:
        given = {"length_penalty": length_penalty, "early_stopping": early_stopping}
        for name, value in given.items():
            if value != _ONLY_BEAMS[name]:
                wanted = str(_ONLY_BEAMS[name]).lower()
                raise InvalidRequest(
                    name, f"must be {wanted} or null, got {value}: it needs a beam_width above 1"
                )
    elif n > beam_width:
        raise InvalidRequest("n", f"must be at most beam_width ({beam_width}), got {n}")


def _number(kind: type, value: object) -> Any:
    return from_string(kind, value) if isinstance(value, str) else value


def _truth(name: str, value: object) -> bool:
    read = from_string(bool, value) if isinstance(value, str) else value
    if read is None:
        return False
    if not isinstance(read, bool):
        choices = 'true, false, "never"' if name == "early_stopping" else "true, false"
        raise InvalidRequest(name, f"must be {choices} or null, got {shorten(value)}")
    return read
