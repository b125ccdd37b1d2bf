"""Mistakes in a kernel that the interpreter of these tests finds."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import triton
import triton.language as tl
from paged_kernels.device import INTERPRETED
from triton.runtime.errors import InterpreterError

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="a GPU does not look for overflows")


@triton.jit
def _combine_kernel(a_ptr, b_ptr, out_ptr, OPERATION: tl.constexpr):
    a, b = tl.load(a_ptr + tl.arange(0, 2)), tl.load(b_ptr + tl.arange(0, 2))
    if OPERATION == "add":
        out = a + b
    elif OPERATION == "sub":
        out = a - b
    else:
        out = a * b
    tl.store(out_ptr + tl.arange(0, 2), out)


@pytest.mark.parametrize(
    ("operation", "fits", "overflows"),
    [
        ("add", (2**31 - 2, 1), (2**31 - 1, 1)),
        ("sub", (-(2**31) + 1, 1), (-(2**31), 1)),
        ("mul", (2**15, 2**15), (2**16, 2**15)),
    ],
)
def test_an_integer_that_overflows_is_found(
    operation: str, fits: tuple[int, int], overflows: tuple[int, int]
) -> None:
    def run(pair: tuple[int, int]) -> list[int]:
        a, b = (torch.tensor([1, value], dtype=torch.int32) for value in pair)
        out = torch.empty_like(a)
        _combine_kernel[(1,)](a, b, out, operation)
        return out.tolist()

    expected = {"add": sum(fits), "sub": fits[0] - fits[1], "mul": fits[0] * fits[1]}
    assert run(fits)[1] == expected[operation]
    with pytest.raises(
        InterpreterError, match=f"int32 overflow detected for operation {operation}"
    ):
        run(overflows)


@pytest.mark.parametrize(
    ("operation", "exact", "rounds"),
    [
        ("add", (255.0, 1.0), (256.0, 1.0)),
        ("add", (2.0**30, 2.0**25), (2.0**30, 1.0)),  # float32 would round, too
        ("sub", (136.0, 128.0), (2.0**-20, 1.0)),
        ("mul", (3.0, 2.0**120), (3e38, 2.0)),
        ("mul", (2.0**-60, 2.0**-60), (2.0**-100, 2.0**-100)),
    ],
)
def test_bfloat16_that_rounds_is_found(
    operation: str, exact: tuple[float, float], rounds: tuple[float, float]
) -> None:
    def run(pair: tuple[float, float]) -> float:
        a, b = (torch.full((2,), value, dtype=torch.bfloat16) for value in pair)
        out = torch.empty_like(a)
        _combine_kernel[(1,)](a, b, out, operation)
        return float(out[0])

    a, b = exact
    assert run(exact) == {"add": a + b, "sub": a - b, "mul": a * b}[operation]
    with pytest.raises(InterpreterError, match="before they compute and round"):
        run(rounds)


@triton.jit
def _touch_kernel(x_ptr, first, end, OPERATION: tl.constexpr):
    """Touch the numbers of `x` from `first` to `first + 3` that lie before `end`."""
    at = first + tl.arange(0, 4)
    mask = at < end
    if OPERATION == "load":
        tl.load(x_ptr + at, mask=mask)
    elif OPERATION == "store":
        tl.store(x_ptr + at, at, mask=mask)
    elif OPERATION == "add":
        tl.atomic_add(x_ptr + at, 1, mask=mask)
    else:
        tl.atomic_cas(x_ptr + end - 1, 0, 1)


@pytest.mark.parametrize("operation", ["load", "store", "add", "swap"])
def test_an_address_outside_of_the_arguments_is_found(operation: str) -> None:
    """The neighbors exist, so a device would use them without a word."""
    numbers = torch.zeros(16, dtype=torch.int32)
    x = numbers[4:8]

    def touch(first: int, end: int) -> None:
        _touch_kernel[(1,)](x, first, end, operation)

    touch(0, 4)
    touch(2, 4)  # with masked addresses beyond the end
    if operation != "swap":
        touch(-2, -2)  # all are masked
    before = numbers.clone()
    for first, end in ((-1, 0 if operation == "swap" else 3), (1, 5), (2, 6)):
        with pytest.raises(InterpreterError, match="addresses outside of all arguments"):
            touch(first, end)
    assert torch.equal(numbers, before)


def test_addresses_of_two_arguments_are_found_together() -> None:
    numbers = torch.zeros(16, dtype=torch.int32)
    for second, fits in ((numbers[9:12], True), (numbers[9:11], False)):
        call = partial(_read_both_kernel[(1,)], numbers[4:8], second)
        if fits:
            call()
        else:
            with pytest.raises(InterpreterError, match="addresses outside of all arguments: 1"):
                call()


@triton.jit
def _read_both_kernel(a_ptr, b_ptr):
    """Read two numbers from each, and the third of the second one."""
    at = tl.arange(0, 4)
    tl.load(tl.where(at == 0, a_ptr + at, b_ptr + at - 1))


def test_a_block_must_have_a_size_that_a_gpu_takes() -> None:
    for _ in range(2):  # a type that was refused is not remembered
        with pytest.raises(ValueError, match="power of 2"):
            tl.block_type(tl.int32, [3])
    assert tl.block_type(tl.int32, [4]) == tl.block_type(tl.int32, [tl.constexpr(4)])
    assert tl.block_type(tl.int32, [4]) != tl.block_type(tl.float32, [4])
    assert tl.block_type(tl.int32, [4]) != tl.block_type(tl.int32, [8])


@triton.jit
def _integers_kernel(before_ptr, b_ptr, out_ptr, N: tl.constexpr, THREE: tl.constexpr):
    at = tl.arange(0, N)
    a_ptr = before_ptr + 2
    a, b = tl.load(a_ptr + at), tl.load(b_ptr + at)
    first = tl.load(b_ptr)
    out_ptr += at
    tl.store(out_ptr, a // b)
    tl.store(out_ptr + N, a % b)
    tl.store(out_ptr + 2 * N, (a + THREE) // 4 - b * -2 + (5 + a) * first)
    tl.store(out_ptr + 3 * N, ((a < b) | (a >= THREE)).to(tl.int32) + 2 * (a == -9).to(tl.int32))
    tl.store(out_ptr + 4 * N, tl.where((a > 0) & (b != 2), tl.minimum(a, b), tl.maximum(b, -1)))
    tl.store(out_ptr + 5 * N, tl.sum(a[:, None] * b[None, :], 1))
    tl.store(out_ptr + 6 * N, tl.load(a_ptr - 2 + at, mask=at <= 2, other=70), mask=at != 1)
    pairs = tl.load(a_ptr + at[:, None] * 0 + at[None, :], mask=(at > 1)[None, :], other=0)
    tl.store(out_ptr + 7 * N, tl.sum(pairs, 0))


def test_integers() -> None:
    """Division is rounded to zero, as on a GPU."""
    a, b = [7, -7, 3, -9], [2, 2, -5, 4]
    pairs = [*zip(a, b, strict=True)]
    out = torch.full((8, 4), 99, dtype=torch.int32)
    before = torch.tensor([50, 60, *a], dtype=torch.int32)
    _integers_kernel[(1,)](before, torch.tensor(b, dtype=torch.int32), out, 4, 3)
    assert out.tolist() == [
        [int(x / y) for x, y in pairs],
        [x - int(x / y) * y for x, y in pairs],
        [int((x + 3) / 4) + 2 * y + (5 + x) * 2 for x, y in pairs],
        [(x < y or x >= 3) + 2 * (x == -9) for x, y in pairs],
        [min(x, y) if x > 0 and y != 2 else max(y, -1) for x, y in pairs],
        [x * sum(b) for x in a],
        [50, 99, 7, 70],
        [0, 0, 4 * 3, 4 * -9],
    ]


@triton.jit
def _floats_kernel(a_ptr, half_ptr, out_ptr):
    at = tl.arange(0, 4)
    a = tl.load(a_ptr + at)
    scale = tl.load(a_ptr + 1)
    tl.store(out_ptr + at, (a - 1) / scale * 0.5 + tl.where(a > 0.25, a, float("-inf")))
    tl.store(out_ptr + 4 + at, tl.load(half_ptr + at, mask=at < 2, other=0.0) * 2.0 + a)
    tl.store(out_ptr + 8, tl.load(a_ptr + 3, mask=scale > 5.0, other=-1.0))


def test_floating_point_numbers() -> None:
    """Constants have the type of a tensor of 32 bits; other types are converted as ever."""
    a = torch.tensor([0.1, 3.0, 1e-40, 2.0])
    out, half = torch.empty(9), torch.tensor([1.5, 0.1, 7.0, 7.0], dtype=torch.float16)
    _floats_kernel[(1,)](a, half, out)
    inf = torch.tensor(float("-inf"))
    assert torch.equal(out[:4], (a - 1) / 3.0 * 0.5 + torch.where(a > 0.25, a, inf))
    assert torch.equal(out[4:8], torch.tensor([3.0, float(half[1]) * 2, 0.0, 0.0]) + a)
    assert out[8] == -1


@triton.jit
def _mistaken_store_kernel(out_ptr):
    tl.store(out_ptr, tl.arange(0, 2))


def test_a_block_is_not_stored_at_one_address() -> None:
    with pytest.raises(InterpreterError, match="cannot be block type if pointer argument is not"):
        _mistaken_store_kernel[(1,)](torch.zeros(2, dtype=torch.int32))


@pytest.mark.parametrize(("value", "overflows"), [(2**31 - 6, False), (2**31 - 5, True)])
def test_a_constant_that_overflows_is_found(value: int, overflows: bool) -> None:
    given = torch.full((4,), value, dtype=torch.int32)
    if not overflows:
        _integers_kernel_of_sum[(1,)](given)
        assert given.tolist() == [2**31 - 1] * 4
        return
    with pytest.raises(InterpreterError, match="int32 overflow detected for operation add"):
        _integers_kernel_of_sum[(1,)](given)


@triton.jit
def _integers_kernel_of_sum(ptr):
    at = tl.arange(0, 4)
    tl.store(ptr + at, tl.load(ptr + at) + 5)


@triton.jit
def _programs_kernel(before_ptr, out_ptr, sums_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    program = tl.program_id(1)
    a = tl.load(before_ptr + 1 + at)
    out_ptr += program * (6 * N)
    tl.store(out_ptr + at, 10 - a)
    tl.store(out_ptr + N + at, (a ^ 5) + (a & 6) - (a | program))
    tl.store(out_ptr + 2 * N + at, a >> 1)
    tl.store(out_ptr + 3 * N + at, tl.full([N], 7, tl.int32) + program)
    tl.store(out_ptr + 4 * N + at, ((a > 0).to(tl.float32) + a.to(tl.float32) * 0.75).to(tl.int32))
    column = tl.full([N], 0.5, tl.float32)[:, None] * a.to(tl.float32)[None, :]
    tl.store(out_ptr + 5 * N + at, tl.sum(column, 0).to(tl.int32))
    if program == 1:
        tl.store(sums_ptr + at, a.to(tl.int64) * 2147483647 + a)


@triton.jit
def _bits_kernel(ptr, out_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(ptr + at)
    bits = x.to(tl.int32, bitcast=True).to(tl.uint32)
    tl.store(out_ptr + at, (bits ^ (bits >> 1)).to(tl.int32))
    tl.store(out_ptr + N + at, (-x).to(tl.int32, bitcast=True))
    half = x.to(tl.float16)
    tl.store(out_ptr + 2 * N + at, half.to(tl.int16, bitcast=True))
    tl.store(out_ptr + 3 * N + at, half.to(tl.float32).to(tl.int32, bitcast=True))
    tl.store(out_ptr + 4 * N + at, tl.minimum(x, 3.4028234663852886e38).to(tl.int32, bitcast=True))


def test_bits_of_numbers() -> None:
    """Zero minus zero is zero, and not its negative; float16 rounds, and has no large numbers."""
    x = torch.tensor([0.1, -3.0, 0.0, float("inf")])
    out = torch.zeros(5, 4, dtype=torch.int32)
    _bits_kernel[(1,)](x, out, 4)
    bits = x.view(torch.int32).tolist()
    half = x.half()
    gray = [(number % 2**32) ^ ((number % 2**32) >> 1) for number in bits]
    assert [number % 2**32 for number in out[0].tolist()] == gray
    assert torch.equal(out[1], (0 - x).view(torch.int32))
    assert out[2].tolist() == half.view(torch.int16).tolist()
    assert torch.equal(out[3], half.float().view(torch.int32))
    largest = torch.finfo(torch.float32).max
    assert torch.equal(out[4], x.clamp(max=largest).view(torch.int32))


def test_programs_and_conversions() -> None:
    """Integers of 64 bits hold what those of 32 do not; conversions round to zero."""
    a = [7, -7, 3, -9]
    out, sums = torch.full((2, 6, 4), 99, dtype=torch.int32), torch.empty(4, dtype=torch.int64)
    _programs_kernel[(1, 2)](torch.tensor([50, *a], dtype=torch.int32), out, sums, 4)
    assert out.tolist() == [
        [
            [10 - x for x in a],
            [(x ^ 5) + (x & 6) - (x | program) for x in a],
            [x >> 1 for x in a],
            [7 + program] * 4,
            [int((x > 0) + x * 0.75) for x in a],
            [int(x * 2.0) for x in a],
        ]
        for program in (0, 1)
    ]
    assert sums.tolist() == [x * 2**31 for x in a]


@triton.jit
def _difference_kernel(ptr):
    tl.store(ptr, 2147483647 - tl.load(ptr))


def test_a_difference_from_a_constant_that_overflows_is_found() -> None:
    given = torch.zeros(1, dtype=torch.int32)
    _difference_kernel[(1,)](given)
    assert given.tolist() == [2**31 - 1]
    given[0] = -1
    with pytest.raises(InterpreterError, match="int32 overflow detected for operation sub"):
        _difference_kernel[(1,)](given)


def test_a_range_that_a_gpu_does_not_take_is_refused() -> None:
    for _ in range(2):  # a range that was refused is not remembered
        with pytest.raises(InterpreterError, match="power of 2"):
            _range_kernel[(1,)](torch.zeros(3, dtype=torch.int32), 3)


@triton.jit
def _range_kernel(ptr, N: tl.constexpr):
    tl.store(ptr + tl.arange(0, N), 0)


@triton.jit
def _block_kernel(ptr, N: tl.constexpr):
    tl.store(ptr, tl.sum(tl.full([N], 1, tl.int32), 0))


def test_a_constant_block_that_a_gpu_does_not_take_is_refused() -> None:
    for _ in range(2):
        with pytest.raises(InterpreterError, match="power of 2"):
            _block_kernel[(1,)](torch.zeros(1, dtype=torch.int32), 3)


@triton.jit
def _fourth_axis_kernel(ptr):
    tl.store(ptr, tl.program_id(-1))


def test_there_are_three_axes_of_programs() -> None:
    with pytest.raises(InterpreterError, match="must be 0, 1, or 2"):
        _fourth_axis_kernel[(1,)](torch.zeros(1, dtype=torch.int32))
