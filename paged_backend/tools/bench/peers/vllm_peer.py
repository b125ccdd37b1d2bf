"""vLLM, with its engine in this process: the scheduler's steps are then the calls of a step."""

from __future__ import annotations

import os
from typing import Any

# vLLM reads these when it is imported. In a separate process, the engine would take time for
# messages; bound threads would all go to one core where vLLM keeps another one free.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"

import torch  # noqa: E402
import vllm  # type: ignore[import-not-found]  # noqa: E402  # only in the peer's environment
from vllm.sampling_params import (  # type: ignore[import-not-found]  # noqa: E402
    RequestOutputKind,
)


class Peer:
    """Continuous batching with the prefix cache, on token ids."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._engine = vllm.LLM(
            settings["folder"],
            load_format="dummy" if settings["load_format"] == "dummy" else "auto",
            dtype=settings["dtype"],
            skip_tokenizer_init=True,
            max_model_len=settings["max_model_len"],
            max_num_seqs=settings["max_seqs"],
            kv_cache_memory_bytes=settings["kv_bytes"],
            enable_prefix_caching=True,
            seed=0,
        ).llm_engine
        self.about = {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "format": settings["dtype"],
        }

    def add(self, index: int, prompt: list[int], max_tokens: int) -> None:
        """Queue a request."""
        params = vllm.SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._engine.add_request(str(index), {"prompt_token_ids": prompt}, params)

    def step(self) -> list[tuple[int, int]]:
        """Run one step of the engine."""
        return [
            (int(output.request_id), len(output.outputs[0].token_ids))
            for output in self._engine.step()
            if output.finished
        ]
