"""Dense linear layers of a GPU: which products are ours, and that all are right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from paged_kernels import dense_table
from paged_kernels.dense_matmul import MAX_ROWS, dense_matmul, dense_matmul_silu_and_mul
from paged_kernels.dense_table import DenseEntry, max_rows, write_entries
from paged_kernels.silu_and_mul import silu_and_mul
from torch import Tensor

from paged_backend.checkpoint.shape import Activation
from paged_backend.models.linear import LinearSpec
from paged_backend.platforms.gpu import layers
from paged_backend.platforms.gpu.linear import DenseLinear

NAME, OUTPUTS, INPUTS = "a GPU", 140, 200
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    file = tmp_path / "table.json"
    file.write_text("[]")
    monkeypatch.setattr(dense_table, "_FILE", file)
    write_entries([DenseEntry(NAME, OUTPUTS, INPUTS, gated, 2) for gated in (True, False)], file)
    yield file
    dense_table._table.cache_clear()


def filled(
    device: torch.device, *, gated: bool = False, bias: bool = False, name: str = NAME
) -> tuple[DenseLinear, Tensor, Tensor | None]:
    """Return a layer of random numbers, its weight and its bias."""
    spec = LinearSpec(INPUTS, {"part": OUTPUTS}, bias=bias, gated=gated)
    layer = DenseLinear(spec, BF16, device, name)
    parameters = layer.parameters()
    for parameter in parameters.values():
        assert isinstance(parameter, Tensor)
        parameter.copy_(torch.randn(parameter.shape) / 10)
    layer.pack()
    weight, added = parameters["part.weight"], parameters.get("part.bias")
    assert isinstance(weight, Tensor) and (added is None or isinstance(added, Tensor))
    return layer, weight, added


def rows_of(count: int, device: torch.device) -> Tensor:
    return torch.randn(count, INPUTS).to(BF16).to(device)


@pytest.mark.parametrize("bias", [False, True])
def test_few_rows_are_multiplied_by_our_kernel(bias: bool, device: torch.device) -> None:
    layer, weight, added = filled(device, bias=bias)
    x = rows_of(2, device)
    assert torch.equal(layer(x), dense_matmul(x, weight, added))
    many = rows_of(3, device)
    assert torch.equal(layer(many), torch.nn.functional.linear(many, weight, added))
    torch.testing.assert_close(layer(many)[:2], layer(many[:2]), rtol=0.02, atol=0.02)


def test_the_activation_is_part_of_the_product(device: torch.device) -> None:
    layer, weight, _ = filled(device, gated=True)
    x, many = rows_of(2, device), rows_of(3, device)
    gated = layers.gated(layer, x, Activation.SILU)
    assert torch.equal(gated, dense_matmul_silu_and_mul(x, weight))
    separate = silu_and_mul(torch.nn.functional.linear(many, weight))
    assert torch.equal(layers.gated(layer, many, Activation.SILU), separate)
    torch.testing.assert_close(
        layers.gated(layer, many[:2], Activation.SILU), separate[:2], rtol=0.02, atol=0.02
    )
    # Another activation is applied to the product of torch.
    other = layers.gated(layer, x, Activation.GELU_TANH)
    assert other.shape == gated.shape and not torch.equal(other, gated)


def begun_anywhere(x: Tensor) -> Tensor:
    """The same rows in memory that does not begin at a multiple of 16 bytes."""
    return torch.cat((x.new_zeros(1), x.flatten()))[1:].view_as(x)


@pytest.mark.parametrize(
    "other",
    [
        lambda x: torch.cat((x, x), dim=1)[:, :INPUTS],
        lambda x: x.t().contiguous().t(),
        begun_anywhere,
    ],
)
def test_rows_of_any_layout_are_multiplied(
    other: Callable[[Tensor], Tensor], device: torch.device
) -> None:
    layer, weight, _ = filled(device)
    x = other(rows_of(2, device))
    expected = x.double() @ weight.double().t()
    torch.testing.assert_close(layer(x).double(), expected, rtol=0.02, atol=0.02)


def test_what_was_not_measured_is_left_to_torch(device: torch.device) -> None:
    layer, weight, _ = filled(device, name="another GPU")
    assert layer(rows_of(0, device)).shape == (0, OUTPUTS)
    x = rows_of(1, device)
    assert torch.equal(layer(x), torch.nn.functional.linear(x, weight))
    assert max_rows(NAME, OUTPUTS + 1, INPUTS, gated=False) == 0


def test_new_entries_replace_those_of_the_same_shape(table: Path) -> None:
    write_entries([DenseEntry(NAME, OUTPUTS, INPUTS, True, 16)], table)
    assert max_rows(NAME, OUTPUTS, INPUTS, gated=True) == 16
    assert max_rows(NAME, OUTPUTS, INPUTS, gated=False) == 2


def test_the_table_of_the_repository_is_within_the_kernels_limits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    entries = dense_table._read(dense_table._FILE)
    assert entries and all(0 <= entry.max_rows <= MAX_ROWS for entry in entries)
