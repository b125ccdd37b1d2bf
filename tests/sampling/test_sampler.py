from __future__ import annotations

import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import FrameType

import numpy as np
import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_kernels.reference.sampling import draw, probabilities
from torch import Tensor

from paged_backend.core.scheduled_batch import SampleSpec
from paged_backend.core.seeds import derive_seed
from paged_backend.sampling.draws import NUM_CANDIDATES
from paged_backend.sampling.logit_adjustments import LogitAdjuster
from paged_backend.sampling.recent import STEPS_KEPT, Recent
from paged_backend.sampling.sampler import Sampler
from paged_backend.values.sampling_params import SamplingParams

EOS = 7
MIXED = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01}
WIDE = {"temperature": 1.3, "top_k": 200, "top_p": 0.8, "min_p": 0.001}
VOCAB = 1000


def spec(
    params: SamplingParams | None = None,
    *,
    seed: int = 0,
    position: int = 0,
    prompt: tuple[int, ...] = (),
    output: tuple[int, ...] = (),
    **fields: object,
) -> SampleSpec:
    if not prompt and not output:
        prompt = (1,) * position
    return SampleSpec(
        seq_id=0,
        params=params or SamplingParams.from_mapping({"max_tokens": None, **fields}),
        seed=seed,
        position=len(prompt) + len(output),
        num_prompt_tokens=len(prompt),
        token_ids=[*prompt, *output],
    )


def sample(logits: Tensor, specs: list[SampleSpec]) -> list[int]:
    return Sampler(frozenset({EOS})).sample(logits.clone(), specs)


def drawn(logits: Tensor, count: int, **fields: object) -> np.ndarray:
    """How often each token is drawn from one row of logits, with ``count`` seeds."""
    params = SamplingParams.from_mapping(fields)
    specs = [spec(params, seed=seed) for seed in range(count)]
    tokens = sample(logits.expand(count, -1), specs)
    return np.bincount(tokens, minlength=logits.shape[-1])


def noise(rows: int, vocab: int = VOCAB, scale: float = 3.0, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


# ---- greedy -------------------------------------------------------------------------------------


def test_greedy_takes_the_first_of_the_largest() -> None:
    logits = noise(3)
    logits[1, [5, 900]] = 99
    tokens = sample(logits, [spec(temperature=0)] * 3)
    assert tokens == [int(logits[0].argmax()), 5, int(logits[2].argmax())]


@pytest.mark.parametrize("fields", [{"top_k": 1}, {"temperature": 1e-9}, {"min_p": 1}], ids=str)
def test_settings_that_leave_one_token_are_greedy(fields: dict[str, float]) -> None:
    logits = noise(50)
    specs = [spec(seed=seed, **fields) for seed in range(50)]
    assert sample(logits, specs) == logits.argmax(1).tolist()


def test_rows_that_are_sampled_greedily_have_the_tokens_of_all_rows() -> None:
    logits = noise(8)
    logits[0, :3] = math.nan
    logits[1, EOS] = 99  # forbidden before min_tokens
    specs = [
        spec(temperature=0, position=1),
        spec(temperature=0, position=1, min_tokens=2),
        spec(temperature=0.7, position=1),
        spec(top_k=1, position=1),
        spec(temperature=0, position=1, logit_bias={5: 100.0}),
        spec(temperature=0, repetition_penalty=1.5, prompt=(int(logits[5].argmax()),)),
        spec(temperature=0, min_tokens=2, output=(1, 2)),
        spec(temperature=0, position=1, logprobs=3),
    ]
    before = logits.clone()
    greedy = Sampler(frozenset({EOS})).sample_greedily(logits, specs)
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    tokens = sample(logits, specs)
    assert greedy == {row: tokens[row] for row in (0, 3, 6, 7)}
    assert tokens[1] != EOS and tokens[4] == 5
    assert Sampler(frozenset({EOS})).sample_greedily(logits[2:3], specs[2:3]) == {}


# ---- the distribution ---------------------------------------------------------------------------


def reference(logits: Tensor, params: SamplingParams) -> np.ndarray:
    """Probabilities by the definitions, with a full sort, in float64."""
    filters = (params.temperature, params.top_k, params.top_p, params.min_p)
    return probabilities(logits, *filters).numpy()


def improbability(counts: np.ndarray, shares: np.ndarray) -> float:
    """How many standard deviations Pearson's chi-square of ``counts`` lies above its mean."""
    expected = counts.sum() * shares
    large = expected >= 5
    groups = [
        *zip(counts[large], expected[large], strict=True),
        (counts[~large].sum(), expected[~large].sum()),
    ]
    statistic = sum((seen - mean) ** 2 / mean for seen, mean in groups if mean > 0)
    freedom = max(sum(mean > 0 for _, mean in groups) - 1, 1)
    return (statistic - freedom) / math.sqrt(2 * freedom)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.6},
        {"top_k": 5},
        {"top_k": NUM_CANDIDATES},
        {"top_k": 300},
        {"top_p": 0.6},
        {"top_p": 0.999},
        {"min_p": 0.02},
        MIXED,
        WIDE,
    ],
    ids=str,
)
@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_tokens_come_as_often_as_the_definitions_say(
    fields: dict[str, float], scale: float
) -> None:
    logits = noise(1, vocab=1101, scale=scale)[0]
    logits[-1] = logits.max() - 0.1
    shares = reference(logits, SamplingParams.from_mapping(fields))
    counts = drawn(logits, 6_000, **fields)
    assert set(counts.nonzero()[0]) <= set(shares.nonzero()[0])
    assert improbability(counts, shares) < 5  # the seeds are fixed: this cannot flake


