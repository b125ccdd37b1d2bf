"""Static-batch ``transformers.generate``, the peer that every user has."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM

from paged_backend.checkpoint.model_config import load_model_config
from paged_backend.config import EngineConfig
from paged_backend.platforms.select import resolve_dtype
from paged_backend.tools.bench.requests import prompt_ids
from paged_backend.tools.workloads.request import Request


class TransformersPeer:
    """Runs the same checkpoint, or random weights of its shape, in transformers."""

    def __init__(self, folder: Path, config: EngineConfig, device: torch.device) -> None:
        dtype = resolve_dtype(config.dtype, load_model_config(folder).dtype, device)
        self._model = load_peer(folder, config.load_format, dtype, device)
        self._model.generation_config.eos_token_id = None  # generate every requested token
        self._model.generation_config.pad_token_id = 0
        self._device = device

    def output_tokens_per_s(self, requests: list[Request], batch_size: int) -> float:
        """Run the requests in batches, in order; only requested tokens count."""
        self._generate([replace(request, max_tokens=2) for request in requests[:2]])
        total = sum(request.max_tokens for request in requests)
        started = time.perf_counter()
        with tqdm(total=total, unit="token", desc="transformers", leave=False, disable=None) as bar:
            for start in range(0, len(requests), batch_size):
                batch = requests[start : start + batch_size]
                self._generate(batch)
                bar.update(sum(request.max_tokens for request in batch))
        return total / (time.perf_counter() - started)

    @torch.inference_mode()
    def _generate(self, batch: list[Request]) -> None:
        longest = max(len(request.prompt) for request in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):  # decoders are padded on the left
            prompt = torch.tensor(prompt_ids(request))
            ids[row, -len(prompt) :] = prompt
            mask[row, -len(prompt) :] = 1
        self._model.generate(
            ids.to(self._device),
            attention_mask=mask.to(self._device),
            do_sample=False,
            max_new_tokens=max(request.max_tokens for request in batch),
        )


def load_peer(folder: Path, load_format: str, dtype: torch.dtype, device: torch.device) -> Any:
    """Load the checkpoint, or random weights of its shape (`load_format`), in transformers."""
    if load_format == "dummy":
        hf_config = AutoConfig.from_pretrained(folder)
        with device:  # billions of random numbers take minutes on the host
            model = AutoModelForCausalLM.from_config(hf_config, dtype=dtype)  # type: ignore[no-untyped-call]  # untyped in its library
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, use_safetensors=True)
    return model.to(device).eval()
