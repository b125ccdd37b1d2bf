"""Bounds of the requests to ``preprocessing`` and ``postprocessing``, in all rows together."""

from __future__ import annotations

from collections.abc import Sequence

from paged_backend.serving import fields
from paged_backend.serving.fields import Tensors
from paged_backend.values.errors import InvalidRequest
from paged_backend.values.request import RequestLimits

MAX_QUERIES = 2**22  # characters of all rows, which take seconds; one prompt may have more
MAX_SEQUENCES = 64  # sequences in all rows: a batch of `max_batch_size`, or the highest `max_n`


def check_queries(rows: Sequence[Tensors], max_text_length: int) -> None:
    """Refuse texts that take too long to tokenize.

    Args:
        rows: tensors of each row.
        max_text_length: maximum number of characters of a prompt.

    Raises:
        InvalidRequest: they are too long, or no text.
    """
    limit = max(MAX_QUERIES, max_text_length)
    length = sum(len(fields.text("QUERY", text)) for row in rows for text in row["QUERY"].flat)
    if length > limit:
        raise InvalidRequest("QUERY", f"all rows have at most {limit} characters, got {length}")


def check_sequences(rows: Sequence[Tensors], limits: RequestLimits) -> None:
    """Refuse more tokens than the model can generate.

    Raises:
        InvalidRequest: a sequence is too long, there are too many, or their lengths do not fit.
    """
    number = sum(len(row["TOKENS_BATCH"]) for row in rows)
    if number > MAX_SEQUENCES:
        raise InvalidRequest("TOKENS_BATCH", f"at most {MAX_SEQUENCES} sequences, got {number}")
    for row in rows:
        tokens, lengths = row["TOKENS_BATCH"], row["SEQUENCE_LENGTH"]
        if len(tokens) != lengths.size:
            raise InvalidRequest(
                "SEQUENCE_LENGTH", f"has {lengths.size} elements for {len(tokens)} sequences"
            )
        width = tokens.shape[-1]
        if width > limits.max_model_len:
            raise InvalidRequest(
                "TOKENS_BATCH",
                f"each has at most {limits.max_model_len} tokens (max_model_len), got {width}",
            )
        for length in lengths.reshape(-1).tolist():
            if not 0 <= length <= width:
                raise InvalidRequest("SEQUENCE_LENGTH", f"must be from 0 to {width}, got {length}")
