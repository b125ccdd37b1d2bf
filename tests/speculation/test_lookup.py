"""Guesses from earlier text, without a model."""

from __future__ import annotations

import random

from paged_backend.core.drafter import NO_DRAFT, Draft
from paged_backend.core.scheduler_output import ContinuedDecodes, SchedulerOutput, Slice
from paged_backend.core.sequence import PLACEHOLDER, Sequence, SequenceStatus
from paged_backend.speculation.lookup import LookupDrafter
from paged_backend.values.options.speculation import SpeculativeConfig
from paged_backend.values.request import Request
from paged_backend.values.sampling_params import SamplingParams

NO_EOS = frozenset[int]()


def sequence(
    seq_id: int, prompt: list[int], answer: list[int], tenant: str = "", salt: str = ""
) -> Sequence:
    """A running sequence."""
    request = Request(f"r{seq_id}", prompt, SamplingParams(), cache_salt=salt, tenant=tenant)
    seq = Sequence(seq_id, request, 0, 1, NO_EOS, 100_000, answer)
    seq.status = SequenceStatus.RUNNING
    return seq


def drafter(**options: object) -> LookupDrafter:
    """A drafter with guesses that are as long as their match, unless an option says otherwise."""
    return LookupDrafter(SpeculativeConfig.read({"suffix_decoding_max_spec_factor": 1.0} | options))


def guess(of: LookupDrafter, seq: Sequence) -> list[int]:
    return of.propose([seq], 1000).get(seq.seq_id, NO_DRAFT).token_ids


def step_of(seq_id: int, num_drafts: int) -> SchedulerOutput:
    """A step of one decode with drafts."""
    part = Slice(seq_id, 0, 1 + num_drafts, [], 0, [], [1] * num_drafts, [seq_id], None)
    return SchedulerOutput([], [], ContinuedDecodes([], [], []), [part], 1, [])


def test_a_prompt_is_looked_up() -> None:
    text = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
    one = drafter(
        method="ngram", prompt_lookup_min=2, prompt_lookup_max=3, num_speculative_tokens=4
    )
    assert guess(one, sequence(1, text, [1, 6, 7])) == [8, 9, 10, 11]
    assert guess(one, sequence(2, text, [1, 7])) == []


def test_the_longest_match_wins_and_bounds_the_guess() -> None:
    text = [1, 2, 3, 4, 5, 6, 9, 2, 3, 7, 8, 9]
    assert guess(drafter(), sequence(1, text, [1, 2, 3])) == [4, 5, 6]
    assert guess(drafter(), sequence(1, text, [0, 2, 3])) == [7, 8]
    twice = drafter(suffix_decoding_max_spec_factor=2.0)
    assert guess(twice, sequence(1, text, [1, 2, 3])) == [4, 5, 6, 9, 2, 3]


def test_most_of_several_matches_decide() -> None:
    text = [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2, 3, 5, 0]
    assert guess(drafter(), sequence(1, text, [1, 2, 3]))[0] == 4
    strict = drafter(suffix_decoding_min_token_prob=0.7)
    assert guess(strict, sequence(1, text, [1, 2, 3])) == []


def test_a_step_verifies_no_token_about_which_earlier_places_disagree() -> None:
    text = [token for name in (50, 51, 52) for token in (1, 2, 3, 4, name, 5, 6, 7, 0)]
    one = drafter(suffix_decoding_max_spec_factor=4.0)
    seq = sequence(1, text, [1, 2])
    assert len(guess(one, seq)) > 3  # nothing is known about the time of a token
    for number in (0, 4, 8) * 30:
        one.observe_step(0.005 + 0.001 * number, step_of(1, number))
    assert guess(one, seq) == [3, 4]


def test_a_text_that_repeats_itself_goes_on() -> None:
    one = drafter(num_speculative_tokens=7, suffix_decoding_max_spec_factor=9.0)
    assert guess(one, sequence(1, [7], [1, 2, 1, 2])) == [1, 2, 1, 2, 1, 2, 1]


def answer_of(one: LookupDrafter, seq: Sequence) -> None:
    """Let a sequence end, after the drafter has seen it."""
    one.propose([seq], 1000)
    seq.status = SequenceStatus.FINISHED
    one.propose([], 1000)


