"""The size of the scheduler's messages."""

from __future__ import annotations

import pytest
from effort import ALL
from engine_without_model import EngineWithoutModel, make_request

from paged_backend.executor.messages import encode

MAX_DECODE_STEP_BYTES = 8 * 1024


@pytest.mark.parametrize("windows", [(None,), (None, 512, 512)])
def test_a_decode_step_is_small_however_long_its_sequences_are(windows):
    engine = EngineWithoutModel(
        num_blocks=64 * 504 * len(windows), block_size=16, max_num_seqs=64,
        max_num_batched_tokens=2**20, max_model_len=8192, windows=windows,
    )  # fmt: skip
    length = 8000 if ALL else 2000
    for number in range(64):
        prompt = [(number + token) % 50 for token in range(length)]
        engine.add(make_request(str(number), prompt, max_tokens=20, ignore_eos=True))
    sizes = []
    for _ in range(4):
        output = engine.scheduler.schedule()
        sizes.append(len(encode(output)))
        batch = engine.worker_state.apply(output)
        engine._launch(batch)
        engine.scheduler.update_from_output(engine._sample(batch, None))
    assert len(output.continued.new_token_ids) == 64
    assert sizes[0] > 64 * length
    assert max(sizes[2:]) < MAX_DECODE_STEP_BYTES
    print(f"{sizes[0]} bytes for the prompts, {sizes[2:]} for decode steps")
