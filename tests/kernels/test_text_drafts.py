"""Drafts that the device draws from texts, against a reference that goes token by token."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from effort import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from paged_kernels.device import INTERPRETED
from paged_kernels.errors import ArgumentError
from paged_kernels.reference.text_drafts import drafts_of, num_right
from paged_kernels.text_drafts import FIELDS, Texts, draw_drafts, keep_tokens, move_back
from torch import Tensor

from paged_backend.core.scheduled_batch import SampleSpec
from paged_backend.platforms.gpu import texts as device_texts
from paged_backend.platforms.gpu.transfer import Transfer
from paged_backend.values.options.scheduling import StepLimits
from paged_backend.values.sampling_params import SamplingParams

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
BLOCK_SIZE = 4


def ints(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def texts_of(
    rows: list[list[int]],
    num_wrong: list[int],
    width: int = 64,
    predicted: list[list[int]] | None = None,
) -> Texts:
    """The newest tokens of the texts; other places have what is left of other texts."""
    kept = [[7] * width for _ in rows]
    predicted = predicted or [[] for _ in rows]
    for ring, row, before in zip(kept, rows, predicted, strict=True):
        for position, token in enumerate([*before, *row], -len(before)):
            ring[position % width] = token
    begins = ints([-len(before) for before in predicted])
    last_tokens, unknown = ints([row[-1] for row in rows]), ints([99] * len(rows))
    return Texts(ints(kept), last_tokens, ints(num_wrong), begins, unknown)


def slice_of(**fields: int) -> list[int]:
    return [fields.get(name, 0) for name in FIELDS]


texts = st.builds(
    lambda seed, length, vocab: random.Random(seed).choices(range(vocab), k=length),
    st.integers(0, 10**6),
    st.one_of(st.integers(1, 40), st.integers(1000, 2080)),
    st.sampled_from([1, 2, 5, 50, 10_000]),
)


@settings(max_examples=examples(40), deadline=None)
@given(
    rows=st.lists(texts, min_size=3, max_size=3),
    counts=st.tuples(*[st.integers(1, 16)] * 3),
    wrong=st.tuples(*[st.integers(0, 5)] * 3),
    low=st.integers(1, 4),
    more=st.integers(0, 20),
    width=st.sampled_from([16, 2048, 4096]),  # up to four tiles of the kernel that searches
    parts=st.lists(
        st.tuples(st.integers(0, 9), st.one_of(st.integers(0, 12), st.integers(1000, 2000))),
        min_size=3,
        max_size=3,
    ),
)
@example(  # the prediction [5, 1] ends as the text before the last token
    rows=[[2, 9, 5, 1, 2]] * 3,
    counts=(2, 2, 2),
    wrong=(0, 0, 0),
    low=2,
    more=3,
    width=16,
    parts=[(2, 2)] * 3,
)
def test_drafts_are_those_of_the_reference(rows, counts, wrong, low, more, width, parts):
    """The second slice has drafts already, and the third one moves back.

    A prediction has parts of the text, and its newest tokens are kept as far as there is room.
    """
    cuts = zip(rows, parts, strict=True)
    predicted = [(row * 2000)[start : start + size] for row, (start, size) in cuts]
    room = [max(width - len(row), 0) for row in rows]
    predicted = [text[-size:] if size else [] for text, size in zip(predicted, room, strict=True)]
    kept = texts_of(rows, wrong, width, predicted)
    slices, first = [], 0
    for slot, (row, count) in enumerate(zip(rows, counts, strict=True)):
        moved = wrong[slot] if slot == 2 else 0
        fields = {"slot": slot, "sequence": 0, "first_token": first, "num_tokens": 1 + count}
        fields |= {"start": len(row) - 1 + moved, "first_sample": 0}
        slices.append(slice_of(**fields, moves=int(slot == 2), draws=int(slot != 1)))
        first += 1 + count
    ids = torch.full((first + 2,), -3, dtype=torch.int64, device=DEVICE)
    best = torch.zeros(5, dtype=torch.int64, device=DEVICE)
    draw_drafts(ints(slices), 32, 4180, kept, best, ids, low, low + more)
    expected, numbers = [], []
    for slot, (row, count) in enumerate(zip(rows, counts, strict=True)):
        drawn, number = [-3] * count, 99
        if slot != 1:
            drawn, number = drafts_of(row[-width:], count, low, low + more, predicted[slot])
        expected += [-3, *drawn]
        numbers.append(number)
    assert ids.tolist() == [*expected, -3, -3]
    assert kept.num_predicted.tolist() == numbers
    assert not best.any()


@settings(max_examples=examples(30), deadline=None)
@given(
    wrong=st.tuples(*[st.integers(0, 5)] * 3),
    moves=st.tuples(*[st.booleans()] * 3),
    counts=st.tuples(*[st.integers(1, 9)] * 3),
    num_groups=st.integers(1, 3),
    data=st.data(),
)
def test_slices_move_back_to_where_texts_end(wrong, moves, counts, num_groups, data):
    """They have a sample after each token, or fewer."""
    num_samples = [data.draw(st.integers(0, count)) for count in counts]
    starts = [data.draw(st.integers(number, 30)) for number in wrong]
    tables = torch.randint(1, 1000, (3, 12 * num_groups), dtype=torch.int32, device=DEVICE)
    order = data.draw(st.permutations(range(3)))
    slices, first = [], 1
    for place, slot in enumerate(order):
        fields = {"slot": slot, "sequence": place + 1, "first_token": first}
        fields |= {"num_tokens": counts[slot], "start": starts[slot], "first_sample": first + 2}
        fields |= {"num_samples": num_samples[slot], "sample_position": 50 + slot}
        slices.append(slice_of(**fields, moves=int(moves[slot])))
        first += counts[slot]
    num_wrong = ints(wrong)
    positions, lengths, samples = (ints([-1] * size) for size in (first + 1, 5, first + 3))
    for group in range(num_groups):
        mapping = torch.full((first + 1,), -1, dtype=torch.int64, device=DEVICE)
        move_back(
            *(ints(slices), 16, num_wrong, positions, lengths, samples, mapping, tables),
            *(group, num_groups, BLOCK_SIZE),
        )
        expected, ends, written, sampled = [-1], [-1], [-1], [-1, -1, -1]
        for slot in order:
            moved = wrong[slot] if moves[slot] else 0
            start = starts[slot] - moved
            sampled += [50 + slot - moved + place for place in range(num_samples[slot])]
            sampled += [-1] * (counts[slot] - num_samples[slot])
            expected += range(start, start + counts[slot])
            ends.append(start + counts[slot])
            for place in range(start, start + counts[slot]):
                block = int(tables[slot, place // BLOCK_SIZE * num_groups + group])
                written.append(block * BLOCK_SIZE + place % BLOCK_SIZE)
        assert positions.tolist() == [*expected, -1]
        assert lengths.tolist() == [*ends, -1]
        assert samples.tolist() == [*sampled, -1]
        assert mapping.tolist() == [*written, -1]


@settings(max_examples=examples(40), deadline=None)
@given(
    drafted=st.lists(
        st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), max_size=6), max_size=9
    ),
    padding=st.integers(0, 3),
    width=st.sampled_from([8, 64]),
)
def test_tokens_after_a_wrong_draft_are_not_kept(drafted, padding, width):
    """Each sequence has pairs of a draft and the token that is sampled in its place."""
    num_slots = len(drafted) + 1
    kept = texts_of([[5] * (3 + slot) for slot in range(num_slots)], [99] * num_slots, width)
    slots, positions, tokens, inputs = [], [], [], []
    expected = []
    for slot, pairs in enumerate(drafted):
        drafts = [draft for draft, _ in pairs]
        sampled = [token for _, token in pairs] + [1]
        slots += [slot] * len(sampled)
        positions += [3 + slot + place for place in range(len(sampled))]
        tokens += sampled
        inputs += [5, *drafts]
        right = num_right(drafts, sampled)
        expected.append((sampled[: right + 1], len(drafts) - right))
    slots, positions = slots + [-1] * padding, positions + [0] * padding
    tokens, inputs = tokens + [3] * padding, inputs + [3] * padding
    for _ in range(2):
        keep_tokens(kept, ints(slots), ints(positions), ints(tokens), ints(inputs).long())
        for slot, (added, num_wrong) in enumerate(expected):
            text = texts_of([[5] * (3 + slot) + added], [0], width)
            assert torch.equal(kept.tokens[slot], text.tokens[0])
            assert (kept.last_tokens[slot], kept.num_wrong[slot]) == (added[-1], num_wrong)
        assert kept.num_wrong[-1] == 99


def small_texts(monkeypatch: pytest.MonkeyPatch) -> device_texts.DeviceTexts:
    """Texts of two sequences that keep 16 tokens each."""
    monkeypatch.setattr(device_texts, "_WINDOW", 16)
    limits = StepLimits(
        max_num_seqs=2, max_num_batched_tokens=8, async_scheduling=True, match_lengths=(1, 2)
    )
    return device_texts.DeviceTexts(
        limits, 100, ints([0] * 3), ints([0] * 3), Transfer(DEVICE, None)
    )


@pytest.mark.parametrize("length", [3, 16, 17, 37])
def test_a_new_text_is_sent_as_tokens_are_kept(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = small_texts(monkeypatch)
    text = list(range(1, 50))
    predicted = list(range(100, 110))
    spec = SampleSpec(0, SamplingParams(), 0, length, length, text, 0, predicted)
    texts.admit([1], [spec])
    before = predicted[-room:] if (room := max(16 - length, 0)) else []
    kept = texts_of([text[:length]], [0], 16, [before]).tokens[0]
    inside = ints(sorted({place % 16 for place in range(-len(before), length)})).long()
    assert texts._texts.begins.tolist() == [0, -len(before), 0]
    assert torch.equal(texts._texts.tokens[1][inside], kept[inside])
    assert not texts._texts.tokens[[0, 2]].any()
    places = torch.arange(max(length - 16, 0), length, device=DEVICE)[None]
    assert texts.read(ints([1]).long(), places).tolist() == [text[:length][-16:]]


@pytest.mark.parametrize("end", [3, 12, 16, 20])
def test_a_reference_takes_the_place_of_a_prediction(
    end: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the room that a text of `end` tokens leaves, until the row gets another sequence."""
    texts = small_texts(monkeypatch)
    spec = SampleSpec(0, SamplingParams(), 0, 3, 3, [1, 2, 3], 0, [7, 8, 9, 1, 2])
    texts.admit([1], [spec])
    reference = [*range(100, 106)]
    texts.refer(1, reference, end)
    kept = reference[: max(16 - end, 0)]
    assert texts._texts.begins.tolist() == [0, -len(kept), 0]
    assert texts._texts.tokens[1, :3].tolist() == [1, 2, 3]
    assert texts._texts.tokens[1, 16 - len(kept) :].tolist() == kept
    texts.admit([1], [spec._replace(predicted_token_ids=[])])
    assert texts._texts.begins.tolist() == [0, 0, 0]


