"""Flat arrays of a plan, and the buffers that hold them on a device, against plain loops."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_backend.core.scheduled_batch import SampleSpec, ScheduledBatch, ScheduledSequence
from paged_backend.platforms.gpu.attention import _independent_runs
from paged_backend.platforms.gpu.batch import BlockTables, Rows, Staging
from paged_backend.platforms.gpu.cuda_graphs import (
    StepGraphs,
    StepShape,
    captured_shapes,
    decode_sizes,
)
from paged_backend.platforms.gpu.idle_batches import IdleBatches
from paged_backend.platforms.gpu.transfer import Arrival, Transfer
from paged_backend.platforms.input_batch import InputBatchBuilder, block_tables
from paged_backend.values.options.scheduling import StepLimits
from paged_backend.values.sampling_params import SamplingParams

CPU = torch.device("cpu")
BLOCK_SIZE = 8


def make_plan(
    slices: list[tuple[int, int, int]], seed: int = 0, num_groups: int = 1
) -> ScheduledBatch:
    """One sequence for each (first position, number of tokens, number of samples)."""
    rng = np.random.default_rng(seed)
    scheduled = []
    for seq_id, (start, count, num_samples) in enumerate(slices):
        tokens = rng.integers(0, 100, count).tolist()
        num_blocks = -(-(start + count) // BLOCK_SIZE) * num_groups
        blocks = rng.permutation(1000)[:num_blocks].tolist()
        spec = SampleSpec(seq_id, SamplingParams(), 0, start + count, 1, tokens)
        scheduled.append(ScheduledSequence(seq_id, tokens, start, blocks, (spec,) * num_samples))
    return ScheduledBatch.of(scheduled)


slices = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 40), st.integers(0, 2)), min_size=1, max_size=6
)


@settings(max_examples=examples(100), deadline=None)
@given(slices, st.integers(1, 3))
def test_flat_arrays_of_a_plan(slices, num_groups):
    plan = make_plan(slices, num_groups=num_groups)
    batch = InputBatchBuilder(BLOCK_SIZE, num_groups).build(plan)
    tokens, positions, slots, starts, lasts = [], [], [], [0], []
    for item in plan.scheduled:
        for offset, token in enumerate(item.token_ids):
            position = item.start + offset
            tokens.append(token)
            positions.append(position)
            first = position // BLOCK_SIZE * num_groups
            blocks = item.block_ids[first : first + num_groups]
            slots.append([block * BLOCK_SIZE + position % BLOCK_SIZE for block in blocks])
        starts.append(len(tokens))
        lasts += [len(tokens) - 1] * len(item.samples)
    assert batch.input_ids.tolist() == tokens
    assert batch.positions.tolist() == positions
    assert batch.slot_mappings.T.tolist() == slots
    assert batch.slot_mappings.flags.c_contiguous
    assert batch.query_start_loc.tolist() == starts
    assert batch.logits_indices.tolist() == lasts
    assert batch.seq_lens.tolist() == [start + count for start, count, _ in slices]
    leading = next((i for i, (_, count, _) in enumerate(slices) if count != 1), len(slices))
    assert batch.num_decodes == leading
    dtypes = {"positions": np.int32, "query_start_loc": np.int32, "seq_lens": np.int32}
    for name in ("input_ids", "slot_mappings", "logits_indices", *dtypes):
        assert getattr(batch, name).dtype == dtypes.get(name, np.int64), name


def test_block_tables_are_padded_with_the_null_block():
    plan = make_plan([(0, 9, 1), (0, 30, 1)])
    first, second = (item.block_ids for item in plan.scheduled)
    assert block_tables(plan).tolist() == [[first + [0, 0], second]]


def test_block_tables_of_groups_are_separate():
    tables = block_tables(step(([1, 2, 3, 4], 0), ([5, 6], 0)), 2)
    assert tables.tolist() == [[[1, 3], [5, 0]], [[2, 4], [6, 0]]]
    assert tables.flags.c_contiguous
    on_device = BlockTables(3, 2, 2, Transfer(CPU, gpu=None))
    on_device.update(step(([1, 2, 3, 4], 0), ([5, 6], 0)), np.array([2, 0]))
    selected = on_device.select(torch.tensor([2, 0]))
    assert [table[:, :2].tolist() for table in selected] == tables.tolist()
    assert all(table.is_contiguous() and table.data_ptr() % 16 == 0 for table in selected)


def step(*tables: tuple[list[int], int]) -> ScheduledBatch:
    """One sequence for each block table, whose blocks are new from that index on."""
    return ScheduledBatch.of(
        [
            ScheduledSequence(i, [0], 0, ids, (), first_new_block=first)
            for i, (ids, first) in enumerate(tables)
        ]
    )


class WatchedTransfer(Transfer):
    """Notes what is sent."""

    def __init__(self) -> None:
        super().__init__(CPU, gpu=None)
        self.sent: list[list[int]] = []

    def send(self, values):
        self.sent.append(values.tolist())
        return super().send(values)


def test_block_tables_on_a_device_take_only_what_is_new():
    transfer = WatchedTransfer()
    tables, sent = BlockTables(4, 5, 1, transfer), transfer.sent
    tables.update(step(([7, 8], 0), ([9], 0)), np.array([2, 0]))
    assert tables.tensor.tolist()[0] == [9, 0, 0, 0, 0]
    assert tables.tensor.tolist()[2] == [7, 8, 0, 0, 0]
    tables.update(step(([7, 8, 3], 2), ([9], 1)), np.array([2, 0]))
    assert sent[2:] == [[12], [3]]  # the place in the whole table, the block
    tables.update(step(([7, 8, 3], 3), ([9], 1)), np.array([2, 0]))
    assert len(sent) == 4
    tables.update(step(([7, 8, 6], 2), ([9, 4], 1)), np.array([2, 0]))  # copy-on-write
    assert tables.tensor.tolist()[2] == [7, 8, 6, 0, 0]
    assert tables.tensor.tolist()[0] == [9, 4, 0, 0, 0]
    tables.update(step(([1], 0)), np.array([2]))  # another sequence
    assert tables.tensor[2, 0] == 1


def test_rows_are_given_back_and_the_last_is_never_given():
    rows = Rows(2)
    assert sorted([rows[10], rows[11]]) == [0, 1]
    assert rows[10] == rows[10]
    with pytest.raises(IndexError):
        rows[12]
    gone = rows[11]
    rows.release([11, 99])
    assert rows[12] == gone
    assert rows.padding == 2


def test_staged_parts_stay_where_they_are():
    staging = Staging({"a": (torch.int32, 5), "b": (torch.int64, 3)}, Transfer(CPU, gpu=None))
    b = staging.part("b", 2)
    for turn in range(3):
        a = np.arange(turn, turn + 4, dtype=np.int32)
        staging.send({"a": a, "b": np.array([2**40 + turn, -1])})
        assert staging.part("a", 4).tolist() == a.tolist()
        assert b.tolist() == [2**40 + turn, -1]
    assert staging.part("b", 3).data_ptr() == b.data_ptr()
    assert b.data_ptr() % 16 == 0


def test_arrivals_are_copies():
    values = torch.tensor([3, 4], dtype=torch.int32)
    arrival = Transfer(CPU, gpu=None).receive(values)
    values.zero_()
    assert arrival.wait() == [3, 4]


def test_arrivals_wait_for_the_work_launched_before_them():
    calls = []

    class Event:
        def record(self):
            calls.append("record")

        def synchronize(self):
            calls.append("synchronize")

    event = Transfer(CPU, SimpleNamespace(new_event=Event)).record()
    assert calls == ["record"]
    assert Arrival(torch.tensor([3]), event).wait() == [3]
    assert calls == ["record", "synchronize"]


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=8))
def test_copies_in_runs_do_what_they_do_one_by_one(pairs):
    one_by_one = list(range(7))
    for source, target in pairs:
        one_by_one[target] = one_by_one[source]
    at_once = list(range(7))
    for run in _independent_runs(pairs):
        before = list(at_once)
        assert len({target for _, target in run}) == len(run)
        for source, target in run:
            at_once[target] = before[source]
    assert at_once == one_by_one


@pytest.mark.parametrize("most", [1, 3, 64, 256, 300, 4096])
def test_captured_sizes(most):
    sizes = decode_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == most


def limits(max_num_seqs: int, max_num_batched_tokens: int, max_num_drafts: int = 0) -> StepLimits:
    return StepLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        async_scheduling=True,
        max_num_drafts=max_num_drafts,
    )


def test_a_step_is_padded_to_the_next_captured_shape():
    captured: list[StepShape] = []
    graphs = StepGraphs(
        captured_shapes(limits(20, 140)),
        lambda shape: captured.append(shape) or (lambda: torch.tensor(shape.num_tokens)),
    )
    assert [shape.num_tokens for shape in captured][:4] == [148, 136, 128, 84]  # largest first
    assert captured[-6:] == [StepShape.decodes(size) for size in (20, 16, 8, 4, 2, 1)]
    assert graphs.fit(StepShape.decodes(3)) == StepShape.decodes(4)
    assert graphs.fit(StepShape.decodes(20)) == StepShape.decodes(20)
    one_prompt, two_answers = StepShape(50, 1, 1, 0), StepShape(50, 1, 2, 0)
    assert graphs.fit(one_prompt) == graphs.fit(two_answers) == StepShape.mixed(0, 64)
    assert graphs.fit(StepShape(65, 1, 0, 0)) == StepShape.mixed(0, 128)
    assert graphs.fit(StepShape(7, 4, 4, 3)) == StepShape.mixed(8, 64)
    assert graphs.fit(StepShape(73, 11, 11, 9)) == StepShape.mixed(20, 64)
    assert graphs.fit(StepShape(129, 1, 1, 0)) is None  # too many tokens
    assert graphs.fit(StepShape(40, 9, 9, 0)) is None  # too many prompts
    assert graphs.fit(StepShape(8, 1, 1, 0, 7)) is None  # logits of a prompt
    assert graphs.replay(StepShape.mixed(0, 64)) == 64


def test_a_step_with_drafts_is_padded_to_a_shape_with_as_many_samples():
    shapes = captured_shapes(limits(20, 140, max_num_drafts=64))
    graphs = StepGraphs(shapes, lambda shape: lambda: torch.tensor(shape.num_tokens))
    assert graphs.fit(StepShape(17, 1, 17, 0)) == StepShape.drafted(0, 64)
    assert graphs.fit(StepShape(5, 1, 5, 0)) == StepShape.drafted(0, 16)
    three_with_drafts_beside_six = StepShape(6 + 15, 9, 21, 6)
    assert graphs.fit(three_with_drafts_beside_six) == StepShape.drafted(8, 16)
    assert graphs.fit(StepShape(65, 5, 65, 0)) == StepShape.drafted(0, 128)
    assert graphs.fit(StepShape(129, 9, 129, 0)) is None  # run without a graph


@pytest.mark.parametrize("most", [1, 4, 20, 64, 256])
def test_there_is_a_graph_for_each_step_of_drafts(most):
    room = limits(most, 8192, max_num_drafts=max(most, 64))
    graphs = StepGraphs(captured_shapes(room), lambda shape: lambda: torch.tensor(0))
    for num_decodes in range(most):
        others = most - num_decodes
        for num_drafted in {1, others // 2, others} - {0}:
            for num_drafts in {num_drafted, room.max_num_drafts}:
                num_rows = num_decodes + num_drafted + num_drafts
                step = StepShape(num_rows, num_decodes + num_drafted, num_rows, num_decodes)
                assert graphs.fit(step) is not None


def test_a_warm_up_has_all_kinds_of_products():
    """cuBLAS has several kernels for 512 to 2,048 rows, and loads each when it first runs."""
    idle = IdleBatches(limits(8, 1600), 4096, 16, 1, 100, makes_embeddings=False)
    sizes = list(idle.sizes())
    prompts = [num_tokens for num_tokens, num_seqs in sizes if num_seqs == 1 and num_tokens > 9]
    assert prompts == [16, 32, 64, 128, 256, 512, 640, 768, 896, 1024, 1280, 1536]
    for num_tokens, num_seqs in sizes:
        batch = idle.spread(num_tokens, num_seqs)
        assert sum(len(item.token_ids) for item in batch.scheduled) == num_tokens


def test_the_number_of_captured_shapes():
    for max_num_seqs, number in ((8, 4 + 8), (64, 8 + 16), (256, 20 + 24)):
        assert len(captured_shapes(limits(max_num_seqs, 8192))) == number
    assert len(captured_shapes(limits(256, 8192, max_num_drafts=256))) == 44 + 47
