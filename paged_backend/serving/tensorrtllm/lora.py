"""LoRA adapters by the fields of tensorrtllm_backend's clients.

An adapter is loaded before requests ask for it, under its task's number as its name: ``"7"`` in
``multi_lora.json``, ``lora_modules`` or a load while the server runs is the ``lora_task_id`` 7.
"""

from __future__ import annotations

from paged_backend.serving import fields
from paged_backend.serving.fields import Tensors
from paged_backend.values.errors import InvalidRequest
from paged_backend.values.lora import NOT_ENABLED

_TASK_ID = "lora_task_id"
_WEIGHTS = ("lora_weights", "lora_config")
_BY_NAME = "cannot be used: adapters are loaded by the server, with the lora_task_id as their name"


def lora_values(tensors: Tensors) -> dict[str, str]:
    """Return the parameter that names the adapter of a request, if it asks for one; 0 is none.

    Raises:
        InvalidRequest: the request brings the weights of an adapter.
    """
    for name in _WEIGHTS:
        if name in tensors and tensors[name].any():
            raise InvalidRequest(name, _BY_NAME)
    task_id = fields.single(_TASK_ID, tensors[_TASK_ID]).item() if _TASK_ID in tensors else 0
    return {"lora_name": str(task_id)} if task_id else {}


def lora_error(error: InvalidRequest, tensors: Tensors) -> InvalidRequest:
    """Return the error about an adapter with TensorRT-LLM's text, which its clients look for."""
    if str(error) == NOT_ENABLED:
        return error
    task_id = fields.single(_TASK_ID, tensors[_TASK_ID]).item()
    return InvalidRequest.verbatim(
        _TASK_ID, f"LoRA task {task_id} not found in cache. Please send LoRA weights with request"
    )
