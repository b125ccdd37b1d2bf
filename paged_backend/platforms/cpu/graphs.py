"""Graphs of a CPU: what a step has computed, to compute it again without its Python code.

The Python code of a decode step of a small model takes a third of the step's time. A graph is the
list of the kernels and of torch's operations that a function has run, with their arguments. It
reads its inputs, and writes its result, where they were when it was captured, like a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paged_backend.platforms.cpu.arena import Arena, ArenaFull
from paged_backend.platforms.cpu.threads import JobList, KernelRun, recorded_jobs

_aten = torch.ops.aten
_ALLOCATIONS = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
_HOST_READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Graph:
    """A captured function.

    Args:
        parts: what it runs, in order.
        result: what it has returned.
    """

    def __init__(self, parts: Sequence[_Part], result: Tensor) -> None:
        self._parts = parts
        self._result = result

    def replay(self) -> Tensor:
        """Compute the result again from the present inputs; the tensor is the same each time."""
        for part in self._parts:
            part.run()
        return self._result


def capture(function: Callable[[], Tensor], arena: Arena) -> tuple[Tensor, Graph | None]:
    """Run a function once, and capture what it runs.

    Its code must do the same at each call: what it caches must have been made by an earlier call.
    All graphs of an arena overwrite the results of each other.

    Args:
        function: works on tensors that stay where they are.
        arena: the memory of the tensors that it allocates.

    Returns:
        Its result, and the graph. There is none if the code may depend on values of tensors, or
        if the arena is too small.
    """
    arena.restart()
    recorder = _Recorder(arena)
    with recorder, recorded_jobs(recorder.steps):
        result = function()
    if not recorder.is_complete:
        return result, None
    parts: list[_Part] = []
    for kind, steps in groupby(recorder.steps, type):
        if kind is KernelRun:
            parts.append(JobList([step for step in steps if isinstance(step, KernelRun)]))
        else:
            parts += [step for step in steps if isinstance(step, _Operation)]
    return result, Graph(parts, result)


class _Part(Protocol):
    def run(self) -> None:
        """Compute again."""
        ...


class _Operation:
    """An operation of torch with its arguments, and the tensors that it has returned."""

    def __init__(self, function: Any, args: Any, kwargs: Any, outputs: list[Tensor]) -> None:
        self._function = function
        self._args, self._kwargs = args, kwargs
        self._outputs = outputs

    def run(self) -> None:
        """Compute again, and store the outputs where the first ones are."""
        outputs = _tensors(self._function(*self._args, **self._kwargs))
        for output, place in zip(outputs, self._outputs, strict=True):
            if output.data_ptr() != place.data_ptr():  # it is not computed in place
                place.copy_(output)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in its library
    """Sees each operation of torch within its `with` block.

    Attributes:
        steps: the jobs of kernels and the operations so far.
        is_complete: False if the steps do not repeat all that was computed.
    """

    def __init__(self, arena: Arena) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in its library
        self._arena = arena
        self.steps: list[KernelRun | _Operation] = []
        self.is_complete = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, as torch's compiler, which would be told, takes a second to import."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in _ALLOCATIONS:
            return self._in_arena(result)
        inputs = [*_tensors(args), *_tensors(list(kwargs.values()))]
        if not func._schema.is_mutable and _share_memory(_tensors(result), inputs):
            return result  # views of an input
        if _reads_values(func) and not _is_lookup(func, inputs):
            self.is_complete = False
        self.steps.append(_Operation(func, args, kwargs, _tensors(result)))
        return result

    def _in_arena(self, tensor: Tensor) -> Tensor:
        """Return memory of the arena in place of memory that torch has allocated."""
        if self.is_complete and tensor.is_contiguous():
            try:
                return self._arena.empty(tuple(tensor.shape), tensor.dtype)
            except ArenaFull:
                pass
        self.is_complete = False
        return tensor


def _reads_values(function: Any) -> bool:
    """Return True if an operation's result has values or a shape that depend on other values."""
    # torch does not tag the second one, which is `nonzero(as_tuple=True)`.
    return bool(_HOST_READS.intersection(function.tags)) or function is _aten.nonzero_numpy.default


def _is_lookup(function: Any, inputs: list[Tensor]) -> bool:
    """Return True for rows that are chosen by integers: there are as many as integers."""
    return function is _aten.index.Tensor and all(x.dtype != torch.bool for x in inputs[1:])


def _share_memory(outputs: list[Tensor], inputs: list[Tensor]) -> bool:
    places = {x.untyped_storage().data_ptr() for x in inputs}
    return bool(outputs) and all(x.untyped_storage().data_ptr() in places for x in outputs)


def _tensors(values: Any) -> list[Tensor]:
    """Return the tensors among arguments or results of an operation."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, list | tuple):
        return [tensor for value in values for tensor in _tensors(value)]
    return []
