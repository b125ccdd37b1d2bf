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
EOS = 2
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
    """transformers' own float32 model of the same checkpoint."""

    def __init__(self, family: str, folder: Path, **overrides: object) -> None:
        self.folder = folder
        self._model = make_checkpoint(family, folder, **overrides)

    @torch.inference_mode()
    def generate(self, prompt: list[int], max_tokens: int) -> list[int]:
        """Greedy tokens of ``generate``, with the end-of-sequence token if there is one."""
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

    @torch.inference_mode()
    def confirm(self, work: Work, answers: list[list[int]]) -> None:
        """Check each answer token for token, with one pass over prompt and answer together.

        Each token must be the likeliest after all before it, so by induction the answer is what
        greedy decoding gives; it must end at the end-of-sequence token or at its limit.
        """
        for (prompt, max_tokens), answer in zip(work, answers, strict=True):
            logits = self._model(torch.tensor([prompt + answer])).logits[0]
            assert answer == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
            assert EOS not in answer[:-1]
            assert answer[-1] == EOS or len(answer) == max_tokens


def make_engine(folder: Path, **options: object) -> Engine:
    """An engine in float32 over a small pool."""
    values = {"dtype": "float32", "kv_cache_memory_bytes": 16 * 2**20, **options}
    return Engine(EngineConfig.from_mapping({"model": str(folder), **values}), folder)


def run(engine: Engine, work: Work) -> dict[str, list[SequenceOutput]]:
    """All outputs of each request, by its place in the work; all are submitted at once."""
    outputs: dict[str, list[SequenceOutput]] = {}
    for index, (prompt, max_tokens) in enumerate(work):
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        engine.add_request(Request(str(index), prompt, params))
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