def test_answers_are_found_by_the_same_tenant_with_the_same_salt_only() -> None:
    one = drafter()
    answer = [11, 12, 13, 14, 15, 16, 17]
    answer_of(one, sequence(1, [1], answer, tenant="a", salt="x"))
    start = answer[:4]
    assert guess(one, sequence(2, [2], start, tenant="a", salt="x")) == answer[4:]
    assert guess(one, sequence(3, [2], start, tenant="a")) == []
    assert guess(one, sequence(4, [2], start, tenant="b", salt="x")) == []
    assert guess(one, sequence(5, [2], start)) == []
    assert guess(drafter(method="ngram"), sequence(6, [2], start, tenant="a", salt="x")) == []


def test_only_so_many_answers_are_kept() -> None:
    one = drafter(suffix_decoding_max_cached_requests=2)
    answers = [[10 * number + place for place in range(6)] for number in range(1, 4)]
    for number, answer in enumerate(answers):
        answer_of(one, sequence(number, [1], answer))
    found = [guess(one, sequence(9 + n, [2], answer[:3])) for n, answer in enumerate(answers)]
    assert found == [[], answers[1][3:], answers[2][3:]]
    none = drafter(suffix_decoding_max_cached_requests=0)
    answer_of(none, sequence(1, [1], answers[0]))
    assert guess(none, sequence(2, [2], answers[0][:3])) == []


def test_a_request_that_wants_no_guesses_gets_none() -> None:
    one = drafter()
    seq = sequence(1, [7], [1, 2, 1, 2])
    assert guess(one, seq)
    request = Request("r2", [7], SamplingParams(), speculate=False)
    seq = Sequence(2, request, 0, 1, NO_EOS, 100_000, [1, 2, 1, 2])
    seq.status = SequenceStatus.RUNNING
    assert guess(one, seq) == []


def test_a_prediction_is_a_source_of_guesses() -> None:
    request = Request(
        "r1", [7, 8], SamplingParams(), predicted_token_ids=[20, 21, 22, 23, 24, 25, 26]
    )
    seq = Sequence(1, request, 0, 1, NO_EOS, 100_000, [20, 21])
    seq.status = SequenceStatus.RUNNING
    assert guess(drafter(), seq) == [22, 23]
    lookup = drafter(method="ngram", prompt_lookup_max=2, num_speculative_tokens=4)
    assert guess(lookup, seq) == [22, 23, 24, 25]
    answer_of(lookup, seq)
    assert guess(lookup, sequence(2, [7, 8], [20, 21])) == []


def test_a_draft_knows_whether_it_comes_from_the_prediction() -> None:
    """Among equally long matches, it does."""
    prompt = [1, 20, 21, 22, 23, 24, 25]

    def draft(predicted: list[int]) -> Draft:
        request = Request("r1", prompt, SamplingParams(), predicted_token_ids=predicted)
        seq = Sequence(1, request, 0, 1, NO_EOS, 100_000, [20, 21])
        seq.status = SequenceStatus.RUNNING
        return drafter().propose([seq], 1000)[1]

    assert draft([20, 21, 30, 31]) == Draft([30, 31], is_predicted=True)
    assert draft([9, 21, 30, 31]) == Draft([22, 23])
    assert draft([25, 20, 21, 22]) == Draft([22], is_predicted=True)


def drafter_for_device() -> LookupDrafter:
    """A drafter for a device that draws drafts after tokens in flight."""
    return LookupDrafter(SpeculativeConfig(), draws_ahead=True)


def in_flight(seq: Sequence) -> Sequence:
    """The sequence, with another token that a step is sampling."""
    seq.token_ids.append(PLACEHOLDER)
    seq.num_output_placeholders, seq.num_computed_tokens = 1, seq.num_tokens - 1
    return seq


def go_on(seq: Sequence, token_id: int) -> None:
    """Let the token in flight become known, and the next one be in flight."""
    seq.token_ids[-1] = token_id
    in_flight(seq)


def step(one: LookupDrafter, sequences: list[Sequence]) -> tuple[set[int], dict[int, Draft]]:
    """The sequences that wait in a step, and the drafts of the others."""
    awaiting = one.awaits(sequences)
    others = [seq for seq in sequences if seq.seq_id not in awaiting]
    return awaiting, dict(one.propose(others, 1000))


