"""Products of low rank for rows with different slots, compared with float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from matmul_checks import ROUNDING, SUM_ERROR, between_nans, ordered_dot
from paged_kernels.errors import ArgumentError
from paged_kernels.low_rank import expand, shrink
from paged_kernels.reference.low_rank import low_rank
from paged_kernels.tuning.low_rank import low_rank_config, shrink_splits
from torch import Tensor

NONE = -1


@dataclass(frozen=True)
class Products:
    """Arguments of `shrink` and `expand`, and the output to add to."""

    x: Tensor
    a: Tensor
    b: Tensor
    ranks: Tensor
    slots: Tensor
    out: Tensor
    sizes: tuple[int, ...]

    def add(self) -> Tensor:
        """Return the output with the products of the kernels."""
        out = between_nans(self.out)
        sums = shrink(self.x, self.a, self.ranks, self.slots)
        expand(out, sums, self.b, self.ranks, self.slots, self.sizes)
        return out

    def rows(self, first: int, last: int) -> Products:
        """Return the same for some rows."""
        parts = {name: getattr(self, name)[first:last].clone() for name in ("x", "slots", "out")}
        return replace(self, **parts)

    def confirm(self, found: Tensor) -> None:
        """Compare an output with the reference."""
        weights = self.ranks, self.slots, self.sizes
        expected = self.out.double() + low_rank(self.x, self.a, self.b, *weights)
        size = low_rank(self.x.abs(), self.a.abs(), self.b.abs(), *weights)
        # Sums have 16 bits where the weights have 16.
        exact = found.dtype == torch.float32
        of_sums = (
            SUM_ERROR if exact else {torch.float16: 2**-21, torch.bfloat16: 2**-16}[found.dtype]
        )
        allowed = ROUNDING[found.dtype] * expected.abs() + (SUM_ERROR + of_sums) * size + 1e-7
        error = (found.double() - expected).abs()
        assert bool((error <= allowed).all()), f"{(error / allowed).max():.3g} times the tolerance"


def products(
    slots: list[int],
    width: int,
    sizes: tuple[int, ...],
    max_rank: int,
    dtype: torch.dtype,
    device: torch.device,
    num_slots: int = 4,
) -> Products:
    """Random arguments; the lines of `a` beyond a rank are NaN."""
    ranks = torch.randint(1, max_rank + 1, (num_slots, len(sizes)), dtype=torch.int32)
    ranks[0, 0] = max_rank
    ranks[1, -1] = 0
    a = torch.randn(num_slots, len(sizes), max_rank, width) * width**-0.5
    b = torch.randn(num_slots, sum(sizes), max_rank) * max_rank**-0.5
    line = torch.arange(max_rank)
    a[line >= ranks[..., None]] = torch.nan
    by_feature = ranks.repeat_interleave(torch.tensor(sizes), 1)
    b[line >= by_feature[..., None]] = 0
    tensors: dict[str, Any] = {
        "x": torch.randn(len(slots), width),
        "a": a,
        "b": b,
        "out": torch.randn(len(slots), sum(sizes)),
    }
    placed = {name: between_nans(tensor.to(device, dtype)) for name, tensor in tensors.items()}
    return Products(
        **placed,
        ranks=between_nans(ranks.to(device)),
        slots=between_nans(torch.tensor(slots, dtype=torch.int32, device=device)),
        sizes=sizes,
    )


# One row, neighbors with one slot, a slot for each row, and several tiles with odd sizes.
CASES: list[tuple[list[int], int, tuple[int, ...], int]] = [
    ([2], 1, (1,), 16),
    ([0, 0, NONE, 1, 3, 3], 70, (40, 33, 33), 16),
    ([i % 5 - 1 for i in range(19)], 600, (130, 2), 32),
    ([1] * 9 + [3] * 12, 1100, (200,), 64),
]


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("case", CASES)
def test_equals_the_reference(
    case: tuple[list[int], int, tuple[int, ...], int], dtype: torch.dtype, device: torch.device
) -> None:
    work = products(*case, dtype, device)
    found = work.add()
    work.confirm(found)
    none = work.slots < 0
    assert torch.equal(found[none], work.out[none])


@pytest.mark.parametrize("rows", [70, 1030])
def test_many_rows_equal_the_reference(rows: int, device: torch.device) -> None:
    """Tiles with one slot, with several, and with none."""
    slots = [0] * 16 + [i % 5 - 1 for i in range(16)] + [2] * 20
    work = products((slots + [NONE] * rows)[:rows], 600, (40, 20), 16, torch.float32, device)
    work.confirm(work.add())


@pytest.mark.sampled
@pytest.mark.parametrize("max_rank", [16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_other_rows(
    dtype: torch.dtype, max_rank: int, device: torch.device
) -> None:
    assert shrink_splits(1100)[0] == 3
    configs = [low_rank_config(rows, max_rank, dtype.itemsize) for rows in (70, 1030)]
    assert [config.split for config in configs] == [True, False]
    slots = [0] * 10 + [i % 4 for i in range(25)] + [NONE] * 995
    work = products(slots, 1100, (30, 20), max_rank, dtype, device)
    with ordered_dot():
        whole = work.add()
        for first, last in ((0, 1), (3, 20), (0, 70), (34, 35)):
            assert torch.equal(work.rows(first, last).add(), whole[first:last]), (first, last)


def test_other_slots_of_the_same_launch(device: torch.device) -> None:
    """As in a graph: only the contents of the tensors change between two replays."""
    work = products([0, 1, NONE, 2], 70, (40,), 16, torch.float32, device)
    work.confirm(work.add())
    work.slots.copy_(torch.tensor([NONE, 3, 3, 1], dtype=torch.int32))
    work.confirm(work.add())
    work.slots.fill_(NONE)
    assert torch.equal(work.add(), work.out)


def test_more_slots_than_programs_of_a_tile(device: torch.device) -> None:
    slots = [0, 16, 32, 17, 1, 33]
    work = products(slots, 40, (20,), 16, torch.float32, device, num_slots=34)
    work.confirm(work.add())


@pytest.mark.parametrize("name", ["a", "b", "slots"])
def test_a_wrong_number_is_noticed(name: str, device: torch.device) -> None:
    work = products([0, 1, 2], 70, (40, 30), 16, torch.bfloat16, device)
    found = work.add()
    work.confirm(found)
    changed = getattr(work, name).clone()
    if name == "slots":
        changed[1] = 3
    else:
        changed.view(len(changed), -1)[0, 0] += 1
    with pytest.raises(AssertionError):
        replace(work, **{name: changed}).confirm(found)


def test_no_rows(device: torch.device) -> None:
    work = products([1], 70, (40,), 16, torch.float32, device).rows(0, 0)
    assert work.add().shape == (0, 40)


def test_bad_calls_name_the_argument(device: torch.device) -> None:
    work = products([0, 1, 2], 64, (40, 24), 16, torch.float32, device)
    sums = shrink(work.x, work.a, work.ranks, work.slots)
    shrunk: dict[str, Any] = {name: getattr(work, name) for name in ("x", "a", "ranks", "slots")}
    bad: list[tuple[str, Any]] = [
        ("x", work.x[0]),
        ("x", work.x.long()),
        ("x", work.x[:, :0].contiguous()),
        ("a", work.a.half()),
        ("a", work.a[..., :32]),
        ("a", work.a[:, :, :8].contiguous()),
        ("ranks", work.ranks[:2]),
        ("ranks", work.ranks.long()),
        ("slots", work.slots[:2].clone()),
        ("slots", work.slots.long()),
    ]
    for name, value in bad:
        with pytest.raises(ArgumentError, match=f"^{name} "):
            shrink(**shrunk | {name: value})
    expanded: dict[str, Any] = {
        name: getattr(work, name) for name in ("out", "b", "ranks", "slots", "sizes")
    }
    bad = [
        ("out", work.out[0]),
        ("out", work.out.long()),
        ("sums", sums[:, :2].contiguous()),
        ("sums", sums.half()),
        ("sums", sums[..., :8].contiguous()),
        ("b", work.b.half()),
        ("b", work.b[:, :32].contiguous()),
        ("ranks", work.ranks[:, :1].contiguous()),
        ("slots", work.slots[:1].clone()),
        ("sizes", (64,)),
        ("sizes", (40, 25)),
        ("sizes", (64, 0)),
    ]
    for name, value in bad:
        with pytest.raises(ArgumentError, match=f"^{name} "):
            expand(**{"sums": sums, **expanded, name: value})
