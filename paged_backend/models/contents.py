"""What a model holds once it is packed: bytes of tensors, and forms of quantized weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType, ModuleType

from torch import Tensor

from paged_backend.models.quantized_linear import QuantizedLinear

_CODE = (type, ModuleType, FunctionType, MethodType)


def held_bytes(model: object) -> int:
    """Return the bytes of all tensors of a packed model: weights, scales and rotary tables."""
    tensors = [item for item in _contents(model) if isinstance(item, Tensor)]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def weight_forms(model: object) -> dict[str, int]:
    """Return the number of quantized layers of a packed model, by the forms of their weights."""
    layers = (item for item in _contents(model) if isinstance(item, QuantizedLinear))
    return dict(Counter(layer.form.value if layer.form else "dequantized" for layer in layers))


def _contents(root: object) -> Iterator[object]:
    """Yield each object that can be reached through attributes and collections, once."""
    seen: dict[int, object] = {}  # the objects stay alive, so that no two have the same id
    waiting = [root]
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, _CODE):
            continue
        seen[id(item)] = item
        yield item
        if not isinstance(item, Tensor):
            waiting.extend(_parts(item))


def _parts(item: object) -> Iterator[object]:
    if isinstance(item, Mapping):
        yield from item.values()
    elif isinstance(item, list | tuple):
        yield from item
    else:
        yield from getattr(item, "__dict__", {}).values()
        slots = (name for kind in type(item).__mro__ for name in getattr(kind, "__slots__", ()))
        yield from (getattr(item, name) for name in slots if hasattr(item, name))
