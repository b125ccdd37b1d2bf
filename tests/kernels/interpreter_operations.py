"""Shorter ways of the interpreter's operations, for the operands that kernels mostly have.

Two tensors of float32, int32 or int64, or one and a constant, are computed by NumPy at once, with
the interpreter's own formulas. An operation returns what the interpreter's does; other operands are
left to it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from interpreter_tensors import block_of, tensor_of
from triton.runtime import interpreter

Operator = Callable[..., Any]

_NUMPY = {"fp32": np.float32, "int32": np.int32, "int64": np.int64}
"""Types of elements that take the shorter way, by name; pointers have no hash."""
_INTEGERS = {"int32", "int64"}
_LARGEST = float(np.finfo(np.float32).max)


@functools.cache
def _constant(value: int | float, name: str) -> np.ndarray:
    numbers = np.array([value], _NUMPY[name])
    numbers.flags.writeable = False
    return numbers


def _other(value: Any, kind: tl.dtype) -> np.ndarray | None:
    """The numbers of the second operand, or None if it does not take the shorter way.

    Args:
        value: a tensor, or a constant.
        kind: the type of the first operand's elements, one of `_NUMPY`.
    """
    if type(value) is tl.tensor:
        if value.dtype is kind:
            return value.handle.data
        if kind is tl.int64 and value.dtype is tl.int32:
            return value.handle.data.astype(np.int64)
        return None
    if type(value) is tl.constexpr:
        value = value.value
    if type(value) is int:
        return _constant(value, kind.name) if -(2**31) <= value < 2**31 else None
    if type(value) is float and kind is tl.float32:
        usual = value == 0 or 2**-126 <= abs(value) <= _LARGEST or math.isinf(value)
        return _constant(value, kind.name) if usual else None
    return None


def _result(numbers: np.ndarray, kind: Any, lhs: tl.tensor, rhs: Any) -> tl.tensor:
    """A tensor with the shape that two operands have together."""
    if lhs.type is lhs.dtype and (type(rhs) is not tl.tensor or rhs.type is rhs.dtype):
        return tensor_of(numbers, kind, kind)
    return tensor_of(numbers, kind, block_of(kind, numbers.shape))


def _arithmetic(compute: Any, name: str) -> Any:
    """Sums, differences and products, which must not overflow in 32-bit integers."""

    def faster(original: Operator) -> Operator:
        def operate(self: tl.tensor, other: Any) -> tl.tensor:
            kind = self.dtype
            numbers = _other(other, kind) if kind.name in _NUMPY else None
            if numbers is None:
                return original(self, other)
            if kind is not tl.int32:
                return _result(compute(self.handle.data, numbers), kind, self, other)
            exact = compute(self.handle.data, numbers, dtype=np.int64)
            found = exact.astype(np.int32)
            fits = not np.count_nonzero(found != exact)  # faster than all() of few numbers
            assert fits, f"int32 overflow detected for operation {name}"
            return _result(found, kind, self, other)

        return operate

    return faster


def _negative(original: Operator) -> Operator:
    """A tensor taken from 0, which for 0 is 0."""
    difference = _difference_from(lambda tensor, _: original(tensor))
    return lambda self: difference(self, 0)


def _difference_from(original: Operator) -> Operator:
    """A constant minus a tensor."""
    subtract = _arithmetic(np.subtract, "sub")(tl.tensor.__sub__)

    def operate(self: tl.tensor, other: Any) -> tl.tensor:
        kind = self.dtype
        known = type(other) is not tl.tensor and kind.name in _NUMPY
        numbers = _other(other, kind) if known else None
        if numbers is None:
            return original(self, other)
        return subtract(tensor_of(numbers, kind, kind), self)

    return operate


def _addition(original: Operator) -> Operator:
    """Sums, also of addresses and indices."""
    of_numbers = _arithmetic(np.add, "add")(original)

    def operate(self: tl.tensor, other: Any) -> tl.tensor:
        kind = self.dtype
        if type(kind) is not tl.pointer_type:
            return of_numbers(self, other)
        if type(other) is tl.tensor:
            numbers = other.handle.data if other.dtype.name in _INTEGERS else None
        else:
            numbers = _other(other, tl.int32)
        if numbers is None:
            return original(self, other)
        width = max(1, kind.element_ty.primitive_bitwidth // 8)
        return _result(self.handle.data + width * numbers.astype(np.uint64), kind, self, other)

    return operate


def _compared(compare: Any) -> Any:
    def faster(original: Operator) -> Operator:
        def operate(self: tl.tensor, other: Any) -> tl.tensor:
            kind = self.dtype
            numbers = _other(other, kind) if kind.name in _NUMPY else None
            if numbers is None:
                return original(self, other)
            return _result(compare(self.handle.data, numbers), tl.int1, self, other)

        return operate

    return faster


def _logical(compute: Any) -> Any:
    """Operations on bits of integers, or on truths; some truths the interpreter keeps as others."""

    def faster(original: Operator) -> Operator:
        def operate(self: tl.tensor, other: Any) -> tl.tensor:
            if type(other) is tl.tensor and self.dtype is tl.int1 and other.dtype is tl.int1:
                a, b = self.handle.data, other.handle.data
                if a.dtype == np.bool_ and b.dtype == np.bool_:
                    return _result(compute(a, b), tl.int1, self, other)
            return of_integers(self, other)

        of_integers = _of_integers(compute)(original)
        return operate

    return faster


def _of_integers(compute: Any) -> Any:
    """Operations on 32-bit and 64-bit integers."""

    def faster(original: Operator) -> Operator:
        def operate(self: tl.tensor, other: Any) -> tl.tensor:
            kind = self.dtype
            if kind is tl.uint32:
                same = type(other) is tl.tensor and other.dtype is kind
                numbers = other.handle.data if same else None
            else:
                numbers = _other(other, kind) if kind.name in _INTEGERS else None
            if numbers is None:
                return original(self, other)
            return _result(compute(self.handle.data, numbers), kind, self, other)

        return operate

    return faster


def _ratio(original: Operator) -> Operator:
    def operate(self: tl.tensor, other: Any) -> tl.tensor:
        kind = self.dtype
        numbers = _other(other, kind) if kind is tl.float32 else None
        if numbers is None:
            return original(self, other)
        return _result(self.handle.data / numbers, kind, self, other)

    return operate


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Divide integers and round to zero, as on a GPU."""
    return (a - np.fmod(a, b)) // b


