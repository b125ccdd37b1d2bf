"""LoRA adapters by the fields of tensorrtllm_backend's clients.

An adapter is loaded before requests ask for it, under its task's number as its name: ``"7"`` in
``multi_lora.json``, ``lora_modules`` or a load while the server runs is the ``lora_task_id`` 7.
Requests to the LLM API have the adapter's name and folder instead, and a number without effect.
"""

from __future__ import annotations

from paged_backend.serving import fields
from paged_backend.serving.fields import Tensors
from paged_backend.serving.tensorrtllm.specs import specs
from paged_backend.values.errors import InvalidRequest
from paged_backend.values.lora import NOT_ENABLED

LLM_API_LORA_INPUTS = (
    *specs("TYPE_UINT64", 1, "lora_id"),
    *specs("TYPE_STRING", 1, "lora_name", "lora_path", "lora_ckpt_source"),
)
_TOGETHER = ("lora_id", "lora_name", "lora_path")
_TASK_ID = "lora_task_id"
_WEIGHTS = ("lora_weights", "lora_config")
_BY_NAME = "cannot be used: adapters are loaded by the server, with the lora_task_id as their name"


def lora_values(tensors: Tensors) -> dict[str, str]:
    """Return the parameters that name the adapter of a request, if it asks for one; 0 is none.

    Raises:
        InvalidRequest: the request brings the weights of an adapter, or lacks a field.
    """
    for name in _WEIGHTS:
        if name in tensors and tensors[name].any():
            raise InvalidRequest(name, _BY_NAME)
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
    task_id = fields.single(_TASK_ID, tensors[_TASK_ID]).item() if _TASK_ID in tensors else 0
    return {"lora_name": str(task_id)} if task_id else {}


def _text(name: str, tensors: Tensors) -> str:
    return fields.string(name, tensors[name])


def lora_error(error: InvalidRequest, tensors: Tensors) -> InvalidRequest:
    """Return the error about an adapter with TensorRT-LLM's text, which its clients look for."""
    if str(error) == NOT_ENABLED or _TASK_ID not in tensors:
        return error
    task_id = fields.single(_TASK_ID, tensors[_TASK_ID]).item()
    return InvalidRequest.verbatim(
        _TASK_ID, f"LoRA task {task_id} not found in cache. Please send LoRA weights with request"
    )