def test_the_distribution_test_can_fail() -> None:
    logits = noise(1, vocab=1101)[0]
    shares = reference(logits, SamplingParams(temperature=1.1))
    assert improbability(drawn(logits, 6_000), shares) > 5


@pytest.mark.sampled
@pytest.mark.parametrize("vocab", [3, 40, 129, 1037, 50257])
@pytest.mark.parametrize(
    "fields", [{}, {"top_k": 2}, {"top_p": 0.7}, {"top_k": 100}, {"min_p": 0.1}], ids=str
)
def test_any_size_of_vocabulary(vocab: int, fields: dict[str, float]) -> None:
    for scale in (0.01, 2, 20):
        logits = noise(40, vocab, scale)
        specs = [spec(seed=seed, **fields) for seed in range(40)]
        for row, token in enumerate(sample(logits, specs)):
            assert reference(logits[row], specs[row].params)[token] > 0


def test_tokens_without_probability_are_never_drawn() -> None:
    logits = torch.full((2000, 300), -torch.inf)
    logits[:, [3, 130, 299]] = 0
    for fields in ({}, {"top_k": 10}, {"top_p": 0.9}, {"top_k": 100, "top_p": 0.5}):
        specs = [spec(seed=seed, **fields) for seed in range(2000)]
        assert set(sample(logits, specs)) <= {3, 130, 299}


def test_top_p_is_exact_where_the_likeliest_tokens_do_not_hold_the_mass() -> None:
    flat = noise(1, vocab=2000, scale=0.2)[0]
    params = SamplingParams(top_p=0.5)
    allowed = set(reference(flat, params).nonzero()[0].tolist())
    assert len(allowed) > 10 * NUM_CANDIDATES
    seen = set(drawn(flat, 6_000, top_p=0.5).nonzero()[0].tolist())
    assert seen <= allowed
    assert len(seen) > 0.98 * len(allowed)


# ---- randomness ---------------------------------------------------------------------------------

SETTINGS = [
    {"temperature": 0},
    {},
    {"temperature": 0.5, "min_p": 0.05},
    {"top_k": 40, "top_p": 0.9},
    {"top_p": 0.95},
    {"top_p": 0.9, "temperature": 3},
    {"top_k": 200},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"frequency_penalty": 1.0, "min_tokens": 5, "temperature": 0},
]


