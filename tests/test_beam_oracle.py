"""Beam search gives the tokens and the scores of transformers, in float32."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
import torch
from oracle import EOS, VOCAB_SIZE, Oracle, make_engine

from paged_backend.engine.engine import Engine
from paged_backend.values.errors import InvalidRequest
from paged_backend.values.outputs import FinishReason, SequenceOutput
from paged_backend.values.request import Request
from paged_backend.values.sampling_params import SamplingParams

MAX_TOKENS = 8


class Search(NamedTuple):
    """A prompt and the parameters of its search."""

    prompt: list[int]
    width: int
    early_stopping: bool | str
    length_penalty: float
    end_token_ids: tuple[int, ...]

    def params(self) -> SamplingParams:
        return SamplingParams(
            beam_width=self.width,
            n=self.width,
            max_tokens=MAX_TOKENS,
            early_stopping=self.early_stopping,
            length_penalty=self.length_penalty,
            stop_token_ids=self.end_token_ids,
            logprobs=0,
        )


@pytest.fixture(scope="module")
def oracle(tmp_path_factory) -> Oracle:
    return Oracle("llama3", tmp_path_factory.mktemp("beams"))


@torch.inference_mode()
def expected(oracle: Oracle, search: Search) -> list[tuple[list[int], float]]:
    """The answers of transformers with their scores, the best first."""
    ids = torch.tensor([search.prompt])
    out = oracle.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        num_beams=search.width,
        num_return_sequences=search.width,
        early_stopping=search.early_stopping,
        length_penalty=search.length_penalty,
        eos_token_id=[EOS, *search.end_token_ids],
        pad_token_id=0,
        max_new_tokens=MAX_TOKENS,
        return_dict_in_generate=True,
        output_scores=True,
    )
    rows = out.sequences[:, len(search.prompt) :].tolist()
    tokens = [_cut(row, {EOS, *search.end_token_ids}) for row in rows]
    return list(zip(tokens, out.sequences_scores.tolist(), strict=True))


def _cut(tokens: list[int], end_token_ids: set[int]) -> list[int]:
    """The tokens up to the first end token; padding follows it."""
    ends = [place + 1 for place, token in enumerate(tokens) if token in end_token_ids]
    return tokens[: min(ends, default=len(tokens))]


def searches(oracle: Oracle, widths: range) -> list[Search]:
    """One for each width, with other values of the parameters each; some tokens end early."""
    rng = random.Random(widths[0])
    found = []
    for width in widths:
        prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 40))]
        likely = oracle.generate(prompt, 8)
        ends = tuple(rng.sample([token for token in likely if token != EOS], rng.randint(0, 2)))
        early = rng.choice([True, False, "never"])
        found.append(Search(prompt, width, early, rng.choice([0.5, 1.0, 2.0]), ends))
    return found


def check(outputs: list[SequenceOutput], oracle: Oracle, search: Search) -> None:
    answers = expected(oracle, search)
    for index, (tokens, score) in enumerate(answers):
        own = [output for output in outputs if output.index == index]
        assert [token for output in own for token in output.new_token_ids] == tokens
        entries = [entry for output in own for entry in output.logprobs or ()]
        assert len(entries) == len(tokens)
        total = sum(entry.logprob for entry in entries)
        assert total / len(tokens) ** search.length_penalty == pytest.approx(score, abs=1e-4)
        assert own[-1].finish_reason is not None


def run(engine: Engine, work: list[Search], *, num_others: int = 0) -> list[list[SequenceOutput]]:
    """The outputs of each search; all of them start at once, with other requests between them."""
    outputs: dict[str, list[SequenceOutput]] = {}
    for index, search in enumerate(work):
        engine.add_request(Request(f"beams-{index}", search.prompt, search.params()))
        for place in range(num_others):
            params = SamplingParams(seed=index, max_tokens=20, n=2)
            engine.add_request(Request(f"other-{index}-{place}", search.prompt[::-1], params))
    while engine.has_unfinished:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.scheduler.check_invariants()
    engine.scheduler.check_empty()
    return [outputs[f"beams-{index}"] for index in range(len(work))]


def test_each_width_and_parameter(oracle):
    engine = make_engine(oracle.folder, kv_cache_memory_bytes=2**19)
    for search in searches(oracle, range(2, 9, 3)):
        check(run(engine, [search])[0], oracle, search)


def test_beside_sampled_requests_with_preemption(oracle):
    engine = make_engine(
        oracle.folder, kv_cache_memory_bytes=2**17, block_size=8, max_num_seqs=8, max_model_len=64
    )
    work = searches(oracle, range(2, 9))
    for outputs, search in zip(run(engine, work, num_others=1), work, strict=True):
        check(outputs, oracle, search)
    assert engine.stats().num_preemptions > 0


def test_a_search_that_starts_again_sends_the_rest(oracle):
    engine = make_engine(oracle.folder, kv_cache_memory_bytes=2**19)
    (search,) = searches(oracle, range(4, 5))
    whole = run(engine, [search])[0]
    answers = [
        [token for output in whole if output.index == index for token in output.new_token_ids]
        for index in range(search.width)
    ]
    num_sent = next(
        place
        for place in range(MAX_TOKENS)
        if len({tuple(ids[: place + 1]) for ids in answers}) > 1
    )
    progress = [ids[:num_sent] for ids in answers]
    assert len(search.prompt) >= engine.scheduler.kv.block_size
    engine.add_request(Request("again", search.prompt, search.params()), progress)
    most_shared = 0
    while engine.has_unfinished:
        for output in engine.step():
            progress[output.index] += output.new_token_ids
        tables = [seq.block_ids for seq in engine.scheduler.view().sequences]
        owned = [block for table in tables for block in table]
        most_shared = max(most_shared, len(owned) - len(set(owned)))
    engine.scheduler.check_empty()
    assert progress == answers
    assert most_shared >= (search.width - 1) * (
        len(search.prompt) // engine.scheduler.kv.block_size
    )


def test_the_most_candidates_of_a_beam(oracle):
    """32 of them: 16 beams with one end token, or 8 with three."""
    engine = make_engine(
        oracle.folder, kv_cache_memory_bytes=2**19, max_num_seqs=16, max_beam_width=16
    )
    prompt = searches(oracle, range(2, 3))[0].prompt
    ends = tuple(token for token in dict.fromkeys(oracle.generate(prompt, 8)) if token != EOS)
    widest = Search(prompt, 16, False, 1.0, ())
    many_ends = Search(prompt, 8, False, 1.0, ends[:2])
    for search in (widest, many_ends):
        check(run(engine, [search])[0], oracle, search)
    for search in (widest._replace(end_token_ids=ends[:1]), many_ends._replace(width=9)):
        with pytest.raises(
            InvalidRequest, match="beam_width: times the number of end tokens and 1"
        ):
            engine.add_request(Request("too many", prompt, search.params()))


def test_a_vocabulary_with_fewer_tokens_than_candidates(tmp_path):
    small = Oracle("llama3", tmp_path, vocab_size=9)
    engine = make_engine(small.folder, kv_cache_memory_bytes=2**19)
    for early_stopping in (True, False, "never"):
        search = Search([3, 5, 4], 8, early_stopping, 1.0, ())
        check(run(engine, [search])[0], small, search)


def test_a_vocabulary_with_fewer_outputs_than_answers(tmp_path):
    """Five outputs of one token exist, so there are five answers, and no more."""
    small = Oracle("llama3", tmp_path, vocab_size=5)
    engine = make_engine(small.folder, kv_cache_memory_bytes=2**19)
    params = SamplingParams(beam_width=8, n=8, max_tokens=1)
    engine.add_request(Request("few", [3, 4], params))
    ends = {}
    while engine.has_unfinished:
        ends |= {output.index: output for output in engine.step() if output.finish_reason}
    engine.scheduler.check_empty()
    found = [ends[index].new_token_ids for index in range(5)]
    assert sorted(found) == [[token] for token in range(5)]
    for index in range(5, 8):
        assert ends[index].finish_reason == FinishReason.ERROR
        assert "too few tokens are possible" in ends[index].problem
