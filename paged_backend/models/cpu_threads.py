"""Compiled kernels on torch's own OpenMP threads.

numba brings thread pools of its own. Their workers and torch's, both spinning for a while after
each parallel region, would take turns on the same cores; here one pool does all the work.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
from numpy.typing import NDArray

P = ParamSpec("P")
R = TypeVar("R")

Arguments = NDArray[np.int64]

# Found through torch's library, so that it is the runtime torch runs on, whatever its file's name.
_gomp_parallel = ctypes.CDLL(
    str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")
).GOMP_parallel
_gomp_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
_gomp_parallel.restype = None


class ParallelKernel:
    """A function of integers, compiled and kept on disk, that all of torch's threads run at once.

    Threads share their work out by `claim`. Floats and arrays travel as bits and addresses.
    """

    def __init__(self, function: Callable[[Any], None]) -> None:
        compiled = numba.cfunc(
            types.void(types.CPointer(types.int64)),
            cache=True,
            fastmath=True,
            error_model="numpy",
        )(function)
        self._address: int = compiled.address

    def __call__(self, *arguments: int) -> None:
        """Run on all threads; the function reads the arguments from index 1 on."""
        block = (ctypes.c_int64 * (len(arguments) + 1))(0, *arguments)
        _gomp_parallel(self._address, ctypes.addressof(block), torch.get_num_threads(), 0)


def device_function(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function that only kernels call."""
    compiled = numba.njit(
        fastmath=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True
    )(function)
    return cast(Callable[P, R], compiled)


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def claim(context: Any, arguments: Any) -> Any:
    """The next piece of work, counted from 0, that no other thread has."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", args[0], ir.IntType(64)(1), "monotonic")

    return types.int64(arguments), generate


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def _pointer(context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@device_function
def floats(address: int, shape: Any) -> Any:
    """The float32 array of a shape at an address."""
    return numba.carray(_pointer(address), shape, np.float32)


@device_function
def ints(address: int, shape: Any) -> Any:
    """The int32 array of a shape at an address."""
    return numba.carray(_pointer(address), shape, np.int32)


@device_function
def longs(address: int, shape: Any) -> Any:
    """The int64 array of a shape at an address."""
    return numba.carray(_pointer(address), shape, np.int64)