def row(number: int, vocab: int) -> tuple[Tensor, SampleSpec]:
    return noise(1, vocab, seed=number), spec(
        seed=number * 977,
        position=number,
        prompt=(1, 2, 3),
        output=(number % vocab, EOS),
        **SETTINGS[number % len(SETTINGS)],
    )


@settings(max_examples=examples(60), deadline=None)
@given(
    numbers=st.lists(st.integers(0, 60), min_size=1, max_size=24),
    vocab=st.sampled_from([100, 1037, 8192]),
)
def test_a_row_gives_the_same_token_whatever_it_is_batched_with(
    numbers: list[int], vocab: int
) -> None:
    rows = [row(number, vocab) for number in numbers]
    together = sample(torch.cat([logits for logits, _ in rows]), [spec for _, spec in rows])
    assert together == [sample(logits, [spec])[0] for logits, spec in rows]


def test_position_and_seed_both_change_the_draw() -> None:
    logits = noise(1, scale=0.1).expand(100, -1)
    by_seed = sample(logits, [spec(seed=number) for number in range(100)])
    by_position = sample(logits, [spec(position=number) for number in range(100)])
    assert len(set(by_seed)) > 80
    assert len(set(by_position)) > 80
    assert by_seed[1:] != by_position[1:]


@pytest.mark.sampled
@pytest.mark.parametrize(
    "fields",
    [{}, {"top_k": 5}, {"top_k": 64}, {"top_k": 300}, {"top_p": 0.6}, {"min_p": 0.02}, MIXED, WIDE],
    ids=str,
)
@pytest.mark.parametrize("rounded", [False, True])
def test_a_seed_draws_the_token_of_the_reference(fields: dict[str, float], rounded: bool) -> None:
    """The GPU's kernel is compared with the same reference. Rounded logits have many ties."""
    params = SamplingParams.from_mapping(fields)
    logits = noise(3, vocab=1101)
    logits = logits.round() if rounded else logits
    seeds = [0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1, *range(1000, 1100)]
    for row in logits:
        found = [
            sample(row.unsqueeze(0), [spec(params, seed=seed, position=position)])
            for position, seed in enumerate(seeds)
        ]
        signed = torch.tensor(seeds, dtype=torch.uint64).view(torch.int64)
        weights = probabilities(row, params.temperature, params.top_k, params.top_p, params.min_p)
        expected = draw(weights, signed, torch.arange(len(seeds)))
        assert [token for (token,) in found] == expected.tolist()


def test_seeds_of_answers_differ_and_the_first_is_the_requests() -> None:
    seeds = [derive_seed(42, index) for index in range(64)]
    assert seeds[0] == 42
    assert len(set(seeds)) == 64
    assert all(0 <= seed < 2**64 for seed in seeds)


# ---- penalties and min_tokens -------------------------------------------------------------------


def test_repetition_penalty_counts_prompt_and_output_once_each() -> None:
    logits = torch.tensor([[4.0, -1.0, 3.0, -1.5]])
    # Token 0 becomes 2, token 1 becomes -2: 2 and then 3 are what is left.
    assert sample(logits, [spec(temperature=0, repetition_penalty=2, prompt=(0, 0, 1))]) == [2]
    logits[0, 0] = logits[0, 2] = -9
    assert sample(logits, [spec(temperature=0, repetition_penalty=2, output=(1,))]) == [3]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"presence_penalty": 0.9}, 0),  # 3 - 0.9 beats 2
        ({"presence_penalty": 1.1}, 1),
        ({"frequency_penalty": 0.3}, 0),  # 3 - 3 x 0.3
        ({"frequency_penalty": 0.4}, 1),
        ({"frequency_penalty": 0.2, "presence_penalty": 0.5}, 1),
        ({"presence_penalty": -1.5}, 0),
    ],
    ids=str,
)
def test_presence_and_frequency_penalties_count_the_output_only(
    fields: dict[str, float], expected: int
) -> None:
    logits = torch.tensor([[3.0, 2.0, 0.0]])
    one = spec(temperature=0, prompt=(1, 1, 1, 1), output=(0, 2, 0, 0), **fields)
    assert sample(logits, [one]) == [expected]