def test_the_device_gets_the_part_of_an_earlier_answer_that_is_repeated() -> None:
    """It gets the next part when the text comes to the end of one."""
    one, answer = drafter_for_device(), list(range(1000, 2500))
    answer_of(one, sequence(1, [1], answer))
    seq = in_flight(sequence(2, [2], answer[:200]))
    references: list[list[int]] = []
    for token_id in answer[200:]:
        awaiting, drafts = step(one, [seq])
        assert not awaiting
        if draft := drafts.get(2):
            assert set(draft.token_ids) == {PLACEHOLDER}
            if not references or draft.reference is not references[-1]:
                references.append(draft.reference)
        go_on(seq, token_id)
    assert 3 <= len(references) <= 4
    firsts = [answer.index(reference[0]) for reference in references]
    assert firsts == sorted(firsts) and firsts[0] < 200
    for first, reference in zip(firsts, references, strict=True):
        assert len(reference) < 700 and reference == answer[first : first + len(reference)]


def test_the_device_gets_no_answers_of_other_tenants() -> None:
    one, answer = drafter_for_device(), list(range(100, 200))
    answer_of(one, sequence(1, [1], answer, tenant="a", salt="x"))
    wanted = [("a", "x"), ("a", ""), ("b", "x"), ("", "")]
    for number, (tenant, salt) in enumerate(wanted):
        seq = in_flight(sequence(2 + number, [2], answer[:20], tenant=tenant, salt=salt))
        awaiting, drafts = step(one, [seq])
        assert not awaiting and bool(drafts) == (number == 0)


def test_a_prediction_keeps_its_place_on_the_device() -> None:
    """A sequence that repeats an earlier answer in place of its prediction waits for its token."""
    one, answer = drafter_for_device(), list(range(100, 200))
    answer_of(one, sequence(1, [1], answer))
    request = Request("r2", [2], SamplingParams(), predicted_token_ids=[7, 8, 9])
    seq = Sequence(2, request, 0, 1, NO_EOS, 100_000, answer[:20])
    seq.status = SequenceStatus.RUNNING
    assert step(one, [in_flight(seq)]) == ({2}, {})


def test_an_answer_that_is_given_again_is_not_sent_again() -> None:
    """The part of the first answer goes on as the newest one does."""
    one, answer = drafter_for_device(), list(range(1000, 1400))
    answer_of(one, sequence(1, [1], answer))
    seq = in_flight(sequence(2, [2], answer[:20]))
    first = step(one, [seq])[1][2].reference
    answer_of(one, sequence(3, [1], answer))
    go_on(seq, answer[20])
    assert step(one, [seq])[1][2].reference is first


def test_a_part_of_an_answer_is_known_by_its_answers() -> None:
    """The answers of a tenant are dropped, and later ones have other tokens at the same places."""
    one, begin = drafter_for_device(), list(range(100, 150))
    old, new = begin + list(range(1000, 1100)), begin + list(range(2000, 2100))
    answer_of(one, sequence(1, [1], old, tenant="a"))
    seq = in_flight(sequence(2, [2], begin[:20], tenant="a"))
    assert step(one, [seq])[1][2].reference == old
    for number in range(64):
        answer_of(one, sequence(3 + number, [1], old, tenant=f"t{number}"))
    answer_of(one, sequence(99, [1], new, tenant="a"))
    go_on(seq, begin[20])
    assert step(one, [seq])[1][2].reference == new


def take(sequences: list[Sequence], drafts: dict[int, Draft]) -> int:
    """Let a step send the references of its drafts, and return the number of their tokens."""
    number = 0
    for seq in sequences:
        reference = drafts[seq.seq_id].reference if seq.seq_id in drafts else []
        if reference and reference is not seq.sent_reference:
            seq.sent_reference = reference
            number += len(reference)
    return number


def test_a_step_sends_few_references() -> None:
    """All sequences begin to repeat long answers in the same step, and none of them waits."""
    one = drafter_for_device()
    answers = [list(range(1000 * number, 1000 * number + 900)) for number in range(12)]
    for number, answer in enumerate(answers):
        answer_of(one, sequence(number, [1], answer))
    texts = [in_flight(sequence(50 + n, [2], answer[:20])) for n, answer in enumerate(answers)]
    one.awaits(texts)
    one.propose(texts, 0)  # a step without room for drafts sends nothing
    sent = []
    for place in range(20, 23):
        awaiting, drafts = step(one, texts)
        assert not awaiting
        sent.append((len(drafts), take(texts, drafts)))
        for seq, answer in zip(texts, answers, strict=True):
            go_on(seq, answer[place])
    assert all(number <= 4096 for _, number in sent)
    assert [number for number, _ in sent] == [7, 12, 12] and sent[2][1] == 0


