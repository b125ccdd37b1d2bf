"""Prompts as texts or token ids, and other lists of token ids."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Annotated, Any, TypeAlias

from pydantic import Field, PlainValidator
from pydantic_core import PydanticCustomError

from paged_client.gateway.errors import ApiError
from paged_client.gateway.schema.body import INT32_MAX
from paged_client.routing import Ids

MAX_IDS = 2**20
MAX_ALLOWED_IDS = 2**18
_PIECE = 2**14  # ids checked at a time, while no other thread can run


def token_ids(value: Any) -> Ids | None:
    """Convert a list of token ids to 32-bit integers; return None for any other value."""
    if not isinstance(value, list):
        return None
    ids = array("i")
    for start in range(0, len(value), _PIECE):
        piece = value[start : start + _PIECE]
        # bool is a subclass of int, but true is not a token id.
        if set(map(type, piece)) != {int} or not 0 <= min(piece) <= max(piece) <= INT32_MAX:
            return None
        ids.extend(piece)
    return ids


def _ids_up_to(limit: int) -> Callable[[Any], Ids]:
    problem = f"must be a list of at most {limit} integers from 0 to {INT32_MAX}"

    def check(value: Any) -> Ids:
        ids = token_ids(value)
        if ids is None or len(ids) > limit:
            raise PydanticCustomError("token_ids", "{problem}", {"problem": problem})
        return ids

    return check


TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]

# Long lists are checked in C: pydantic would create an error for each invalid item.
TokenIds = Annotated[
    Ids,
    PlainValidator(_ids_up_to(MAX_IDS), json_schema_input_type=list[TokenId]),
]
AllowedIds = Annotated[
    Ids,
    PlainValidator(_ids_up_to(MAX_ALLOWED_IDS), json_schema_input_type=list[TokenId]),
]

TextOrIds: TypeAlias = str | Ids


def prompts(name: str, max_number: int, value: Any) -> list[TextOrIds]:
    """Return the prompts in the field ``name``; a single prompt becomes a list of one.

    Raises ApiError.
    """
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if len(value) > max_number and not isinstance(value[0], int):
            raise ApiError.field(name, f"at most {max_number} prompts, got {len(value)}")
        if all(isinstance(item, str) for item in value):
            return value
        several = [value] if isinstance(value[0], int) else value
        ids = [found for found in map(token_ids, several) if found]
        if len(ids) == len(several):
            return list(ids)
    raise ApiError.field(name, "must be a text, token ids, or a list of either")