def test_bad_calls_are_refused() -> None:
    kept = texts_of([[1, 2], [3]], [0, 0])
    one = ints([[0] * len(FIELDS)])
    four, longs = ints([0] * 4), torch.zeros(4, dtype=torch.int64, device=DEVICE)
    tables = ints([[0], [0]])
    moving = (one, 4, four[:2], four, four, four, longs, tables, 0, 1, 4)
    drawing = (one, 4, 9, kept, longs, longs, 1, 3)
    keeping = (kept, four, four, four, longs)
    short = replace(kept, num_wrong=kept.num_wrong[:1])
    for call, good, name, place, bad in (
        (move_back, moving, "slices", 0, one[:, :5].contiguous()),
        (move_back, moving, "max_tokens", 1, 129),
        (move_back, moving, "num_wrong", 2, longs[:2]),
        (draw_drafts, drawing, "num_wrong", 3, short),
        (move_back, moving, "slot_mapping", 6, four),
        (move_back, moving, "block_tables", 7, tables[:1]),
        (move_back, moving, "group", 8, 1),
        (draw_drafts, drawing, "best", 4, longs[:0]),
        (draw_drafts, drawing, "input_ids", 5, four),
        (draw_drafts, drawing, "min_match", 6, 4),
        (keep_tokens, keeping, "slots", 1, longs),
        (keep_tokens, keeping, "inputs", 4, four),
        (keep_tokens, keeping, "tokens", 0, replace(kept, tokens=kept.tokens[:, :48].contiguous())),
        (keep_tokens, keeping, "last_tokens", 0, replace(kept, last_tokens=longs)),
    ):
        call(*good)
        with pytest.raises(ArgumentError) as refused:
            call(*[*good[:place], bad, *good[place + 1 :]])
        assert refused.value.name == name
    move_back(one[:0], *moving[1:])
    draw_drafts(one[:0], *drawing[1:])
    keep_tokens(kept, four[:0], four[:0], four[:0], longs[:0])