def penalized(logits: Tensor, one: SampleSpec) -> Tensor:
    """Apply the penalties by their definitions, token by token."""
    wanted = logits.clone()
    params = one.params
    for token in set(one.context):
        factor = torch.tensor(params.repetition_penalty, dtype=torch.float32)
        wanted[token] = wanted[token] / factor if wanted[token] > 0 else wanted[token] * factor
    for token, count in Counter(one.context[one.num_prompt_tokens :]).items():
        wanted[token] -= params.frequency_penalty * count + params.presence_penalty
    return wanted


def test_penalties_follow_a_sequence_whose_drafts_are_rejected() -> None:
    params = SamplingParams(
        max_tokens=None, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25
    )
    adjuster = LogitAdjuster({EOS})
    choose = random.Random(0).randrange
    known = [choose(9) for _ in range(4)]
    start = len(known)
    tokens = list(known)  # one list for the whole sequence, as the worker has it
    for step in range(60):
        num_drafts = choose(4)
        tokens[len(known) :] = [choose(9) for _ in range(num_drafts)]
        specs = [
            SampleSpec(0, params, 0, position, start, tokens)
            for position in range(len(known), len(tokens) + 1)
        ]
        logits = noise(len(specs), vocab=9, seed=step)
        wanted = torch.stack([penalized(row, one) for row, one in zip(logits, specs, strict=True)])
        adjuster.adjust(logits, specs)
        assert torch.equal(logits, wanted)
        num_right = choose(num_drafts + 1)
        known += [*tokens[len(known) : len(known) + num_right], choose(9)]
        tokens[:] = known
    # A new list with output, as after a preemption, is counted at once and then followed.
    resumed = SampleSpec(0, params, 0, len(known), start, list(known))
    for one in (resumed, resumed._replace(position=len(known) - 1)):
        logits = noise(1, vocab=9)
        wanted = penalized(logits[0], one)
        adjuster.adjust(logits, [one])
        assert torch.equal(logits[0], wanted)


@pytest.mark.parametrize("penalty", [0.01, 0.6, 1.3, 100.0])
def test_a_repetition_penalty_changes_any_logit_as_defined(penalty: float) -> None:
    logits = torch.cat([noise(1, vocab=2000), noise(1, vocab=2000, scale=1e-44)], dim=1)
    logits[0, :7] = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 3e38, -3e38])
    one = spec(prompt=tuple(range(4000)), repetition_penalty=penalty)
    wanted = penalized(logits[0], one)
    LogitAdjuster({EOS}).adjust(logits, [one])
    assert torch.equal(logits[0].isnan(), wanted.isnan())
    assert torch.equal(logits[0].nan_to_num(7), wanted.nan_to_num(7))


def test_what_is_kept_of_requests_is_dropped_after_them() -> None:
    kept: Recent[SamplingParams, int] = Recent()
    steady, short = SamplingParams(), SamplingParams()
    made: list[SamplingParams] = []

    def value(params: SamplingParams) -> int:
        return kept.of(params, lambda: made.append(params) or len(made))

    assert value(short) == 1
    for _ in range(3 * STEPS_KEPT):
        kept.begin_step()
        assert value(steady) == 2  # equal to the other, but another object
    assert len(kept) == 1
    assert value(short) == 3


