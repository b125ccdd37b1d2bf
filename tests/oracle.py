"""Greedy tokens of the engine beside those of transformers on the same checkpoint."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from checkpoints import make_checkpoint

from paged_backend.config import EngineConfig
from paged_backend.engine import Engine
from paged_backend.outputs import SequenceOutput
from paged_backend.request import Request
from paged_backend.sampling_params import SamplingParams

VOCAB_SIZE = 199
Work = list[tuple[list[int], int]]
"""Prompts and how many tokens to generate at most."""


def mixed_work(num_requests: int, seed: int = 0) -> Work:
    """Prompts of 1 to 90 tokens; every fourth begins like the one before it."""
    rng = random.Random(seed)
    work: Work = []
    for index in range(num_requests):
        prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 90))]
        if index % 4 == 3:
            prompt = work[-1][0][: rng.randint(1, 64)] + prompt[:26]
        work.append((prompt, rng.randint(1, 24)))
    return work


class Oracle:
    """transformers' own float32 answers, one prompt at a time."""

    def __init__(self, family: str, folder: Path) -> None:
        self.folder = folder
        self._model = make_checkpoint(family, folder)

    @torch.inference_mode()
    def answer(self, prompt: list[int], max_tokens: int) -> list[int]:
        """Greedy tokens, with the end-of-sequence token if there is one."""
        ids = torch.tensor([prompt])
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            pad_token_id=0,
        )
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens


def make_engine(folder: Path, **options: object) -> Engine:
    """An engine in float32 over a small pool."""
    values = {"dtype": "float32", "kv_cache_memory_bytes": 16 * 2**20, **options}
    return Engine(EngineConfig.from_mapping({"model": str(folder), **values}), folder)


def run(engine: Engine, work: Work) -> dict[str, list[SequenceOutput]]:
    """All outputs of each request, by its place in the work; all are submitted at once."""
    outputs: dict[str, list[SequenceOutput]] = {}
    for index, (prompt, max_tokens) in enumerate(work):
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        engine.add_request(Request(str(index), prompt, params, 0.0))
    while engine.has_unfinished:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.scheduler.check_invariants()
    return outputs


def tokens_of(outputs: dict[str, list[SequenceOutput]]) -> list[list[int]]:
    """The tokens of each request, in the order of the work."""
    return [
        [token for output in outputs[str(index)] for token in output.new_token_ids]
        for index in range(len(outputs))
    ]
