"""OpenVINO GenAI's continuous batching, with a model that optimum exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino  # type: ignore[import-not-found]  # only in the peer's environment
import openvino_genai  # type: ignore[import-not-found]  # only in the peer's environment
import torch
from optimum.intel import OVModelForCausalLM  # type: ignore[import-not-found]
from transformers_peer import load_peer  # type: ignore[import-not-found]  # a file next to this one

# The number format -> hints for inference and for the KV cache. Weights of 8 bits are used with
# arithmetic in float32, and OpenVINO chooses the format of the cache itself.
_HINTS: dict[str, dict[str, object]] = {
    "float32": {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"},
    "bfloat16": {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16"},
    "int8": {"INFERENCE_PRECISION_HINT": "f32"},
}


class Peer:
    """Continuous batching with the prefix cache, on token ids."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(settings["threads"])
        hints = _HINTS[settings["dtype"]]
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = -(-settings["kv_bytes"] // 2**30)  # whole GiB
        scheduler.max_num_seqs = settings["max_seqs"]
        scheduler.enable_prefix_caching = True
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(export(settings)),
            scheduler,
            "CPU",
            {"INFERENCE_NUM_THREADS": settings["threads"], **hints},
        )
        self._handles: dict[int, Any] = {}
        shown = ", ".join(f"{name} {value}" for name, value in hints.items())
        self.about = {
            "openvino-genai": openvino_genai.__version__,
            "openvino": openvino.__version__,
            "format": f"{'int8' if settings['dtype'] == 'int8' else 'float32'} weights, {shown}",
        }

    def add(self, index: int, prompt: list[int], max_tokens: int) -> None:
        """Queue a request."""
        config = openvino_genai.GenerationConfig(
            max_new_tokens=max_tokens, ignore_eos=True, do_sample=False
        )
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        self._handles[index] = self._pipeline.add_request(index, ids, config)

    def step(self) -> list[tuple[int, int]]:
        """Run one step of the pipeline."""
        self._pipeline.step()
        running = openvino_genai.GenerationStatus.RUNNING
        ended = [index for index, handle in self._handles.items() if handle.get_status() != running]
        return [(index, _num_tokens(self._handles.pop(index))) for index in ended]


def export(settings: dict[str, Any]) -> Path:
    """Write the model in OpenVINO's format into the scratch folder and return where."""
    source, target = Path(settings["folder"]), Path(settings["scratch"]) / "openvino"
    if settings["load_format"] == "dummy":
        model = load_peer(source, "dummy", torch.float32, torch.device("cpu"))
        source = Path(settings["scratch"]) / "random"
        model.save_pretrained(source)
    model = OVModelForCausalLM.from_pretrained(
        source, export=True, compile=False, load_in_8bit=settings["dtype"] == "int8"
    )
    model.save_pretrained(target)
    return target


def _num_tokens(handle: Any) -> int:
    (output,) = handle.read_all()
    return len(output.generated_ids)
