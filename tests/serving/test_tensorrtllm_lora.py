"""Adapters by the fields of tensorrtllm_backend's clients."""

from __future__ import annotations

import numpy as np
import pytest

from paged_backend.serving.tensorrtllm.lora import brought_adapter, lora_error, lora_values
from paged_backend.values.errors import InvalidRequest
from paged_backend.values.lora import NOT_ENABLED, unsupported

TASK = {"lora_task_id": np.array([2**63 + 1], np.uint64)}


def test_a_task_id_is_the_name_of_an_adapter():
    assert lora_values(TASK) == {"lora_name": str(2**63 + 1)}
    assert lora_values({"lora_task_id": np.zeros(1, np.uint64)}) == {}
    assert lora_values({}) == {}


def test_a_request_can_bring_an_adapter():
    weights, config = np.ones((2, 8), np.float16), np.array([[1, 0, 1], [4, 0, 1]], np.int32)
    brought = {**TASK, "lora_weights": weights, "lora_config": config}
    adapter = brought_adapter(brought, 1000)
    assert adapter.name == str(2**63 + 1) and adapter.num_bytes == 2 * 8 * 2 + 6 * 4
    assert adapter.weights is weights and adapter.config is config
    assert brought_adapter(TASK, 1000) is None
    nothing = {"lora_weights": np.zeros_like(weights), "lora_config": np.zeros_like(config)}
    assert brought_adapter({**TASK, **nothing}, 0) is None
    for change, said in [
        ({"lora_task_id": np.zeros(1, np.uint64)}, "lora_task_id: must be above 0"),
        ({"lora_task_id": None}, "lora_task_id: must be above 0 with lora_weights"),
        ({"lora_config": None}, "lora_config: is missing; it must come with lora_weights"),
        ({"lora_weights": None}, "lora_weights: is missing; it must come with lora_config"),
        ({"lora_config": config[:, :2]}, r"lora_config: must have the shape \[modules, 3\]"),
        ({"lora_config": config[0]}, "lora_config: must have the shape"),
        ({"lora_weights": weights[:1]}, "lora_weights: must have a row for each of the 2 rows"),
        ({"lora_weights": weights[0]}, "lora_weights: must have a row for each"),
    ]:
        tensors = {name: value for name, value in (brought | change).items() if value is not None}
        with pytest.raises(InvalidRequest, match=said):
            brought_adapter(tensors, 1000)
    with pytest.raises(InvalidRequest, match="lora_weights: .*max_request_lora_bytes is 0"):
        brought_adapter(brought, 0)


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
