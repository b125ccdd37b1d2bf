"""Makes Triton's interpreter honest about bfloat16 and float8, and faster.

It keeps bfloat16 as bit patterns and computes on the bits. With `repair`, products are right,
conversions round to nearest as a GPU does (stock ones truncate, to float8 they even lose the
carry), and arithmetic, which kernels here never do in bfloat16, raises.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def repair() -> None:
    """Patch the interpreter of this process, once."""
    if hasattr(InterpreterBuilder, "bfloat16_repaired"):
        return
    InterpreterBuilder.bfloat16_repaired = True
    np.seterr(over="ignore")  # a GPU overflows to infinity without a word
    InterpreterBuilder.create_dot = _dot(InterpreterBuilder.create_dot)
    for name in ("cast_impl", "create_fp_to_fp"):
        setattr(InterpreterBuilder, name, _rounding(getattr(InterpreterBuilder, name)))
    InterpreterBuilder.create_fp_trunc = lambda self, value, kind: self.cast_impl(value, kind)
    for name in ("binary_op", "unary_op"):
        setattr(InterpreterBuilder, name, _refusing(getattr(InterpreterBuilder, name)))
    interpreter._patch_lang = _LanguagePatch(interpreter._patch_lang)


class _LanguagePatch:
    """Replaces members of `triton.language` during a launch, as the interpreter does.

    The interpreter searches all members for those to replace, at each launch and at each call of a
    device function, which takes a third of the time of these tests. This class searches once and
    then repeats the replacements.

    Args:
        search: the interpreter's function, which returns a scope with `restore`.
    """

    def __init__(self, search: Any) -> None:
        self._search = search
        self._modules: dict[Any, frozenset[str]] = {}  # of the language, in a function's globals
        self._replacements: dict[frozenset[str], list[tuple[Any, str, Any]]] = {}
        self._called: set[frozenset[str]] = set()
        self._launched = False

    def __call__(self, fn: Any) -> Any:
        """Replace members for `fn`, a kernel or a device function that a kernel calls."""
        if fn not in self._modules:
            self._modules[fn] = frozenset(
                module.__name__
                for module in (tl, tl.core)
                if any(value is module for value in fn.__globals__.values())
            )
        modules = self._modules[fn]
        if self._launched:  # the interpreter never restores what it has replaced for such a call
            if modules not in self._called:
                self._called.add(modules)
                self._search(fn)
            return None
        if modules not in self._replacements:
            found = self._search(fn)
            self._replacements[modules] = [
                (owner, name, getattr(owner, name)) for owner, name, _ in found._changes
            ]
            found.restore()
        scope = interpreter._LangPatchScope()
        scope.set_attr(self, "_launched", True)
        for owner, name, value in self._replacements[modules]:
            scope.set_attr(owner, name, value)
        return scope


def _is_bfloat16(value: Any) -> bool:
    return isinstance(value, TensorHandle) and value.dtype.scalar == tl.bfloat16


def _widened(value: TensorHandle) -> TensorHandle:
    if not _is_bfloat16(value):
        return value
    return TensorHandle((value.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _dot(original: Any) -> Any:
    def create_dot(self: Any, a: TensorHandle, b: TensorHandle, *others: Any) -> TensorHandle:
        return original(self, _widened(a), _widened(b), *others)

    return create_dot


def _rounding(original: Any) -> Any:
    def convert(self: Any, value: TensorHandle, kind: Any, *others: Any) -> TensorHandle:
        if kind.scalar == tl.float8e4nv:
            return TensorHandle(_float8_codes(value.data), kind.scalar)
        if kind.scalar != tl.bfloat16 or _is_bfloat16(value):
            return original(self, value, kind, *others)
        if value.dtype.scalar.is_fp8():
            value = original(self, value, tl.float32, *others)
        numbers = np.ascontiguousarray(value.data, dtype=np.float32)
        bits = numbers.view(np.uint32).astype(np.uint64)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        rounded = np.where(np.isnan(numbers), np.uint16(0x7FC0), rounded)
        return TensorHandle(rounded.reshape(value.data.shape), tl.bfloat16)

    return convert


def _float8_codes(numbers: np.ndarray) -> np.ndarray:
    rounded = torch.from_numpy(np.ascontiguousarray(numbers, np.float32)).to(torch.float8_e4m3fn)
    return rounded.view(torch.uint8).numpy()


def _refusing(original: Any) -> Any:
    def operate(self: Any, *operands: Any) -> TensorHandle:
        if any(map(_is_bfloat16, operands)):
            raise TypeError("kernels convert bfloat16 to float32 before they compute with it")
        return original(self, *operands)

    return operate
