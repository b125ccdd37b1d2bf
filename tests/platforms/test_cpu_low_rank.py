"""Products of adapters on the CPU against float64, and gated layers that begin with them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from platforms.test_linear import ACTIVATIONS, make
from torch import Tensor

from paged_backend.checkpoint.peft import LowRank
from paged_backend.checkpoint.shape import Activation
from paged_backend.models.linear import GatedMethod, LinearSpec
from paged_backend.models.step_context import SEGMENT_ROWS, AdapterRows
from paged_backend.platforms.base import Platform
from paged_backend.platforms.cpu.low_rank import CpuLowRank
from paged_backend.platforms.cpu.platform import CpuPlatform


def rows_of(slots: Sequence[int]) -> AdapterRows:
    rows = AdapterRows(len(slots) + 3, torch.device("cpu"))
    rows.write(np.array(slots, np.int32))
    return rows


def in_turns(outputs: Tensor, parts: int) -> Tensor:
    """Bring parts, one after the other, into the order of a gated layer."""
    return outputs.unflatten(1, (parts, -1, 16)).transpose(1, 2).reshape(outputs.shape)


@pytest.mark.parametrize(
    ("inputs", "sizes", "gated"),
    [
        (64, (64, 32, 32), False),
        (33, (20, 7, 150), False),
        (40, (1424,), False),
        (64, (96, 96), True),
    ],
)
def test_products(inputs: int, sizes: tuple[int, ...], gated: bool) -> None:
    torch.manual_seed(0)
    spec = LinearSpec(inputs, {f"{i}_proj": size for i, size in enumerate(sizes)}, gated=gated)
    product = CpuLowRank(spec, 5)
    adapters: list[list[LowRank | None]] = [
        [LowRank(torch.randn(inputs, rank), torch.randn(rank, size)) for size in sizes]
        for rank in (1, 4, 7, 16)
    ]
    adapters[1][0] = None
    for slot, parts in enumerate(adapters):
        product.set(slot, product.prepared(parts))
    slots = [0, 3, -1, 1, *[2] * (2 * SEGMENT_ROWS + 3), 1, 0, 4, -1]  # 4 is empty
    x, before = torch.randn(len(slots), inputs), torch.randn(len(slots), sum(sizes))
    wanted = torch.zeros(before.shape, dtype=torch.float64)
    for row, slot in enumerate(slots):
        if 0 <= slot < 4:
            for place, part in zip(wanted[row].split(sizes), adapters[slot], strict=True):
                if part is not None:
                    place += x[row].double() @ part.a.double() @ part.b.double()
    out = before.clone()
    product.add_to(out, x, rows_of(slots))
    wanted = before.double() + (in_turns(wanted, len(sizes)) if gated else wanted)
    torch.testing.assert_close(out.double(), wanted, atol=1e-4, rtol=1e-5)
    for row, slot in enumerate(slots):  # it does not depend on the other rows
        alone = before[row : row + 1].clone()
        product.add_to(alone, x[row : row + 1], rows_of([slot]))
        assert torch.equal(alone[0], out[row])
    product.set(3, [None] * len(sizes))
    product.add_to(before, x, rows_of([-1, 3, *[-1] * (len(slots) - 2)]))
    assert torch.equal(before[2], out[2]) and not torch.equal(before[1], out[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inputs", [64, 33])
def test_weights_of_16_bits_are_kept_and_give_the_bits_of_float32(
    dtype: torch.dtype, inputs: int
) -> None:
    torch.manual_seed(0)
    product = CpuLowRank(LinearSpec(inputs, {"q_proj": 150}), 2)
    weights = torch.randn(inputs, 7).to(dtype).float(), torch.randn(7, 150).to(dtype).float()
    weights[0][0, 0] = 2.0**-15  # a subnormal float16
    (small,) = product.prepared([LowRank(*weights)])
    assert small is not None and small.a.dtype == small.b.dtype == dtype
    product.set(0, [small])
    product.set(1, [LowRank(small.a.float(), small.b.float())])
    x, out = torch.randn(3, inputs), torch.zeros(2, 3, 150)
    for slot in range(2):
        product.add_to(out[slot], x, rows_of([slot] * 3))
    assert torch.equal(*out) and out.any()


def test_weights_that_16_bits_do_not_hold_stay_in_float32() -> None:
    product = CpuLowRank(LinearSpec(16, {"q_proj": 16}), 1)
    exact, inexact = torch.ones(16, 4), torch.ones(4, 16)
    inexact[3, 5] = 1 + 2.0**-20
    (weights,) = product.prepared([LowRank(exact, inexact)])
    assert weights is not None and weights.a.dtype == weights.b.dtype == torch.float32
    assert (weights.b == inexact[3, 5]).sum() == 1


def check_sums_of_a_gated_layer(platform: Platform, *, bias: bool) -> None:
    linear, _, _ = make(platform, 64, 192, bias=bias, gated=True)
    assert isinstance(linear, GatedMethod)
    for rows in (1, 17, 40):
        x, extra = torch.randn(rows, 64), torch.randn(rows, 192)
        plain = linear.gated(x, Activation.SILU)
        assert torch.equal(linear.gated(x, Activation.SILU, linear.initial_sums(rows)), plain)
        added = linear.gated(x, Activation.SILU, linear.initial_sums(rows) + in_turns(extra, 2))
        gate, up = (linear(x) + extra).chunk(2, dim=1)
        wanted = ACTIVATIONS[Activation.SILU](gate) * up
        step = 2.0**-8 if added.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(added.float(), wanted, atol=1e-4, rtol=step)


@pytest.mark.parametrize("bias", [False, True])
def test_a_gated_layer_begins_with_sums(bias: bool) -> None:
    check_sums_of_a_gated_layer(CpuPlatform(), bias=bias)
