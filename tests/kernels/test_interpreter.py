"""Mistakes in a kernel that the interpreter of these tests finds."""

from __future__ import annotations

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


def test_a_block_must_have_a_size_that_a_gpu_takes() -> None:
    for _ in range(2):  # a type that was refused is not remembered
        with pytest.raises(ValueError, match="power of 2"):
            tl.block_type(tl.int32, [3])
    assert tl.block_type(tl.int32, [4]) == tl.block_type(tl.int32, [tl.constexpr(4)])
    assert tl.block_type(tl.int32, [4]) != tl.block_type(tl.float32, [4])
    assert tl.block_type(tl.int32, [4]) != tl.block_type(tl.int32, [8])
