"""The parameters of a request for an embedding, and of the model that makes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from paged_backend.values.errors import InvalidRequest
from paged_backend.values.validation import Rule, check_fields, checked, coerce, from_mapping

MAX_DIMENSIONS = 2**16


class PoolingType(StrEnum):
    """The hidden states of a prompt that become its embedding; the names are vLLM's."""

    LAST = "last"  # the last token's
    MEAN = "mean"  # the mean over all tokens
    CLS = "cls"  # the first token's


class Pooling(NamedTuple):
    """The way in which a model makes an embedding of the hidden states of a prompt."""

    kind: PoolingType
    normalize: bool  # embeddings have a length of 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """The parameters of an embedding, checked when made; the name is vLLM's.

    Raises:
        InvalidRequest: a field has the wrong type or lies outside its range.
    """

    dimensions: int | None = checked(
        None,
        Rule(int, 1, MAX_DIMENSIONS, optional=True),
        "keep only the first ones of the embedding; null keeps all",
    )

    def __post_init__(self) -> None:
        check_fields(self, InvalidRequest)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> PoolingParams:
        """Build from untrusted names and values; strings become numbers.

        Raises:
            InvalidRequest: a name is unknown or a value is not allowed.
        """
        return from_mapping(cls, coerce(cls, values), InvalidRequest)