def _converted(original: Operator) -> Operator:
    """Conversions among integers, truths, float16 and float32, of their values or of their bits."""

    def convert(self: Any, dtype: Any, *others: Any, **options: Any) -> tl.tensor:
        kind = dtype.value if type(dtype) is tl.constexpr else dtype
        of_bits = options == {"bitcast": True}
        if type(self) is not tl.tensor or others or (options and not of_bits):
            return original(self, dtype, *others, **options)
        if self.dtype is kind:
            return self
        data, wanted = self.handle.data, type(kind) is tl.dtype and _CONVERTED.get(kind.name)
        if not wanted or data.dtype != _CONVERTED.get(self.dtype.name, np.bool_):
            return original(self, dtype, **options)
        if of_bits and data.itemsize != np.dtype(wanted).itemsize:
            return original(self, dtype, **options)
        numbers = data.view(wanted) if of_bits else data.astype(wanted)
        scalar = self.type is self.dtype
        return tensor_of(numbers, kind, kind if scalar else block_of(kind, numbers.shape))

    return convert


_CONVERTED = {**_NUMPY, "fp16": np.float16, "uint32": np.uint32}
"""Types of elements that are converted at once, by name; truths can be converted to them."""


def _indexed(original: Operator) -> Operator:
    """Blocks with more dimensions."""

    def index(self: tl.tensor, slices: Any) -> tl.tensor:
        if self.type is self.dtype or type(slices) is not tuple:
            return original(self, slices)
        if not all(each is None or (type(each) is slice and each == _WHOLE) for each in slices):
            return original(self, slices)
        numbers = self.handle.data[slices]
        return tensor_of(numbers, self.dtype, block_of(self.dtype, numbers.shape))

    return index


