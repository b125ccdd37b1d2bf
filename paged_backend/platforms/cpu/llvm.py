"""Code that the emitters of kernels share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils

INT64 = ir.IntType(64)


def shared_function(
    module: Any, name: str, num_arguments: int, emit: Callable[[Any, Sequence[Any]], None]
) -> Any:
    """Return a module's function of this name, which is emitted at its first use.

    Inlining it everywhere would slow compilation.

    Args:
        module: the module that is compiled.
        name: name of the function; equal names stand for equal code.
        num_arguments: number of arguments, which are 64-bit integers.
        emit: emits the code with a builder, for the arguments.
    """
    kind = ir.FunctionType(ir.VoidType(), [INT64] * num_arguments)
    function = cgutils.get_or_insert_function(module, kind, name)
    if function.is_declaration:
        function.linkage = "linkonce_odr"
        function.attributes.add("noinline")
        builder = ir.IRBuilder(function.append_basic_block())
        emit(builder, function.args)
        builder.ret_void()
    return function


def call_one(
    builder: Any, key: Any, functions: Mapping[int, Any], arguments: Sequence[Any]
) -> None:
    """Emit a call of the function for a key; other keys do nothing."""
    done = builder.append_basic_block()
    switch = builder.switch(key, done)
    for value, function in functions.items():
        block = builder.append_basic_block()
        switch.add_case(INT64(value), block)
        with builder.goto_block(block):
            builder.call(function, arguments)
            builder.branch(done)
    builder.position_at_end(done)
