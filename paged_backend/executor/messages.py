"""The messages between an engine and workers in other processes, encoded as MessagePack."""

from __future__ import annotations

import zlib
from typing import Any

import msgspec

from paged_backend.core.scheduler_output import ModelRunnerOutput, SchedulerOutput, TokenMasks

encode = msgspec.msgpack.Encoder().encode
decode_scheduler_output = msgspec.msgpack.Decoder(SchedulerOutput).decode
decode_masks = msgspec.msgpack.Decoder(TokenMasks | None).decode
decode_model_runner_output = msgspec.msgpack.Decoder(ModelRunnerOutput).decode


class LoadModel(msgspec.Struct, frozen=True):
    """Tells a rank what to load; the first message that it gets."""

    options: dict[str, Any]  # the engine's
    folder: str  # the checkpoint
    tokenizer: str | None  # folder or file
    store: str  # a file through which the ranks find each other


class ModelLoaded(msgspec.Struct, frozen=True):
    """Says that a rank has loaded its share, or why it cannot."""

    problem: str | None


decode_load_model = msgspec.msgpack.Decoder(LoadModel).decode
decode_model_loaded = msgspec.msgpack.Decoder(ModelLoaded).decode


def digest(output: bytes, masks: bytes, result: ModelRunnerOutput) -> bytes:
    """Return four bytes that differ, in all likelihood, if two ranks did not do the same.

    Args:
        output: the encoded SchedulerOutput.
        masks: the encoded TokenMasks.
        result: what the rank has sampled or pooled.
    """
    check = zlib.crc32(masks, zlib.crc32(output))
    check = zlib.crc32(encode((result.token_ids, result.pooled)), check)
    return check.to_bytes(4, "big")
