"""The longest sequence of a model, by the scaling of its rotary embedding."""

from __future__ import annotations

from collections.abc import Iterable

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.limits import MAX_POSITIONS

PROPORTIONAL = "proportional"  # only a part of a head's pairs turns
LONG_ROPES = "longrope", "su"  # the first name is the newer one
ORIGINAL = "original_max_position_embeddings"

_EXTENDING = ("linear", "yarn")


def rope_type(section: ConfigFile) -> str:
    """Return the kind of a rotary embedding: transformers 5 has ``rope_type`` in place of ``type``.

    Raises:
        ConfigError: it is not a string.
    """
    return section.text("rope_type" if "rope_type" in section else "type", "default")


def context_length(sections: Iterable[ConfigFile | None], max_positions: int) -> int:
    """Return how many tokens a sequence may have.

    A factor of linear scaling or YaRN counts from the length that the model was trained with before
    it was scaled; files name that length as ``original_max_position_embeddings``, or else as
    ``max_position_embeddings``. The latter can also be the scaled length, so the longer one counts;
    or, below the former, a limit that the author wants.
    llama3 and longrope always name the scaled length, and dynamic scaling is only supported within
    the trained length, where it changes nothing.

    Args:
        sections: the keys of the layers' rotary embeddings; None for layers without one.
        max_positions: ``max_position_embeddings``.

    Raises:
        ConfigError: a key is wrong, or the length is above `MAX_POSITIONS`.
    """
    lengths = [_scaled(section, max_positions) for section in sections if section is not None]
    return max([max_positions, *lengths])


def default_length(sections: Iterable[ConfigFile | None], longest: int) -> int:
    """Return how many tokens a sequence may have if no option sets a length.

    LongRoPE has other frequencies for models that serve more than the original length, with which
    short texts are computed less well, and unlike transformers computes them. So the default is the
    original length, as in vLLM.

    Args:
        sections: the keys of the layers' rotary embeddings; None for layers without one.
        longest: see `context_length`.

    Raises:
        ConfigError: a key is wrong.
    """
    long_ropes = (one for one in sections if one is not None and rope_type(one) in LONG_ROPES)
    lengths = [section.integer(ORIGINAL, longest, high=MAX_POSITIONS) for section in long_ropes]
    return min([longest, *lengths])


def _scaled(section: ConfigFile, max_positions: int) -> int:
    factor = section.optional_number("factor")
    if factor is None or rope_type(section) not in _EXTENDING:
        return max_positions
    trained = section.integer(ORIGINAL, max_positions, high=MAX_POSITIONS)
    if trained > max_positions:
        return max_positions
    if factor * trained > MAX_POSITIONS:
        raise section.error(
            "factor", f"must give at most {MAX_POSITIONS} tokens, got {factor:g} times {trained}"
        )
    return int(factor * trained)