def test_stops_cannot_come_before_min_tokens() -> None:
    logits = torch.zeros(1, 10)
    logits[0, [EOS, 3, 5]] = torch.tensor([9.0, 8.0, 7.0])
    fields: dict[str, object] = {"temperature": 0, "min_tokens": 2, "stop_token_ids": [3, 10**6]}
    assert sample(logits, [spec(output=(1,), **fields)]) == [5]
    assert sample(logits, [spec(output=(1, 1), **fields)]) == [EOS]
    assert sample(logits, [spec(output=(1,), ignore_eos=True, **fields)]) == [5]


def test_rows_that_ask_for_nothing_keep_their_logits() -> None:
    logits = noise(3)
    before = logits.clone()
    specs = [spec(), spec(repetition_penalty=2, output=(1,)), spec(min_tokens=3)]
    Sampler(frozenset({EOS})).sample(logits, specs)
    changed = (logits != before).nonzero().tolist()
    assert changed == [[1, 1], [2, EOS]]


# ---- biases, allowed tokens, bad words ----------------------------------------------------------


def test_a_bias_is_added_before_penalties() -> None:
    logits = torch.tensor([[3.0, 2.0, -1.0]])
    assert sample(logits, [spec(position=1, temperature=0, logit_bias={1: 1.5})]) == [1]
    assert sample(logits, [spec(position=1, temperature=0, logit_bias={0: -100, 1: -100})]) == [2]
    # (2 + 1.5) / 2 is below 3: a penalty on the biased logit, not a bias on the penalized one.
    fields = {"logit_bias": {1: 1.5}, "repetition_penalty": 2.0, "temperature": 0}
    assert sample(logits, [spec(output=(1,), **fields)]) == [0]


def test_nothing_but_allowed_tokens_is_drawn() -> None:
    logits = noise(1)
    counts = drawn(logits[0], 500, allowed_token_ids=[3, 5, 5, 299])
    assert set(np.flatnonzero(counts)) == {3, 5, 299}


@pytest.mark.parametrize(
    ("prompt", "output", "expected"),
    [
        ((1, 2), (), 3),  # words are looked for in the output only
        ((), (1,), 3),
        ((), (1, 2), 4),  # 1 2 3 is forbidden
        ((1,), (2,), 3),
        ((), (5, 1, 2), 4),
        ((), (2, 1), 3),
        ((), (3,), 4),  # 3 3 is
    ],
)
def test_a_bad_word_is_not_completed(prompt, output, expected) -> None:
    logits = torch.tensor([[9.0, 0.0, 0.0, 3.0, 2.0, 1.0]])
    words = [[1, 2, 3], [3, 3], [0]]
    one = spec(temperature=0, prompt=prompt or (1,), output=output, bad_words_token_ids=words)
    assert sample(logits, [one]) == [expected]


def test_words_with_the_same_end_forbid_it_after_each_beginning() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    words = [[0, 2], [1, 2], [1, 2]]
    for last, expected in ((0, 1), (1, 1), (2, 2)):
        one = spec(temperature=0, prompt=(0,), output=(last,), bad_words_token_ids=words)
        assert sample(logits, [one]) == [expected]


@settings(max_examples=examples(60), deadline=None)
@given(
    words=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=12),
    output=st.lists(st.integers(0, 2), max_size=6),
)
def test_any_bad_words_are_forbidden_where_they_would_end(
    words: list[list[int]], output: list[int]
) -> None:
    one = spec(prompt=(0, 1), output=tuple(output), bad_words_token_ids=words)
    logits = noise(1, vocab=3)
    forbidden = {
        last
        for *rest, last in words
        if len(rest) <= len(output) and output[len(output) - len(rest) :] == rest
    }
    wanted = logits.clone()
    wanted[0, list(forbidden)] = -torch.inf
    LogitAdjuster({EOS}).adjust(logits, [one])
    assert torch.equal(logits, wanted)


# ---- logits that are no numbers -----------------------------------------------------------------