_WHOLE = slice(None)


OPERATORS: dict[str, Callable[[Operator], Operator]] = {
    "__add__": _addition,
    "__radd__": _arithmetic(np.add, "add"),
    "__sub__": _arithmetic(np.subtract, "sub"),
    "__rsub__": _difference_from,
    "__mul__": _arithmetic(np.multiply, "mul"),
    "__rmul__": _arithmetic(np.multiply, "mul"),
    "__truediv__": _ratio,
    "__floordiv__": _of_integers(_quotient),
    "__mod__": _of_integers(np.fmod),
    "__lt__": _compared(np.less),
    "__le__": _compared(np.less_equal),
    "__gt__": _compared(np.greater),
    "__ge__": _compared(np.greater_equal),
    "__eq__": _compared(np.equal),
    "__ne__": _compared(np.not_equal),
    "__and__": _logical(np.bitwise_and),
    "__or__": _logical(np.bitwise_or),
    "__xor__": _logical(np.bitwise_xor),
    "__rshift__": _of_integers(np.right_shift),
    "__neg__": _negative,
    "__getitem__": _indexed,
    "to": _converted,
}


def _load(original: Operator) -> Operator:
    """Loads with a mask and a value for the rest, which fit the pointers."""

    def load(pointer: tl.tensor, mask: Any = None, other: Any = None, **options: Any) -> tl.tensor:
        kind = _target(pointer)
        if options or kind is None:
            return original(pointer, mask, other, **options)
        addresses = pointer.handle.data
        shape = addresses.shape
        inside = _mask(mask, pointer)
        rest = _filled(other, kind, shape)
        if inside is None or rest is None or (mask is None and other is not None):
            return original(pointer, mask, other)
        numbers = interpreter._interpreter.load(addresses, inside, rest, rest.dtype)
        return tensor_of(
            numbers, kind, kind if pointer.type is pointer.dtype else block_of(kind, shape)
        )

    return load


def _store(original: Operator) -> Operator:
    """Stores of tensors that have the pointers' type and shape."""

    def store(pointer: tl.tensor, value: Any, mask: Any = None, **options: Any) -> Any:
        kind = _target(pointer)
        fits = type(value) is tl.tensor and value.dtype is kind and value.shape is pointer.shape
        inside = _mask(mask, pointer) if fits and not options and kind is not None else None
        if inside is None:
            return original(pointer, value, mask, **options)
        interpreter._interpreter.store(pointer.handle.data, value.handle.data, inside)
        return None

    return store


def _target(pointer: Any) -> Any:
    """The type of what a pointer points to, or None if it takes the interpreter's own way."""
    if type(pointer) is not tl.tensor or type(pointer.dtype) is not tl.pointer_type:
        return None
    kind = pointer.dtype.element_ty
    return None if kind is tl.int1 or pointer.dtype.const or type(kind) is not tl.dtype else kind


def _mask(mask: Any, pointer: tl.tensor) -> np.ndarray | None:
    """The bits of a mask in the shape of the pointers, or None without a shorter way to them."""
    shape = pointer.handle.data.shape
    if mask is None:
        return _everything(shape)
    if type(mask) is not tl.tensor or mask.dtype is not tl.int1:
        return None
    bits: np.ndarray = mask.handle.data
    if bits.dtype != np.bool_:
        return None
    if bits.shape == shape:
        return bits
    if mask.type is not mask.dtype and bits.ndim != len(shape):
        return None
    if any(a not in (1, b) for a, b in zip(bits.shape, shape[-bits.ndim :], strict=True)):
        return None
    return np.broadcast_to(bits, shape)


@functools.cache
def _everything(shape: tuple[int, ...]) -> np.ndarray:
    return np.ones(shape, np.bool_)


