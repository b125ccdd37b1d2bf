"""Experts with int8 weights on the CPU, for all instructions that this CPU has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from platforms.amx_emulation import amx_or_emulation
from torch import Tensor

from paged_backend.checkpoint.moe import SwiGLU
from paged_backend.models.experts import ExpertsSpec
from paged_backend.platforms.cpu import int8_kernels, layers
from paged_backend.platforms.cpu.arena import Arena
from paged_backend.platforms.cpu.graphs import capture
from paged_backend.platforms.cpu.int8_experts import Int8Experts, product_experts
from paged_backend.platforms.cpu.int8_kernels import MANY_ROWS, Instructions
from paged_backend.platforms.cpu.int8_linear import CpuInt8Linear
from paged_backend.platforms.portable.product_experts import ProductExperts
from paged_backend.quantization.weight import QuantizedWeight

GPT_OSS = SwiGLU(alpha=1.702, limit=0.5, up_offset=1.0)
NO_EXPERT = 4


@pytest.fixture(scope="module", params=["AMX", "VNNI", "AVX2"])
def kind(request: pytest.FixtureRequest) -> Iterator[Instructions]:
    chosen: Instructions = getattr(int8_kernels, request.param)
    needed = int8_kernels.VNNI if request.param == "AMX" else chosen  # AMX has it for few rows
    if needed not in int8_kernels.supported_instructions():
        pytest.skip(f"needs a CPU with {request.param}")
    with amx_or_emulation() if request.param == "AMX" else nullcontext():
        yield chosen


def product(outputs: int, inputs: int, kind: Instructions, *, bias: bool) -> CpuInt8Linear:
    values = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
    scales = torch.empty(outputs, 1).uniform_(0.0001, 0.003)
    weight = QuantizedWeight(values, scales, (1, inputs))
    return CpuInt8Linear(weight, torch.randn(outputs) / 10 if bias else None, kind)


def make(spec: ExpertsSpec, kind: Instructions) -> tuple[Int8Experts, ProductExperts]:
    """The experts, and those that compute the same products one by one."""
    torch.manual_seed(0)
    inner, hidden = spec.intermediate_size, spec.hidden_size
    columns = inner if spec.plain else 2 * inner
    pairs = [
        (
            product(columns, hidden, kind, bias=spec.bias),
            product(hidden, inner, kind, bias=spec.bias),
        )
        for _ in range(spec.num_experts)
    ]
    experts = product_experts(spec, pairs)
    assert isinstance(experts, Int8Experts)
    return experts, ProductExperts(spec, pairs, activate=layers.activate)


def choose(rows: int, spec: ExpertsSpec, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random rows, with random experts and weights; some rows are much smaller than others."""
    ids = torch.rand(rows, spec.num_experts).argsort(dim=1)[:, :top_k]
    x = torch.randn(rows, spec.hidden_size)
    x[rows // 2 :] *= 1e-2
    return x, ids.int(), torch.rand(rows, top_k)


# (experts, top_k, hidden, intermediate): whole tiles and panels, and other sizes; all experts.
@pytest.mark.parametrize("sizes", [(8, 2, 64, 32), (3, 3, 130, 50), (4, 1, 33, 75)])
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_the_products_one_by_one(
    kind: Instructions, bias: bool, plain: bool, sizes: tuple[int, ...]
) -> None:
    num_experts, top_k, hidden, inner = sizes
    activation = GPT_OSS if bias else SwiGLU()
    spec = ExpertsSpec(num_experts, hidden, inner, activation, bias, plain=plain)
    experts, reference = make(spec, kind)
    for rows in (0, 1, 3, 40):
        call = choose(rows, spec, top_k)
        out = experts(*call)
        assert out.shape == (rows, hidden)
        assert torch.equal(out, reference(*call))


def test_a_row_does_not_depend_on_its_batch(kind: Instructions) -> None:
    spec = ExpertsSpec(4, 70, 45, GPT_OSS, bias=True)
    experts, _ = make(spec, kind)
    x, ids, factors = choose(40, spec, 2)
    assert int(ids.flatten().bincount().min()) >= MANY_ROWS
    together = experts(x, ids, factors)
    for size in (1, 5):
        for first in range(0, 40, size):
            part = slice(first, first + size)
            assert torch.equal(experts(x[part], ids[part], factors[part]), together[part])


def test_all_rows_choose_one_expert(kind: Instructions) -> None:
    """More rows than a block has."""
    spec = ExpertsSpec(3, 40, 24)
    experts, reference = make(spec, kind)
    x, ids, factors = choose(2 * int8_kernels.BLOCK + 5, spec, 1)
    ids.fill_(2)
    assert torch.equal(experts(x, ids, factors), reference(x, ids, factors))


def test_experts_of_other_ranks_count_as_zeros(kind: Instructions) -> None:
    spec = ExpertsSpec(NO_EXPERT, 40, 24, first=8)
    experts, reference = make(spec, kind)
    x, ids, factors = choose(40, spec, 2)
    ids[::2, 1] = NO_EXPERT
    ids[5] = NO_EXPERT
    out = experts(x, ids, factors)
    assert torch.equal(out, reference(x, ids, factors))
    assert not out[5].any() and out[4].any()


@torch.inference_mode()
def test_a_graph_computes_other_experts_and_other_numbers_of_rows(kind: Instructions) -> None:
    spec = ExpertsSpec(5, 64, 32)
    experts, reference = make(spec, kind)
    call = choose(40, spec, 2)
    _, graph = capture(lambda: experts(*call), Arena(2**20))
    assert graph is not None
    for alike in (0, 3, 35):
        for place, value in zip(call, choose(40, spec, 2), strict=True):
            place.copy_(value)
        call[1][:alike] = torch.tensor([4, 1], dtype=torch.int32)
        assert torch.equal(graph.replay(), reference(*call))