def test_many_short_answers_are_sent_in_one_step() -> None:
    one = drafter_for_device()
    answers = [list(range(100 * number, 100 * number + 60)) for number in range(60)]
    for number, answer in enumerate(answers):
        answer_of(one, sequence(number, [1], answer))
    texts = [in_flight(sequence(100 + n, [2], answer[:20])) for n, answer in enumerate(answers)]
    assert len(step(one, texts)[1]) == 60


def test_guesses_that_are_always_wrong_end() -> None:
    """Random tokens of a small vocabulary: many matches, and hardly a right guess."""
    rng = random.Random(0)
    one, seq = drafter(), sequence(1, [rng.randrange(40) for _ in range(200)], [1])
    numbers: list[int] = []
    for _ in range(300):
        numbers.append(len(guess(one, seq)))
        one.observe_step(0.005 + 0.001 * numbers[-1], step_of(1, numbers[-1]))
        seq.token_ids.append(rng.randrange(40))
    assert sum(numbers[:20]) > 5 and sum(numbers[-100:]) < 10
    # It looks on, and notices when the text begins to repeat itself.
    for place in range(60):
        seq.token_ids.append(place % 12)
        numbers.append(len(guess(one, seq)))
    assert numbers[-1] >= 4


def test_a_long_prompt_is_read_a_part_at_a_time() -> None:
    """While it is read, nothing is guessed; afterwards, its first tokens are found."""
    rng = random.Random(1)
    prompt = [rng.randrange(30_000) for _ in range(10_000)]
    one, seq = drafter(), sequence(1, prompt, prompt[:5])
    found = [guess(one, seq) for _ in range(4)]
    assert found[:2] == [[], []] and found[-1] == prompt[5:10]


def test_an_index_grows_with_its_text() -> None:
    """The context is long, but the memory of a short answer is small."""
    rng = random.Random(2)
    one, seq = drafter(), sequence(1, [rng.randrange(30_000) for _ in range(50)], [1])
    sizes: list[int] = []
    for _ in range(200):
        guess(one, seq)
        sizes.append(one._texts[1].source.index.window)
        seq.token_ids.append(rng.randrange(30_000))
    assert sizes[0] == 64 and sizes[-1] == 256
    seq.token_ids += seq.token_ids[5:12]
    assert guess(one, seq) == seq.token_ids[12:19]


def test_a_preempted_sequence_takes_no_memory() -> None:
    one, seq = drafter(), sequence(1, [7], [1, 2, 1, 2])
    assert guess(one, seq)
    seq.status = SequenceStatus.WAITING
    assert one.propose([], 1000) == {} and not one._texts
    seq.status = SequenceStatus.RUNNING
    assert guess(one, seq)


def test_many_answers_that_end_at_once_are_read_a_part_at_a_time() -> None:
    """No step reads much, whether the answers are long or of many tenants."""
    rng = random.Random(3)
    for number, length in [(4, 10_000), (60, 20)]:
        one = drafter()
        answers = [[rng.randrange(30_000) for _ in range(length)] for _ in range(number)]
        ended = [sequence(i, [1], answer, tenant=f"t{i}") for i, answer in enumerate(answers)]
        one.propose(ended, 1000)
        for seq in ended:
            seq.status = SequenceStatus.FINISHED
        num_kept: list[int] = []
        while not num_kept or num_kept[-1] < number:
            one.propose([], 1000)
            num_kept.append(len(one._answers._by_owner))
        assert num_kept[0] <= 8 and len(num_kept) >= 4
        for i, answer in enumerate(answers):
            found = guess(one, sequence(100 + i, [2], answer[-9:-5], tenant=f"t{i}"))
            assert found == answer[-5:-1]


def test_nothing_is_searched_where_no_guess_can_pay() -> None:
    """Each token takes the same time, so that a step of many gives as many a second as any."""
    one = drafter()
    texts = [sequence(i, [7], [1, 2, 1, 2]) for i in range(32)]
    for number in (1, 2, 4, 64):
        for _ in range(20):
            one.observe_step(0.001 * number, step_of(1, number - 1))
    assert one.propose(texts, 1000) == {}
    assert all(text.source.index.num_tokens == 0 for text in one._texts.values())
