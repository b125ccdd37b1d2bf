"""Linear layers, before and after packing, against float64."""

from __future__ import annotations

import pytest
import torch

from paged_backend.models.linear import Linear

CPU = torch.device("cpu")


def make(inputs: int, outputs: int, bias: bool, dtype: torch.dtype = torch.float32) -> Linear:
    torch.manual_seed(0)
    linear = Linear(inputs, outputs, bias=bias, dtype=dtype, device=CPU)
    linear.weight.normal_()
    if linear.bias is not None:
        linear.bias.normal_()
    return linear


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(8, 16), (33, 40), (512, 1000), (1409, 257)])
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 16, 100, 300])
def test_product(rows: int, inputs: int, outputs: int, bias: bool) -> None:
    linear = make(inputs, outputs, bias)
    weight = linear.weight.double()
    x = torch.randn(rows, inputs)
    wanted = x.double() @ weight.t()
    if linear.bias is not None:
        wanted += linear.bias.double()
    residual = torch.randn(rows, outputs)
    for packed in (False, True):
        if packed:
            linear.pack()
        torch.testing.assert_close(linear(x).double(), wanted, atol=2e-4, rtol=1e-5)
        total = residual.clone()
        linear.add_to(total, x)
        torch.testing.assert_close(total.double(), residual.double() + wanted, atol=2e-4, rtol=1e-5)


def test_inputs_need_not_be_contiguous() -> None:
    linear = make(24, 32, bias=False)
    weight = linear.weight.double()
    linear.pack()
    x = torch.randn(10, 48)[::2, ::2]
    torch.testing.assert_close(linear(x).double(), x.double() @ weight.t(), atol=1e-4, rtol=1e-5)
    wide = torch.zeros(5, 64)
    linear.add_to(wide[:, :32], x)
    torch.testing.assert_close(wide[:, :32], linear(x))
    assert not wide[:, 32:].any()


def test_a_row_does_not_depend_on_its_batch() -> None:
    linear = make(576, 200, bias=True)
    linear.pack()
    x = torch.randn(500, 576)
    together = linear(x)
    for rows in (1, 2, 3, 5, 16, 33):
        assert torch.equal(linear(x[:rows]), together[:rows])
        assert torch.equal(linear(x[-rows:]), together[-rows:])


def test_rows_of_the_weight() -> None:
    linear = make(20, 37, bias=False)
    index = torch.tensor([36, 0, 15, 16, 36])
    wanted = linear.weight[index]
    assert torch.equal(linear.rows(index), wanted)
    linear.pack()
    assert torch.equal(linear.rows(index), wanted)


def test_packing_frees_the_plain_weight() -> None:
    linear = make(20, 37, bias=False)
    linear.pack()
    assert not hasattr(linear, "weight")


def test_other_dtypes_stay_plain() -> None:
    linear = make(20, 37, bias=True, dtype=torch.bfloat16)
    linear.pack()
    assert linear(torch.ones(3, 20, dtype=torch.bfloat16)).dtype == torch.bfloat16
