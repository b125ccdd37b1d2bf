"""Makes Triton's interpreter honest about bfloat16, float8 and overflow, and faster.

It keeps bfloat16 as bit patterns and computes on the bits. With `repair`, products are right,
conversions round to nearest as a GPU does (stock ones truncate, to float8 they even lose the
carry), and arithmetic in bfloat16 raises if it rounds, which kernels here never do.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
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
        setattr(InterpreterBuilder, name, _exactly(getattr(InterpreterBuilder, name)))
    interpreter._patch_lang = _LanguagePatch(interpreter._patch_lang)
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    TritonSemantic.binary_op_sanitize_overflow_impl = _check_overflow
    for name, faster in (
        ("binary_op_type_checking_impl", _type_checking),
        ("broadcast_impl_value", _broadcast),
        ("cast", _cast),
    ):
        setattr(TritonSemantic, name, faster(getattr(TritonSemantic, name)))
    tl.tensor.__init__ = _init_tensor
    tl.block_type.__init__ = _init_block_type(tl.block_type.__init__)
    tl.core._unwrap_if_constexpr = _unwrap(tl.core._unwrap_if_constexpr)


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
        self._modules: dict[Any, frozenset[str]] = {}  # language modules in a function's globals
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


def _by_name(find: Any) -> Any:
    """Remember the result for each type; the stock function builds a table at each call."""
    known: dict[str, Any] = {}

    def find_once(kind: Any) -> Any:
        if kind.name not in known:
            known[kind.name] = find(kind)
        return known[kind.name]

    return find_once


def _check_overflow(self: Any, lhs: tl.tensor, rhs: tl.tensor, operation: Any) -> None:
    """Raise AssertionError if an operation on integers overflows.

    The stock interpreter runs a dozen interpreted operations for this check, which takes a quarter
    of the time of these tests, and ignores the result except in debug mode.
    """
    kind = lhs.type.scalar
    if kind.int_bitwidth >= 64:
        return
    exact = _EXACT[operation.__name__](lhs.handle.data, rhs.handle.data, dtype=np.int64)
    low, high = kind.get_int_min_value(), kind.get_int_max_value()
    assert low <= exact.min() and exact.max() <= high, (
        f"int{kind.int_bitwidth} overflow detected for operation {operation.__name__}"
    )


_EXACT = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def _init_tensor(self: tl.tensor, handle: Any, kind: Any) -> None:
    """Initialize a tensor as the stock constructor does, but share the shapes of equal sizes."""
    self.handle, self.type, self.dtype = handle, kind, kind.scalar
    self.numel, self.shape = _shape_of(tuple(kind.shape) if kind.is_block() else ())


@functools.cache
def _shape_of(sizes: tuple[int, ...]) -> tuple[tl.constexpr, tl.tuple]:
    return tl.constexpr(math.prod(sizes)), tl.tuple([tl.constexpr(size) for size in sizes])


def _type_checking(original: Any) -> Any:
    """Convert neither of two tensors of one type with operations that have this type, too."""

    def check(self: Any, lhs: Any, rhs: Any, *options: Any, **more: Any) -> Any:
        if type(lhs) is tl.tensor and type(rhs) is tl.tensor:
            kind = lhs.dtype
            if kind is rhs.dtype and (kind is tl.float32 or kind is tl.int32 or kind is tl.int64):
                return self.broadcast_impl_value(lhs, rhs)
        return original(self, lhs, rhs, *options, **more)

    return check


def _broadcast(original: Any) -> Any:
    """Return two tensors as they are if they share their shape, before it is compared."""

    def broadcast(self: Any, lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
        return (lhs, rhs) if lhs.shape is rhs.shape else original(self, lhs, rhs)

    return broadcast


def _cast(original: Any) -> Any:
    """Return a tensor as it is if it has the type, before types of blocks are made and compared."""

    def cast(self: Any, value: tl.tensor, kind: Any, *others: Any) -> tl.tensor:
        return value if value.dtype is kind else original(self, value, kind, *others)

    return cast


def _init_block_type(original: Any) -> Any:
    """Make each type of a block once; later ones copy its attributes."""
    known: dict[Any, dict[str, Any]] = {}

    def init(self: tl.block_type, element: tl.dtype, shape: Any) -> None:
        key = element.name, tuple([getattr(size, "value", size) for size in shape])
        if key not in known:
            original(self, element, shape)
            known[key] = vars(self).copy()
        vars(self).update(known[key])

    return init


def _unwrap(original: Any) -> Any:
    """Return the value of a constant before the original looks for lists of them."""

    def unwrap(value: Any) -> Any:
        kind = type(value)
        if kind is tl.constexpr:
            return value.value
        return value if kind is int or kind is tl.tensor else original(value)

    return unwrap


def _is_bfloat16(value: Any) -> bool:
    return isinstance(value, TensorHandle) and value.dtype.scalar == tl.bfloat16


def _widened(value: TensorHandle) -> TensorHandle:
    if not _is_bfloat16(value):
        return value
    return TensorHandle((value.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _dot(original: Any) -> Any:
    """A product with sums of float64, rounded once: no bit of a row depends on the tile's size."""

    def create_dot(
        self: Any, a: TensorHandle, b: TensorHandle, d: TensorHandle, *others: Any
    ) -> TensorHandle:
        a, b = _widened(a), _widened(b)
        if a.data.dtype != np.float32 or d.data.dtype != np.float32:
            return original(self, a, b, d, *others)
        products = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32)
        return TensorHandle(products + d.data, d.dtype.scalar)

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


def _as_float64(value: TensorHandle) -> TensorHandle:
    if not _is_bfloat16(value):
        return value
    return TensorHandle(_widened(value).data.astype(np.float64), tl.float64)


def _exactly(original: Any) -> Any:
    """Compute with bfloat16 where the result is exact, and refuse it elsewhere."""

    def operate(self: Any, *operands: Any) -> TensorHandle:
        handles = [each for each in operands if type(each) is TensorHandle]
        if not any(each.data.dtype == np.uint16 and _is_bfloat16(each) for each in handles):
            return original(self, *operands)
        wide = [_as_float64(each) if type(each) is TensorHandle else each for each in operands]
        found = original(self, *wide)
        if found.data.dtype != np.float64:  # a comparison
            return found
        single = TensorHandle(found.data.astype(np.float32), tl.float32)
        narrow = self.cast_impl(single, tl.bfloat16)
        if not np.array_equal(_widened(narrow).data, found.data, equal_nan=True):
            raise TypeError("kernels convert bfloat16 to float32 before they compute and round")
        return narrow

    return operate