def _filled(other: Any, kind: tl.dtype, shape: tuple[int, ...]) -> np.ndarray | None:
    """The numbers of what is not loaded, or None without a shorter way to them."""
    if type(other) is tl.constexpr:
        other = other.value
    if other is None or (type(other) in (int, float) and other == 0):
        return np.zeros(shape, interpreter._get_np_dtype(kind))
    if kind.name not in _NUMPY:
        return None
    numbers = _other(other, kind)
    return None if numbers is None or numbers.size != 1 else np.full(shape, numbers)


def _where(original: Operator) -> Operator:
    """Choices between tensors of one type, or a tensor and a constant."""

    def where(condition: Any, x: Any, y: Any) -> tl.tensor:
        named = next((v for v in (x, y) if type(v) is tl.tensor and v.dtype.name in _NUMPY), None)
        if named is None or type(condition) is not tl.tensor or condition.dtype is not tl.int1:
            return original(condition, x, y)
        kind = named.dtype
        a, b = _other(x, kind), _other(y, kind)
        bits = condition.handle.data
        if a is None or b is None or bits.dtype != np.bool_:
            return original(condition, x, y)
        scalar = all(type(v) is not tl.tensor or v.type is v.dtype for v in (condition, x, y))
        numbers = np.where(bits, a, b)
        return tensor_of(numbers, kind, kind if scalar else block_of(kind, numbers.shape))

    return where


def _extreme(compute: Any) -> Any:
    """The larger or the smaller of each two numbers."""

    def faster(original: Operator) -> Operator:
        def operate(x: Any, y: Any, **options: Any) -> Any:
            if type(x) is not tl.tensor or x.dtype.name not in _NUMPY or options:
                return original(x, y, **options)
            numbers = _other(y, x.dtype)
            if numbers is None:
                return original(x, y)
            return _result(compute(x.handle.data, numbers), x.dtype, x, y)

        return operate

    return faster


def _range(original: Operator) -> Operator:
    """Consecutive integers; the interpreter has checked the first range of these bounds."""
    checked = set()

    def arange(start: Any, end: Any) -> tl.tensor:
        bounds = tuple([v.value if type(v) is tl.constexpr else v for v in (start, end)])
        if bounds not in checked:
            found = original(start, end)
            checked.add(bounds)
            return found
        numbers = np.arange(*bounds, dtype=np.int32)
        return tensor_of(numbers, tl.int32, block_of(tl.int32, numbers.shape))

    return arange


def _program(original: Operator) -> Operator:
    """The number of the program that runs."""

    def program_id(axis: Any) -> tl.tensor:
        axis = axis.value if type(axis) is tl.constexpr else axis
        if axis not in (0, 1, 2):
            return original(axis)
        numbers = np.array([interpreter.interpreter_builder.grid_idx[axis]], np.int32)
        return tensor_of(numbers, tl.int32, tl.int32)

    return program_id


def _full(original: Operator) -> Operator:
    """Blocks of a constant."""

    def full(shape: Any, value: Any, dtype: Any) -> tl.tensor:
        value, kind = (v.value if type(v) is tl.constexpr else v for v in (value, dtype))
        numbers = None
        if type(kind) is tl.dtype and kind.name in _NUMPY and type(value) in (int, float):
            numbers = _other(value, kind)
        if numbers is None or type(shape) not in (list, tuple) or not shape:
            return original(shape, value, dtype)
        sizes = tuple([size.value if type(size) is tl.constexpr else size for size in shape])
        block = block_of(kind, sizes)
        return tensor_of(np.full(sizes, numbers), kind, block)

    return full


FUNCTIONS: dict[str, Callable[[Operator], Operator]] = {
    "arange": _range,
    "full": _full,
    "program_id": _program,
    "load": _load,
    "store": _store,
    "where": _where,
    "minimum": _extreme(np.minimum),
    "maximum": _extreme(np.maximum),
}
