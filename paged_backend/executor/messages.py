"""Encodes and decodes SchedulerOutput, TokenMasks and ModelRunnerOutput as MessagePack.

An executor uses these messages if its workers run in other processes.
"""

from __future__ import annotations

import msgspec

from paged_backend.core.scheduler_output import ModelRunnerOutput, SchedulerOutput, TokenMasks

encode = msgspec.msgpack.Encoder().encode
decode_scheduler_output = msgspec.msgpack.Decoder(SchedulerOutput).decode
decode_masks = msgspec.msgpack.Decoder(TokenMasks | None).decode
decode_model_runner_output = msgspec.msgpack.Decoder(ModelRunnerOutput).decode
