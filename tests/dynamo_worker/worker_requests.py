"""Requests of the tests of this folder."""

from __future__ import annotations

import os

from paged_backend.values.sampling_params import SamplingParams

NUM_STREAMS = int(os.environ.get("DYNAMO_STREAMS", "12"))  # 200 for a longer run
PROMPTS = [[5 + index, 6, 7, 8, 9, 10 + index] for index in range(NUM_STREAMS)]
PARAMS = [
    SamplingParams(max_tokens=40, ignore_eos=True, temperature=index % 2 * 0.8, seed=index)
    for index in range(len(PROMPTS))
]
