"""Adapters by the fields of tensorrtllm_backend's clients."""

from __future__ import annotations

import numpy as np
import pytest

from paged_backend.serving.tensorrtllm.lora import lora_error, lora_values
from paged_backend.values.errors import InvalidRequest
from paged_backend.values.lora import NOT_ENABLED, unsupported

TASK = {"lora_task_id": np.array([2**63 + 1], np.uint64)}


def test_a_task_id_is_the_name_of_an_adapter():
    assert lora_values(TASK) == {"lora_name": str(2**63 + 1)}
    assert lora_values({"lora_task_id": np.zeros(1, np.uint64)}) == {}
    assert lora_values({}) == {}


@pytest.mark.parametrize("name", ["lora_weights", "lora_config"])
def test_weights_in_a_request_are_refused_with_the_reason(name):
    message = f"{name}: cannot be used: adapters are loaded by the server"
    with pytest.raises(InvalidRequest, match=message):
        lora_values({**TASK, name: np.ones((2, 3), np.float16)})


def strings(**values):
    return {name: np.array([value.encode()], object) for name, value in values.items()}


def test_requests_of_the_llm_api_have_a_name_and_a_folder():
    given = {"lora_id": np.ones(1, np.uint64), **strings(lora_name="sql", lora_path="/sql")}
    assert lora_values(given) == {"lora_name": "sql", "lora_path": "/sql"}
    assert lora_values({**given, **strings(lora_ckpt_source="hf")})["lora_name"] == "sql"
    with pytest.raises(InvalidRequest, match="lora_ckpt_source: can only be hf"):
        lora_values({**given, **strings(lora_ckpt_source="nemo")})
    for name in given:
        with pytest.raises(InvalidRequest, match="must all be provided together"):
            lora_values({other: value for other, value in given.items() if other != name})


def test_an_unknown_task_has_the_text_of_tensorrtllm():
    error = InvalidRequest.verbatim("lora_name", unsupported("x", ["7"]))
    assert str(lora_error(error, TASK)) == (
        f"LoRA task {2**63 + 1} not found in cache. Please send LoRA weights with request"
    )
    disabled = InvalidRequest.verbatim("lora_name", NOT_ENABLED)
    assert lora_error(disabled, TASK) is disabled
