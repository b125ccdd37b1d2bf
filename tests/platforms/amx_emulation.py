"""Runs kernels that are made of AMX instructions on a CPU without AMX.

The instructions become calls of functions that do what Intel's manual (volume 2, TDPBF16PS and
others) says, with tiles in ordinary memory. There is one set of tiles, so one thread may run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types

from paged_backend.platforms.cpu import amx, amx_attention
from paged_backend.platforms.cpu import threads as cpu_threads
from paged_backend.platforms.cpu.threads import Crew, array_at

_STATE = np.zeros(64 + 8 * 1024, np.uint8)  # the configuration, then the tiles
_ADDRESS = _STATE.ctypes.data
_INTEGERS = {8: types.int8, 64: types.int64}


@numba.njit
def _rows(tile: int) -> Any:
    return array_at(_ADDRESS + 48, 8, np.uint8)[tile]


@numba.njit
def _row_bytes(tile: int) -> Any:
    return array_at(_ADDRESS + 16, 8, np.uint16)[tile]


@numba.njit
def _tile(tile: int) -> Any:
    return array_at(_ADDRESS + 64 + tile * 1024, (16, 64), np.uint8)


@numba.njit
def _words(tile: int) -> Any:
    return array_at(_ADDRESS + 64 + tile * 1024, (16, 16), np.float32)


@numba.njit
def _sums(tile: int) -> Any:
    return array_at(_ADDRESS + 64 + tile * 1024, (16, 16), np.int32)


@numba.njit
def _pairs(tile: int) -> Any:
    return array_at(_ADDRESS + 64 + tile * 1024, (16, 16, 2), np.uint16)


def _ldtilecfg(address: int) -> None:
    config = array_at(address, 64, np.uint8)
    state = array_at(_ADDRESS, 64 + 8 * 1024, np.uint8)
    for i in range(len(state)):
        state[i] = config[i] if i < 64 else 0


def _tilerelease() -> None:
    array_at(_ADDRESS, 1, np.uint8)[0] = 0


def _tilezero(tile: int) -> None:
    _tile(tile)[:] = 0


def _tileloadd64(tile: int, address: int, stride: int) -> None:
    _tile(tile)[:] = 0
    for row in range(_rows(tile)):
        source = array_at(address + row * stride, 64, np.uint8)
        for i in range(_row_bytes(tile)):
            _tile(tile)[row, i] = source[i]


def _tilestored64(tile: int, address: int, stride: int) -> None:
    for row in range(_rows(tile)):
        target = array_at(address + row * stride, 64, np.uint8)
        for i in range(_row_bytes(tile)):
            target[i] = _tile(tile)[row, i]


@numba.njit
def _fit(total: int, a: int, b: int) -> Any:
    """Return whether a product is allowed; else the processor would end the program."""
    return (
        _rows(total) == _rows(a)
        and _row_bytes(total) == _row_bytes(b)
        and _row_bytes(a) == 4 * _rows(b)
    )


@numba.njit
def _float(bits: Any) -> Any:
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


def _tdpbf16ps(total: int, a: int, b: int) -> None:
    if not _fit(total, a, b):
        _words(total)[:] = np.nan
    for m in range(_rows(total)):
        for k in range(_row_bytes(a) // 4):
            for n in range(_row_bytes(total) // 4):
                for i in range(2):
                    x, y = _float(_pairs(a)[m, k, i]), _float(_pairs(b)[k, n, i])
                    _words(total)[m, n] += x * y


def _tdpbusd(total: int, a: int, b: int) -> None:
    if not _fit(total, a, b):
        _sums(total)[:] = -(2**31)
    for m in range(_rows(total)):
        for k in range(_row_bytes(a) // 4):
            for n in range(_row_bytes(total) // 4):
                for i in range(4):
                    x, y = _tile(a)[m, 4 * k + i], _tile(b)[k, 4 * n + i]
                    _sums(total)[m, n] += np.int32(x) * np.int32(np.int8(y))


_FUNCTIONS = {
    "ldtilecfg": (_ldtilecfg, [64]),
    "tilerelease": (_tilerelease, []),
    "tilezero": (_tilezero, [8]),
    "tileloadd64": (_tileloadd64, [8, 64, 64]),
    "tilestored64": (_tilestored64, [8, 64, 64]),
    "tdpbf16ps": (_tdpbf16ps, [8, 8, 8]),
    "tdpbusd": (_tdpbusd, [8, 8, 8]),
}
_compiled: dict[str, Any] = {}


def _address_of(name: str) -> int:
    if name not in _compiled:
        function, sizes = _FUNCTIONS[name]
        _compiled[name] = numba.cfunc(types.void(*[_INTEGERS[size] for size in sizes]))(function)
    return int(_compiled[name].address)


def _emit_call(builder: Any, name: str, *arguments: Any) -> None:
    """Emit the call of a function instead of an instruction."""
    integers = [
        builder.ptrtoint(value, ir.IntType(64)) if value.type.is_pointer else value
        for value in arguments
    ]
    kind = ir.FunctionType(ir.VoidType(), [value.type for value in integers])
    address = ir.Constant(ir.IntType(64), _address_of(name))
    builder.call(builder.inttoptr(address, kind.as_pointer()), integers)


def _compile(signature: Any, function: Any) -> Any:
    """Compile without the disk: these kernels are valid in this process only."""
    return numba.cfunc(signature, fastmath=True, error_model="numpy")(function)


@contextmanager
def amx_or_emulation() -> Iterator[None]:
    """Allow kernels with AMX; on a CPU without it, they must be compiled within this context."""
    if amx.has_amx():
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as platforms that are made in this context take over the number
    with (
        patch.object(amx, "emit_instruction", _emit_call),
        patch.object(amx_attention, "emit_instruction", _emit_call),
        patch.object(amx, "has_amx", lambda: True),
        patch.object(amx_attention, "has_amx", lambda: True),
        patch.object(cpu_threads, "_compile", _compile),
        patch.object(cpu_threads, "_crew", Crew(0)),
    ):
        yield
    torch.set_num_threads(threads)
