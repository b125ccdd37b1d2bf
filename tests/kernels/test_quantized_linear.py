"""Products with weights that stay quantized on a device, compared with dequantized weights."""

from __future__ import annotations

import pytest
import torch
from matmul_checks import ordered_dot
from torch import Tensor

from paged_backend.platforms.gpu.quantized_linear import quantized_product, weight_forms
from paged_backend.platforms.portable.int8_linear import TorchInt8Linear
from paged_backend.quantization.forms import Encoding, WeightForm
from paged_backend.quantization.weight import QuantizedWeight, stacked

FP8, INT8 = torch.float8_e4m3fn, torch.int8
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
INPUTS = 200

CASES = [
    (WeightForm.W8A8_INT8, Encoding(INT8, (1, 0), rounds_inputs=True), F32),
    (WeightForm.W8A8_INT8, Encoding(INT8, (0, 0), rounds_inputs=True), BF16),
    (WeightForm.W8A8_FP8, Encoding(FP8, (1, 0), rounds_inputs=True), BF16),
    (WeightForm.W8A8_FP8, Encoding(FP8, (0, 0), rounds_inputs=True), F32),
    (WeightForm.W8A8_FP8_BLOCKS, Encoding(FP8, (128, 128), rounds_inputs=True), F32),
    (WeightForm.W8A16_FP8, Encoding(FP8, (128, 128)), BF16),
    (WeightForm.W8A16_FP8, Encoding(FP8, (0, 0)), F16),
    (WeightForm.W8A16_INT8, Encoding(INT8, (1, 64), zero_points=True), BF16),
    (WeightForm.W8A16_INT8, Encoding(INT8, (1, 0), bits=5), F16),
    (WeightForm.W4A16, Encoding(INT8, (1, 32), bits=4, zero_points=True), F16),
    (WeightForm.W4A16, Encoding(INT8, (1, 128), bits=4), BF16),
    (WeightForm.W4A16, Encoding(INT8, (1, 0), bits=3, zero_points=True), F16),
]
# Of the largest possible result: rounding of the inputs, or of the sum and of the result.
BOUNDS = {INT8: 1 / 127, FP8: 2**-4, F32: 1e-5, F16: 2**-10, BF16: 2**-7}


