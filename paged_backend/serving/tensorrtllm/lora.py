"""LoRA adapters by the fields of tensorrtllm_backend's clients.

An adapter has its task's number as its name: ``"7"`` in ``multi_lora.json``, ``lora_modules`` or a
load while the server runs is the ``lora_task_id`` 7. The first request for a task can bring its
adapter. Requests to the LLM API have the adapter's name and folder, and a number without effect.
"""

from __future__ import annotations

from paged_backend.serving import fields
from paged_backend.serving.fields import Tensors
from paged_backend.serving.requests.brought_adapters import BroughtAdapter
from paged_backend.serving.tensorrtllm.specs import specs
from paged_backend.values.errors import InvalidRequest
from paged_backend.values.lora import NOT_ENABLED, PACKED_CONFIG, PACKED_WEIGHTS

LLM_API_LORA_INPUTS = (
    *specs("TYPE_UINT64", 1, "lora_id"),
    *specs("TYPE_STRING", 1, "lora_name", "lora_path", "lora_ckpt_source"),
)
_TOGETHER = ("lora_id", "lora_name", "lora_path")
_TASK_ID = "lora_task_id"
_OFF = (
    "cannot be used: the option max_request_lora_bytes is 0; the server can load the adapter under "
    "the lora_task_id as its name"
)


def lora_values(tensors: Tensors) -> dict[str, str]:
    """Return the parameters that name the adapter of a request, if it asks for one; 0 is none.

    Raises:
        InvalidRequest: the request lacks a field.
    """
    given = [name in tensors for name in _TOGETHER]
    if any(given):
        if not all(given):
            raise InvalidRequest.verbatim(
                "lora_name", "lora_id, lora_name, and lora_path must all be provided together"
            )
        source = _text("lora_ckpt_source", tensors) if "lora_ckpt_source" in tensors else "hf"
        if source != "hf":
            raise InvalidRequest("lora_ckpt_source", "can only be hf")
        return {name: _text(name, tensors) for name in ("lora_name", "lora_path")}
    task_id = _task_id(tensors)
    return {"lora_name": str(task_id)} if task_id else {}


def brought_adapter(tensors: Tensors, max_bytes: int) -> BroughtAdapter | None:
    """Return the adapter that a request brings; None without one, or if all of it is zero.

    Args:
        tensors: the tensors of a row.
        max_bytes: limit of the adapters that requests may bring; 0 for none.

    Raises:
        InvalidRequest: requests can bring none, or a tensor is missing or has a wrong shape.
    """
    given = [name for name in (PACKED_WEIGHTS, PACKED_CONFIG) if name in tensors]
    given = [name for name in given if tensors[name].any()]
    if not given:
        return None
    if max_bytes == 0:
        raise InvalidRequest(given[0], _OFF)
    for name in (PACKED_WEIGHTS, PACKED_CONFIG):
        if name not in tensors:
            raise InvalidRequest(name, f"is missing; it must come with {given[0]}")
    if not _task_id(tensors):
        raise InvalidRequest(_TASK_ID, f"must be above 0 with {given[0]}")
    weights, config = tensors[PACKED_WEIGHTS], tensors[PACKED_CONFIG]
    if config.ndim != 2 or config.shape[1] != 3:
        raise InvalidRequest(
            PACKED_CONFIG, f"must have the shape [modules, 3], got {list(config.shape)}"
        )
    if weights.ndim != 2 or len(weights) != len(config):
        raise InvalidRequest(
            PACKED_WEIGHTS,
            f"must have a row for each of the {len(config)} rows of {PACKED_CONFIG}, got the shape "
            f"{list(weights.shape)}",
        )
    return BroughtAdapter(str(_task_id(tensors)), weights, config)


def _task_id(tensors: Tensors) -> int:
    """Return the number of the adapter; 0 for none."""
    if _TASK_ID not in tensors:
        return 0
    return int(fields.single(_TASK_ID, tensors[_TASK_ID]))


def _text(name: str, tensors: Tensors) -> str:
    return fields.string(name, tensors[name])


def lora_error(error: InvalidRequest, tensors: Tensors) -> InvalidRequest:
    """Return the error about an adapter with TensorRT-LLM's text, which its clients look for."""
    if str(error) == NOT_ENABLED or _TASK_ID not in tensors:
        return error
    if PACKED_CONFIG in tensors and tensors[PACKED_CONFIG].any():
        return error.renamed(_TASK_ID)  # the request has brought it, so it was found
    return InvalidRequest.verbatim(
        _TASK_ID,
        f"LoRA task {_task_id(tensors)} not found in cache. Please send LoRA weights with request",
    )