@pytest.mark.parametrize("fields", SETTINGS[:7], ids=str)
def test_bad_logits_harm_no_other_row(fields: dict[str, float]) -> None:
    good = noise(2)
    bad = noise(4, seed=1)
    bad[0, 10] = torch.nan
    bad[1, :] = torch.nan
    bad[2, 17] = torch.inf
    bad[3, :] = -torch.inf
    logits = torch.cat([good[:1], bad, good[1:]])
    specs = [spec(seed=number, **fields) for number in range(6)]
    tokens = sample(logits, specs)
    assert [tokens[0], tokens[5]] == [sample(logits[[n]], [specs[n]])[0] for n in (0, 5)]
    assert tokens[1] != 10
    assert tokens[2:5] == [0, 17, 0]


@pytest.mark.parametrize("fields", SETTINGS[:7], ids=str)
def test_extreme_but_finite_logits(fields: dict[str, float]) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 11] = 3e38
    logits[0, 12] = -3e38
    assert sample(logits, [spec(**fields)]) == [11]


def test_no_rows() -> None:
    assert sample(torch.empty(0, VOCAB), []) == []


# ---- cost ---------------------------------------------------------------------------------------


def kernels(step: Callable[[], object]) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    return sum(event.count for event in profile.key_averages())


@pytest.mark.parametrize("fields", SETTINGS, ids=str)
def test_the_number_of_tensor_calls_does_not_grow_with_the_rows(fields: dict[str, float]) -> None:
    def calls(rows: int) -> int:
        specs = [spec(seed=seed, output=(1, 2), **fields) for seed in range(rows)]
        logits = noise(1).repeat(rows, 1)
        return kernels(lambda: Sampler(frozenset({EOS})).sample(logits, specs))

    assert calls(64) < 1.1 * calls(4)


LONG_LISTS = {
    "logit_bias": {"logit_bias": {token: 0.5 for token in range(1024)}},
    "allowed": {"allowed_token_ids": list(range(1, 20_000)) * 2},
    "bad words": {"bad_words_token_ids": [[*[5] * (n % 62), 5, n + 9] for n in range(256)]},
    "stops": {"min_tokens": 1000, "stop_token_ids": list(range(256))},
    "repetition": {"repetition_penalty": 1.2, "frequency_penalty": 0.1},
}


def operations(step: Callable[[], object]) -> int:
    """Return the number of bytecode instructions that a step runs, which no other load changes."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Callable[..., object]:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        step()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("fields", LONG_LISTS.values(), ids=LONG_LISTS)
def test_the_lists_of_a_request_are_read_once_and_not_at_each_step(
    fields: dict[str, object],
) -> None:
    params = SamplingParams.from_mapping({"max_tokens": None, "temperature": 0, **fields})
    specs = [spec(params, prompt=(*range(2000),), output=(5,) * 200) for _ in range(8)]
    logits = noise(8, vocab=20_000)
    sampler = Sampler(frozenset({EOS}))
    first = sampler.sample(logits.clone(), specs)
    later: list[int] = []
    # Bad words need about 65 instructions for each token of a word, however many words there are.
    assert operations(lambda: later.extend(sampler.sample(logits.clone(), specs))) < 8 * 6000
    assert later == first


@pytest.mark.parametrize("fields", LONG_LISTS.values(), ids=LONG_LISTS)
def test_a_step_costs_little_more_than_one_without_lists(fields: dict[str, object]) -> None:
    def seconds(params: SamplingParams) -> float:
        specs = [spec(params, prompt=(*range(2000),), output=(5,) * 200) for _ in range(64)]
        sampler = Sampler(frozenset({EOS}))
        sampler.sample(logits.clone(), specs)
        times = []
        for _ in range(3):
            copy = logits.clone()
            start = time.thread_time()
            sampler.sample(copy, specs)
            times.append(time.thread_time() - start)
        return min(times)

    logits = noise(64, vocab=20_000)
    plain = SamplingParams(max_tokens=None, temperature=0.5)
    assert seconds(replace(plain, **fields)) < 3 * seconds(plain)
