"""SchedulerOutput and its result as bytes, for workers in other processes."""

from __future__ import annotations

import msgspec

from paged_backend.core.scheduler_output import ModelRunnerOutput, SchedulerOutput, TokenMasks

encode = msgspec.msgpack.Encoder().encode
decode_scheduler_output = msgspec.msgpack.Decoder(SchedulerOutput).decode
decode_masks = msgspec.msgpack.Decoder(TokenMasks | None).decode
decode_model_runner_output = msgspec.msgpack.Decoder(ModelRunnerOutput).decode
