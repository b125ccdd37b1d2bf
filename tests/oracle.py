"""Greedy tokens of the engine beside those of transformers on the same checkpoint."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from checkpoints import make_checkpoint

from paged_backend.core.compiling import GrammarCompiler
from paged_backend.core.drafter import Drafter
from paged_backend.engine.engine import Engine
from paged_backend.engine.executors import open_executor
from paged_backend.values.config import EngineConfig
from paged_backend.values.outputs import SequenceOutput
from paged_backend.values.request import Request
from paged_backend.values.sampling_params import SamplingParams

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
        self.model = make_checkpoint(family, folder, **overrides)

    @torch.inference_mode()
    def generate(self, prompt: list[int], max_tokens: int, **options: object) -> list[int]:
        """Greedy tokens of ``generate``, with the end-of-sequence token if there is one."""
        ids = torch.tensor([prompt])
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            pad_token_id=0,
            **options,
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
            logits = self.model(torch.tensor([prompt + answer])).logits[0]
            assert answer == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
            assert EOS not in answer[:-1]
            assert answer[-1] == EOS or len(answer) == max_tokens

    @torch.inference_mode()
    def confirm_logprobs(self, prompt: list[int], outputs: list[SequenceOutput]) -> None:
        """Check the log-probabilities of an answer, and of its prompt if it has them.

        They are those of this model's own logits over the vocabulary.
        """
        answer = [token for output in outputs for token in output.new_token_ids]
        tokens = prompt + answer
        logits = self.model(torch.tensor([tokens])).logits[0]
        logprobs = logits.log_softmax(-1)
        found = [entry for output in outputs for entry in output.logprobs or ()]
        assert len(found) == len(answer)
        start = len(prompt)
        if outputs[0].prompt_logprobs is not None:
            assert len(outputs[0].prompt_logprobs) == len(prompt) - 1
            found = outputs[0].prompt_logprobs + found
            start = 1
        assert all(output.prompt_logprobs is None for output in outputs[1:])
        for token, row, entry in zip(tokens[start:], logprobs[start - 1 :], found, strict=False):
            assert abs(entry.logprob - row[token].item()) < 1e-4
            assert entry.rank == int((row >= row[token]).sum())
            count = len(entry.top_token_ids)
            top = row.topk(count)
            assert entry.top_token_ids == top.indices.tolist()
            assert torch.allclose(torch.tensor(entry.top_logprobs), top.values, atol=1e-4)
        for row, entry in zip(logits[start - 1 :], found, strict=False):
            if entry.logits is not None:
                given = torch.frombuffer(bytearray(entry.logits), dtype=torch.float32)
                assert torch.allclose(given, row, atol=1e-4)


def make_engine(
    folder: Path,
    *,
    drafter: Drafter | None = None,
    grammars: GrammarCompiler | None = None,
    **options: object,
) -> Engine:
    """An engine in float32 over a small pool."""
    values = {"dtype": "float32", "kv_cache_memory_bytes": 16 * 2**20, **options}
    config = EngineConfig.from_mapping({"model": str(folder), **values})
    return Engine(config, open_executor(config, folder), drafter, grammars)


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
