"""vLLM, with its engine in this process: the scheduler's steps are then the calls of a step."""

from __future__ import annotations

import itertools
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

LAUNCHED_AHEAD = 2  # steps at most that asynchronous scheduling has in flight


class Peer:
    """Continuous batching on token ids."""

    def __init__(self, settings: dict[str, Any]) -> None:
        optional = (
            {}
            if settings["memory_share"] is None
            else {"gpu_memory_utilization": settings["memory_share"]}
        )
        self._engine = vllm.LLM(
            settings["folder"],
            load_format="dummy" if settings["load_format"] == "dummy" else "auto",
            dtype=settings["dtype"],
            skip_tokenizer_init=True,
            max_model_len=settings["max_model_len"],
            max_num_seqs=settings["max_seqs"],
            max_num_batched_tokens=settings["max_batched_tokens"],
            kv_cache_memory_bytes=settings["kv_bytes"],
            quantization=settings["quantization"],
            kv_cache_dtype=settings["kv_cache_dtype"],
            enable_prefix_caching=settings["prefix_caching"],
            seed=0,
            **optional,
        ).llm_engine
        self._max_model_len = settings["max_model_len"]
        self._lasting: list[str] = []  # names of requests without a last token
        self._names = (f"lasting-{number}" for number in itertools.count())
        self.about = {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "format": settings["dtype"],
        }

    def add(self, index: int, prompt: list[int], max_tokens: int) -> None:
        """Queue a request."""
        self._submit(str(index), prompt, max_tokens, RequestOutputKind.FINAL_ONLY)

    def step(self) -> list[tuple[int, int]]:
        """Run one step of the engine."""
        return [
            (int(output.request_id), len(output.outputs[0].token_ids))
            for output in self._engine.step()
            if output.finished
        ]

    def start(self, prompt: list[int]) -> None:
        """Queue a request without a last token."""
        self._lasting.append(next(self._names))
        room = self._max_model_len - len(prompt)
        self._submit(self._lasting[-1], prompt, room, RequestOutputKind.DELTA)

    def decode(self) -> list[str]:
        """Run one step of the engine."""
        return [output.request_id for output in self._engine.step()]

    def stop(self) -> None:
        """End the requests of `start`, and the steps that were launched for them."""
        self._engine.abort_request(self._lasting)
        self._lasting = []
        for _ in range(LAUNCHED_AHEAD):
            self._engine.step()

    def _submit(
        self, name: str, prompt: list[int], max_tokens: int, kind: RequestOutputKind
    ) -> None:
        params = vllm.SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=kind,
        )
        self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
