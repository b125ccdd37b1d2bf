"""Linear layers of both CPU platforms against float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paged_backend.checkpoint.shape import Activation
from paged_backend.models.linear import LinearMethod, LinearSpec
from paged_backend.platforms.base import Platform
from paged_backend.platforms.cpu.platform import BFloat16Platform, CpuPlatform
from paged_backend.platforms.cpu.torch_platform import TorchPlatform

PLATFORMS = [CpuPlatform(), TorchPlatform(torch.float32)]
BF16 = BFloat16Platform(amx=False)
ACTIVATIONS = {Activation.SILU: F.silu, Activation.GELU_TANH: partial(F.gelu, approximate="tanh")}
on_each_platform = pytest.mark.parametrize("platform", PLATFORMS, ids=["cpu", "torch"])


def make(
    platform: Platform, inputs: int, outputs: int, *, bias: bool = False, gated: bool = False
) -> tuple[LinearMethod, Tensor, Tensor]:
    """A packed layer of random numbers with its weight and bias in float64."""
    torch.manual_seed(0)
    linear = platform.linear(LinearSpec(inputs, {"a": outputs}, bias, gated=gated))
    parameters = linear.parameters()
    for parameter in parameters.values():
        parameter.normal_()
    weight = parameters["a.weight"].double()
    offset = parameters["a.bias"].double() if bias else torch.zeros(outputs).double()
    linear.pack()
    return linear, weight, offset


@pytest.mark.sampled(2)
@on_each_platform
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(8, 16), (33, 40), (512, 1000), (1409, 257)])
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 16, 100, 300])
def test_product(platform: Platform, rows: int, inputs: int, outputs: int, bias: bool) -> None:
    linear, weight, offset = make(platform, inputs, outputs, bias=bias)
    x, residual = torch.randn(rows, inputs), torch.randn(rows, outputs)
    wanted = x.double() @ weight.t() + offset
    torch.testing.assert_close(linear(x).double(), wanted, atol=2e-4, rtol=1e-5)
    total = residual.clone()
    linear.add_to(total, x)
    torch.testing.assert_close(total.double(), residual.double() + wanted, atol=2e-4, rtol=1e-5)


@pytest.mark.sampled(2)
@on_each_platform
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize(("inputs", "inner"), [(8, 16), (33, 48), (512, 40), (100, 176)])
@pytest.mark.parametrize("rows", [0, 1, 7, 16, 100])
def test_gate_and_up_are_computed_as_one(
    platform: Platform, rows: int, inputs: int, inner: int, activation: Activation, bias: bool
) -> None:
    linear, weight, offset = make(platform, inputs, 2 * inner, bias=bias, gated=True)
    x = torch.randn(rows, inputs)
    gate_up = x.double() @ weight.t() + offset
    torch.testing.assert_close(linear(x).double(), gate_up, atol=2e-4, rtol=1e-5)
    total = torch.ones(rows, 2 * inner)
    linear.add_to(total, x)
    torch.testing.assert_close(total.double(), gate_up + 1, atol=2e-4, rtol=1e-5)
    gated = platform.layers.gated(linear, x, activation)
    gate, up = gate_up.chunk(2, dim=1)
    wanted = ACTIVATIONS[activation](gate) * up
    torch.testing.assert_close(gated.double(), wanted, atol=5e-3, rtol=1e-4)


@on_each_platform
def test_parts_of_a_checkpoint_are_one_product(platform: Platform) -> None:
    parts = {"q_proj": 32, "k_proj": 16, "v_proj": 16}
    linear = platform.linear(LinearSpec(24, parts, bias=True))
    parameters = linear.parameters()
    assert list(parameters) == [f"{name}.{kind}" for kind in ("weight", "bias") for name in parts]
    for parameter in parameters.values():
        parameter.normal_()
    x = torch.randn(3, 24)
    wanted = [x @ parameters[f"{name}.weight"].t() + parameters[f"{name}.bias"] for name in parts]
    linear.pack()
    torch.testing.assert_close(linear(x), torch.cat(wanted, dim=1), atol=1e-4, rtol=1e-5)


@on_each_platform
def test_inputs_need_not_be_contiguous(platform: Platform) -> None:
    linear, weight, _ = make(platform, 24, 32)
    x = torch.randn(10, 48)[::2, ::2]
    torch.testing.assert_close(linear(x).double(), x.double() @ weight.t(), atol=1e-4, rtol=1e-5)
    wide = torch.zeros(5, 64)
    linear.add_to(wide[:, :32], x)
    torch.testing.assert_close(wide[:, :32], linear(x))
    assert not wide[:, 32:].any()


def test_a_row_does_not_depend_on_its_batch() -> None:
    linear, _, _ = make(CpuPlatform(), 576, 200, bias=True)
    x = torch.randn(500, 576)
    together = linear(x)
    for rows in (1, 2, 3, 5, 16, 33):
        assert torch.equal(linear(x[:rows]), together[:rows])
        assert torch.equal(linear(x[-rows:]), together[-rows:])


def test_a_gated_row_does_not_depend_on_its_batch() -> None:
    platform = PLATFORMS[0]
    linear, _, _ = make(platform, 70, 176, gated=True)
    x = torch.randn(60, 70)
    rows = [platform.layers.gated(linear, row, Activation.SILU) for row in x.split(1)]
    for count in (2, 7, 16, 60):
        some = platform.layers.gated(linear, x[:count], Activation.SILU)
        assert torch.equal(some, torch.cat(rows[:count]))


@pytest.mark.parametrize("platform", [CpuPlatform(), BF16], ids=["float32", "bf16"])
@pytest.mark.parametrize("outputs", [16, 24, 48, 112, 125])
def test_tiles_of_all_sizes_give_the_same_sums(platform: Platform, outputs: int) -> None:
    linear, _, _ = make(platform, 70, outputs)
    x = torch.randn(60, 70)
    one_by_one = torch.cat([linear(row) for row in x.split(1)])
    for rows in range(2, 61):
        assert torch.equal(linear(x[:rows]), one_by_one[:rows])


@pytest.mark.parametrize("platform", [*PLATFORMS, BF16], ids=["cpu", "torch", "bf16"])
@pytest.mark.parametrize("inputs", [20, 33])
def test_rows_of_the_weight(platform: Platform, inputs: int) -> None:
    linear, weight, _ = make(platform, inputs, 37)
    for index in (torch.tensor([36, 0, 15, 16, 36]), torch.arange(100) % 37, torch.arange(0)):
        assert torch.equal(linear.rows(index), weight[index].float())
        assert torch.equal(linear.rows(index.repeat_interleave(2)[::2]), weight[index].float())


def test_packing_frees_the_plain_weight() -> None:
    linear = CpuPlatform().linear(LinearSpec(20, {"a": 37}))
    linear.pack()
    assert not hasattr(linear, "_weight")


def test_other_dtypes() -> None:
    linear = TorchPlatform(torch.bfloat16).linear(LinearSpec(20, {"a": 37}, bias=True))
    linear.pack()
    assert linear(torch.ones(3, 20, dtype=torch.bfloat16)).dtype == torch.bfloat16
