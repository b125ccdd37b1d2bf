"""Makes Triton's interpreter faster, with the same results.

Its operations take microseconds for types, wrappers and constants, and nanoseconds for the numbers
of these tests. The common cases take a shorter way here: tensors of one type, and constants.
Everything else takes the interpreter's own way.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import numpy as np
import torch
import triton.language as tl
from interpreter_operations import FUNCTIONS, OPERATORS, Operator
from interpreter_tensors import shape_of, tensor_of
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor


def accelerate() -> None:
    """Patch the interpreter of this process, once."""
    interpreter._patch_lang = _LanguagePatch(interpreter._patch_lang)
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    interpreter._implicit_cvt = _argument(interpreter._implicit_cvt)
    for name, faster in (
        ("binary_op_type_checking_impl", _type_checking),
        ("broadcast_impl_value", _broadcast),
        ("to_tensor", _to_tensor),
        ("cast", _cast),
    ):
        setattr(TritonSemantic, name, faster(getattr(TritonSemantic, name)))
    tl.tensor.__init__ = _init_tensor
    tl.block_type.__init__ = _init_block_type(tl.block_type.__init__)
    tl.core._unwrap_if_constexpr = _unwrap(tl.core._unwrap_if_constexpr)
    GridExecutor.__call__ = _launch


class _LanguagePatch:
    """Replaces members of `triton.language` as the interpreter does, but once for a process.

    The interpreter searches all members for those to replace, at each launch and at each call of a
    device function, and restores them after a launch. Nothing here runs between launches that needs
    the members of the compiler.

    Args:
        search: the interpreter's function, which returns a scope with the replacements.
    """

    def __init__(self, search: Any) -> None:
        self._search = search
        self._modules: dict[Any, frozenset[str]] = {}  # language modules in a function's globals
        self._replaced: set[frozenset[str]] = set()

    def __call__(self, fn: Any) -> None:
        """Replace members for `fn`, a kernel or a device function that a kernel calls."""
        if fn not in self._modules:
            self._modules[fn] = frozenset(
                module.__name__
                for module in (tl, tl.core)
                if any(value is module for value in fn.__globals__.values())
            )
        modules = self._modules[fn]
        if modules not in self._replaced:
            self._replaced.add(modules)
            for owner, name, original in self._search(fn)._changes:
                if tl.core.is_builtin(original):
                    member = _builtin(original)
                    shorter = OPERATORS if owner is tl.tensor else FUNCTIONS
                    setattr(owner, name, shorter[name](member) if name in shorter else member)


def _builtin(original: Any) -> Operator:
    """A function of the language that is called with the interpreter's semantics."""
    inner = getattr(original, "__wrapped__", original)

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return inner(*args, **kwargs)

    return call


def _launch(self: GridExecutor, *args: Any, **kwargs: Any) -> None:
    """Run all programs as the stock executor does, but leave arguments where they are: on a CPU."""
    assert not self.pre_run_hooks
    interpreter._patch_lang(self.fn)
    signature = _signature(self.fn)
    named = {name: value for name, value in kwargs.items() if name in signature.parameters}
    bound = signature.bind(*args, **named)
    bound.apply_defaults()
    values = {
        name: value if name in self.constexprs else interpreter._implicit_cvt(value)
        for name, value in bound.arguments.items()
    }
    grid = self.grid(values) if callable(self.grid) else self.grid
    nx, ny, nz = (*grid, 1, 1)[:3]
    assert len(grid) <= 3
    builder = interpreter.interpreter_builder
    builder.set_grid_dim(nx, ny, nz)
    try:
        for index in np.ndindex(nx, ny, nz):
            builder.grid_idx = index
            self.fn(**values)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


_signature = functools.cache(inspect.signature)


def _argument(original: Any) -> Any:
    """Convert a tensor's address without asking for the name of its type each time."""
    known: dict[torch.dtype, Any] = {}

    def convert(value: Any) -> Any:
        if type(value) is not torch.Tensor:
            return original(value)
        assert value.device.type == "cpu"
        if value.dtype not in known:
            known[value.dtype] = original(value).dtype
        kind = known[value.dtype]
        return tensor_of(np.array([value.data_ptr()], np.uint64), kind, kind)

    return convert


def _by_name(find: Any) -> Any:
    """Remember the result for each type; the stock function builds a table at each call."""
    known: dict[str, Any] = {}

    def find_once(kind: Any) -> Any:
        if kind.name not in known:
            known[kind.name] = find(kind)
        return known[kind.name]

    return find_once


def _init_tensor(self: tl.tensor, handle: Any, kind: Any) -> None:
    """Initialize a tensor as the stock constructor does, but share the shapes of equal sizes."""
    self.handle, self.type, self.dtype = handle, kind, kind.scalar
    self.numel, self.shape = shape_of(tuple(kind.shape) if kind.is_block() else ())


def _type_checking(original: Any) -> Any:
    """Convert neither of two tensors of one type with operations that have this type, too."""

    def check(self: Any, lhs: Any, rhs: Any, *options: Any, **more: Any) -> Any:
        if type(lhs) is tl.tensor and type(rhs) is tl.tensor:
            kind = lhs.dtype
            if kind is rhs.dtype and type(kind) is tl.dtype and kind.name in _KEPT:
                return self.broadcast_impl_value(lhs, rhs)
        return original(self, lhs, rhs, *options, **more)

    return check


_KEPT = frozenset(["fp32", "int32", "int64", "uint32"])
"""Names of the types of which two tensors are not converted."""


def _broadcast(original: Any) -> Any:
    """Return two tensors as they are if they share their shape, before it is compared."""

    def broadcast(self: Any, lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
        return (lhs, rhs) if lhs.shape is rhs.shape else original(self, lhs, rhs)

    return broadcast


def _to_tensor(original: Any) -> Any:
    """Return a tensor as it is; the interpreter asks at each assignment."""

    def convert(self: Any, value: Any, check_type: bool = True) -> Any:
        return value if type(value) is tl.tensor else original(self, value, check_type)

    return convert


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
        return value if kind in _NO_LISTS else original(value)

    return unwrap


_NO_LISTS = frozenset([int, float, bool, str, type(None), slice, tl.tensor, tl.dtype])
"""Types of what neither is a constant nor a list of them."""
