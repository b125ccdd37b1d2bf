"""int8 products on the CPU: exact sums, for all instructions that this CPU has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from platforms.amx_emulation import amx_or_emulation
from torch import Tensor

from paged_backend.platforms.cpu import int8_kernels
from paged_backend.platforms.cpu.int8_kernels import Instructions
from paged_backend.platforms.cpu.int8_linear import CpuInt8Linear
from paged_backend.platforms.portable.int8_linear import TorchInt8Linear, quantize_rows
from paged_backend.quantization.weight import QuantizedWeight


@pytest.fixture(scope="module", params=["AMX", "VNNI", "AVX2"])
def kind(request: pytest.FixtureRequest) -> Iterator[Instructions]:
    chosen: Instructions = getattr(int8_kernels, request.param)
    supported = int8_kernels.supported_instructions()
    needed = int8_kernels.VNNI if request.param == "AMX" else chosen  # AMX has it for few rows
    if needed not in supported:
        pytest.skip(f"needs a CPU with {request.param}")
    with amx_or_emulation() if request.param == "AMX" else nullcontext():
        yield chosen


def layers(
    inputs: int, outputs: int, kind: Instructions, *, bias: bool = False
) -> tuple[CpuInt8Linear, TorchInt8Linear]:
    generator = torch.Generator().manual_seed(0)
    values = torch.empty(outputs, inputs, dtype=torch.int8).random_(-128, 128, generator=generator)
    scales = torch.empty(outputs, 1).uniform_(0.001, 0.1, generator=generator)
    weight = QuantizedWeight(values, scales, (1, inputs))
    biases = torch.randn(outputs, generator=generator) if bias else None
    return CpuInt8Linear(weight, biases, kind), TorchInt8Linear(weight, biases, torch.float32)


def integers(linear: TorchInt8Linear, x: Tensor) -> Tensor:
    """The product by an emulation with exact sums: they are integers below 2^53, in float64."""
    largest = x.double().abs().amax(1, keepdim=True)
    factor = torch.where(largest == 0, 0.0, (127 / largest).float().double())
    rounded = (x.double() * factor).round()
    sums = rounded @ linear._weight.double().T
    return sums.float() * ((largest / 127).float() * linear._scales)


@pytest.mark.parametrize(("inputs", "outputs"), [(8, 16), (33, 40), (512, 200), (1409, 97)])
def test_products_equal_an_emulation_in_int64(
    kind: Instructions, inputs: int, outputs: int
) -> None:
    linear, reference = layers(inputs, outputs, kind)
    for rows in (0, 1, 2, 7, 8, 16, 17, 33, 100):
        x = torch.randn(rows, inputs)
        x[rows // 2 :] *= 1e-3
        assert torch.equal(linear(x), integers(reference, x))
        assert torch.equal(reference(x), linear(x))


def test_biases_and_sums(kind: Instructions) -> None:
    linear, reference = layers(70, 53, kind, bias=True)
    x, residual = torch.randn(19, 70), torch.randn(19, 53)
    torch.testing.assert_close(linear(x), reference(x))
    total = residual.clone()
    linear.add_to(total, x)
    torch.testing.assert_close(total, residual + reference(x))
    linear, reference = layers(70, 53, kind)
    total = residual.clone()
    linear.add_to(total, x)
    torch.testing.assert_close(total, residual + reference(x))


def test_scaled_sums_are_the_product(kind: Instructions) -> None:
    linear, reference = layers(70, 53, kind, bias=True)
    x = torch.randn(19, 70)
    for rows in (1, 19):
        sums, peaks = linear.sums(x[:rows]), x[:rows].abs().amax(1)
        assert torch.equal(sums, reference.sums(x[:rows]))
        assert torch.equal(linear.scaled(sums, peaks, linear._bias), linear(x[:rows]))


def test_a_row_does_not_depend_on_its_batch(kind: Instructions) -> None:
    linear, _ = layers(576, 200, kind)
    x, residual = torch.randn(70, 576), torch.randn(70, 200)
    together, added = linear(x), residual.clone()
    linear.add_to(added, x)
    for rows in range(1, 70, 3):
        assert torch.equal(linear(x[-rows:]), together[-rows:])
        part = residual[-rows:].clone()
        linear.add_to(part, x[-rows:])
        assert torch.equal(part, added[-rows:])


def test_extreme_rows(kind: Instructions) -> None:
    linear, reference = layers(130, 20, kind)
    x = torch.zeros(6, 130)
    x[1], x[2], x[3, 0], x[4] = 3e38, -1e-38, 1.0, torch.arange(130) - 64.5
    assert torch.equal(linear(x), reference(x))
    assert not linear(x)[0].any()


def test_rows_of_the_weight(kind: Instructions) -> None:
    linear, reference = layers(20, 37, kind)
    index = torch.tensor([36, 0, 15, 16, 36])
    assert torch.equal(linear.rows(index), reference.rows(index))


def test_ties_go_to_the_even_number() -> None:
    values, _ = quantize_rows(torch.tensor([[127.0, 0.5, 1.5, -2.5, 2.4999998]]))
    assert values.tolist() == [[127, 0, 2, -2, 2]]
