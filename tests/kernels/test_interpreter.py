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