def random_weight(encoding: Encoding, outputs: int) -> QuantizedWeight:
    rows, columns = encoding.block[0] or outputs, encoding.block[1] or INPUTS
    shape = -(-outputs // rows), -(-INPUTS // columns)
    scales = 0.01 * torch.rand(shape) + 0.001
    if encoding.dtype == FP8:
        return QuantizedWeight(
            torch.randn(outputs, INPUTS).mul(50).to(FP8), scales, (rows, columns)
        )
    limit = 2 ** (encoding.bits - 1)
    values = torch.randint(-limit, limit, (outputs, INPUTS), dtype=INT8)
    zeros = torch.randint(-limit, limit, shape, dtype=INT8) if encoding.zero_points else None
    return QuantizedWeight(values, scales, (rows, columns), zeros)


def check(out: Tensor, x: Tensor, dense: Tensor, encoding: Encoding) -> None:
    """Compare with float64; rounded inputs add their error to the rounding of the dtype."""
    magnitude = x.double().abs() @ dense.abs().t()
    allowed = BOUNDS[out.dtype] * magnitude + 1e-6
    if encoding.rounds_inputs:
        largest = x.double().abs().amax(1, keepdim=True) * dense.abs().sum(1)
        allowed += BOUNDS[encoding.dtype] * (largest if encoding.dtype == INT8 else magnitude)
    error = (out.double() - x.double() @ dense.t()).abs()
    assert bool((error <= allowed).all()), f"{(error / allowed).max():.3g} times what is allowed"


@pytest.mark.parametrize(("form", "encoding", "dtype"), CASES)
def test_fused_parts(
    form: WeightForm, encoding: Encoding, dtype: torch.dtype, device: torch.device
) -> None:
    """q, k and v with separate scales: products, sums, biases, and rows of the weight."""
    sizes = [128, 128, 40] if form is WeightForm.W8A8_FP8_BLOCKS else [70, 33, 40]
    assert encoding.forms(sizes, INPUTS)[0] is form
    parts = [random_weight(encoding, size) for size in sizes]
    dense = torch.cat([part.dequantize() for part in parts]).double().to(device)
    weight = stacked(parts)
    assert weight is not None
    bias = torch.randn(sum(sizes))
    linear = quantized_product(form, weight, bias, dtype, device)
    x = torch.randn(19, INPUTS).to(device, dtype)
    bias = bias.to(device, dtype)
    out = linear(x)
    assert out.dtype == dtype
    plain = quantized_product(form, weight, None, dtype, device)
    check(plain(x), x, dense, encoding)
    torch.testing.assert_close(out, plain(x) + bias, atol=4 * BOUNDS[dtype], rtol=BOUNDS[dtype])
    total = x.new_ones(19, sum(sizes))
    linear.add_to(total, x)
    assert torch.equal(total, out + 1)
    index = torch.tensor([sum(sizes) - 1, 0, 71, 71, 120], device=device)
    torch.testing.assert_close(linear.rows(index), dense[index].to(dtype))
    with ordered_dot():
        whole = linear(x)
        assert torch.equal(linear(x[3:4]), whole[3:4])
        assert torch.equal(linear(x[:5]), whole[:5])


@pytest.mark.parametrize("bits", [4, 8])
def test_groups_of_inputs_that_are_not_adjacent(bits: int, device: torch.device) -> None:
    encoding = Encoding(INT8, (1, 64), bits, zero_points=True)
    plain = random_weight(encoding, 50)
    groups = (torch.arange(INPUTS) // 64)[torch.randperm(INPUTS)]
    weight = QuantizedWeight(plain.values, plain.scales, plain.block, plain.zeros, groups)
    assert stacked([weight]) is weight
    (form,) = encoding.forms([50], INPUTS)
    linear = quantized_product(form, weight, None, F16, device)
    dense = weight.dequantize().double().to(device)
    x = torch.randn(3, INPUTS).to(device, F16)
    check(linear(x), x, dense, encoding)
    torch.testing.assert_close(linear.rows(torch.arange(50, device=device)), dense.half())
    other = QuantizedWeight(plain.values, plain.scales, plain.block, plain.zeros, groups.flip(0))
    assert stacked([weight, other]) is None
    uneven = QuantizedWeight(plain.values, plain.scales, plain.block, plain.zeros, groups * 0)
    assert stacked([uneven]) is None


def test_int8_equals_the_reference(device: torch.device) -> None:
    weight = random_weight(Encoding(INT8, (1, 0)), 70)
    linear = quantized_product(WeightForm.W8A8_INT8, weight, None, F32, device)
    x = torch.randint(-126, 127, (17, INPUTS)).float()
    x[:, 0] = 127.0  # so that nothing is rounded
    wanted = TorchInt8Linear(weight, None, F32)(x)
    torch.testing.assert_close(linear(x.to(device)).cpu(), wanted, atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize(
    ("encoding", "outputs", "inputs", "forms"),
    [
        (Encoding(FP8, (1, 0), rounds_inputs=True), [64], 64, ["W8A8 fp8", "W8A16 fp8"]),
        (Encoding(FP8, (1, 0)), [64], 64, ["W8A16 fp8"]),
        (
            Encoding(FP8, (128, 128), rounds_inputs=True),
            [256, 100],
            256,
            ["W8A8 fp8 blocks", "W8A16 fp8"],
        ),
        (Encoding(FP8, (128, 128), rounds_inputs=True), [100, 256], 256, ["W8A16 fp8"]),
        (Encoding(FP8, (48, 40), rounds_inputs=True), [64], 64, []),
        (Encoding(INT8, (1, 0), rounds_inputs=True), [64], 64, ["W8A8 int8"]),
        (Encoding(INT8, (1, 16)), [64], 64, []),
        (Encoding(INT8, (1, 128), bits=4), [64], 64, ["W4A16"]),
        (Encoding(INT8, (1, 0), bits=5), [64], 64, ["W8A16 int8"]),
    ],
)
def test_an_encoding_has_the_forms_that_its_shape_allows(
    encoding: Encoding, outputs: list[int], inputs: int, forms: list[str]
) -> None:
    assert [form.value for form in encoding.forms(outputs, inputs)] == forms


def test_a_device_has_the_forms_that_its_dtypes_allow() -> None:
    assert set(weight_forms(BF16, fp8=True)) == set(WeightForm)
    older = set(weight_forms(F16, fp8=False))
    assert older == {
        WeightForm.W8A8_INT8,
        WeightForm.W8A16_INT8,
        WeightForm.W8A16_FP8,
        WeightForm.W4A16,
    }
    assert WeightForm.W4A16 not in weight_forms(F32, fp8=True)
