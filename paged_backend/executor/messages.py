"""The messages between an engine and workers in other processes, encoded as MessagePack."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import zlib
from dataclasses import fields
from typing import Any

import msgspec

from paged_backend.core.scheduler_output import ModelRunnerOutput, SchedulerOutput, TokenMasks
from paged_backend.values.config import EngineConfig

encode = msgspec.msgpack.Encoder().encode
decode_scheduler_output = msgspec.msgpack.Decoder(SchedulerOutput).decode
decode_masks = msgspec.msgpack.Decoder(TokenMasks | None).decode
decode_model_runner_output = msgspec.msgpack.Decoder(ModelRunnerOutput).decode


class JoinGroup(msgspec.Struct, frozen=True):
    """The first message of another node to node 0."""

    version: str  # see own_version
    node: int
    num_nodes: int


class LoadModel(msgspec.Struct, frozen=True, tag=True):
    """Tells a rank, or the node that starts it, what to load; the first message that it gets."""

    options: dict[str, Any]  # the engine's
    folder: str  # the checkpoint
    tokenizer: str | None  # folder or file
    fingerprint: str  # the digest of the checkpoint; see checkpoint.fingerprint
    ranks_per_node: int
    host: str  # the address of the rank's node, for other ranks


class JoinRefused(msgspec.Struct, frozen=True, tag=True):
    """Tells another node why it cannot take part."""

    problem: str


class StoreValue(msgspec.Struct, frozen=True, tag=True):
    """Something that a rank tells all others, so that they find each other."""

    key: str
    value: bytes


class GroupOpened(msgspec.Struct, frozen=True, tag=True):
    """Says that a rank is connected with the others; from rank 0, that all ranks are."""


class ModelLoaded(msgspec.Struct, frozen=True, tag=True):
    """Says that a rank has loaded its share, or why it cannot."""

    problem: str | None


class StartReading(msgspec.Struct, frozen=True, tag=True):
    """Tells a rank to read a LoRA adapter on a thread, while steps go on."""

    number: int  # the number of the reading
    folder: str


class ForgetReading(msgspec.Struct, frozen=True, tag=True):
    """Tells a rank that it will not be asked for what it has read."""

    number: int


class PutAdapter(msgspec.Struct, frozen=True, tag=True):
    """Tells a rank to hold a LoRA adapter that it has read, from the next step on."""

    number: int


class DropAdapter(msgspec.Struct, frozen=True, tag=True):
    """Tells a rank to forget an adapter."""

    digest: str


class ReadingDone(msgspec.Struct, frozen=True, tag=True):
    """Says what a rank has read; the message is longer than the digest of a step."""

    number: int
    digest: str  # the digest of the weights
    problem: str  # why the adapter cannot be read; empty if it was


AdapterOrder = StartReading | ForgetReading | PutAdapter | DropAdapter
_ADAPTERS = b"\xc1"  # no value begins with this byte in MessagePack
_DIGEST_BYTES = 4
FromLoadingRank = StoreValue | GroupOpened | ModelLoaded

decode_join = msgspec.msgpack.Decoder(JoinGroup).decode
decode_first = msgspec.msgpack.Decoder(LoadModel | JoinRefused).decode
decode_load_model = msgspec.msgpack.Decoder(LoadModel).decode
decode_from_loading_rank = msgspec.msgpack.Decoder(FromLoadingRank).decode
decode_from_first_rank = msgspec.msgpack.Decoder(StoreValue | GroupOpened).decode
_decode_adapter_order = msgspec.msgpack.Decoder(AdapterOrder).decode
_decode_reading_done = msgspec.msgpack.Decoder(ReadingDone).decode


def encode_adapter_order(order: AdapterOrder) -> bytes:
    """Encode something to do with adapters, which comes between two steps."""
    return _ADAPTERS + encode(order)


def decode_order(message: bytes) -> SchedulerOutput | AdapterOrder:
    """Decode what the first rank wants done: a step, or something with adapters before it."""
    if message[:1] == _ADAPTERS:
        order: AdapterOrder = _decode_adapter_order(message[1:])
        return order
    return decode_scheduler_output(message)


def decode_answer(message: bytes) -> bytes | ReadingDone:
    """Decode what a rank sends while it serves: the digest of a step, or what it has read."""
    if len(message) == _DIGEST_BYTES:
        return message
    done: ReadingDone = _decode_reading_done(message)
    return done


def own_version() -> str:
    """Return the version of this package, and a digest of its messages and options."""
    try:
        version = importlib.metadata.version("paged-backend")
    except importlib.metadata.PackageNotFoundError:
        version = "from its source"
    messages = LoadModel | FromLoadingRank | AdapterOrder | ReadingDone
    types = [SchedulerOutput, TokenMasks, ModelRunnerOutput, messages]
    schemas = msgspec.json.schema_components(types)
    options = sorted(spec.name for spec in fields(EngineConfig))
    text = json.dumps([schemas, options], sort_keys=True)
    return f"{version} (messages {hashlib.sha256(text.encode()).hexdigest()[:8]})"


def digest(output: bytes, masks: bytes, result: ModelRunnerOutput) -> bytes:
    """Return four bytes that differ, in all likelihood, if two ranks did not do the same.

    Args:
        output: the encoded SchedulerOutput.
        masks: the encoded TokenMasks.
        result: what the rank has sampled or pooled.
    """
    check = zlib.crc32(masks, zlib.crc32(output))
    check = zlib.crc32(encode((result.token_ids, result.pooled)), check)
    return check.to_bytes(_DIGEST_BYTES, "big")
