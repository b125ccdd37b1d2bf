"""Transformers in static batches, the peer that every user has, and in continuous ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

NEW_TOKENS = 128  # the first request of a steady run must last until the last one has begun
CPU_BATCH_TOKENS = 512
CPU_BLOCK = 32  # tokens; no release of transformers has smaller blocks


class Peer:
    """Runs waiting requests as one batch, padded, until the last of them has its tokens."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(settings["threads"])
        self._device = torch.device(settings["device"])
        self._is_cpu = settings["device"] == "cpu"
        dtype = getattr(torch, settings["dtype"])
        self._model = load_peer(
            Path(settings["folder"]), settings["load_format"], dtype, self._device
        )
        self._model.generation_config.eos_token_id = None  # generate every requested token
        self._model.generation_config.pad_token_id = 0
        self._batch: list[tuple[int, list[int], int]] = []
        self.about = {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "format": settings["dtype"],
        }

    def add(self, index: int, prompt: list[int], max_tokens: int) -> None:
        """Put a request into the next batch."""
        self._batch.append((index, prompt, max_tokens))

    @torch.inference_mode()
    def step(self) -> list[tuple[int, int]]:
        """Run the batch to its end."""
        batch, self._batch = self._batch, []
        longest = max(len(prompt) for _, prompt, _ in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, (_, prompt, _) in enumerate(batch):  # decoders are padded on the left
            ids[row, -len(prompt) :] = torch.tensor(prompt)
            mask[row, -len(prompt) :] = 1
        outputs = self._model.generate(
            ids.to(self._device),
            attention_mask=mask.to(self._device),
            do_sample=False,
            max_new_tokens=max(max_tokens for _, _, max_tokens in batch),
        )
        num_new = outputs.shape[1] - longest
        return [(index, min(num_new, max_tokens)) for index, _, max_tokens in batch]

    def steady(self, prompts: list[list[int]]) -> tuple[float, str]:
        """Run prompts of one length with continuous batching.

        Returns:
            Tokens per second while all requests decode, and the name of the attention used.

        Raises:
            RuntimeError: requests failed, or never all decoded at the same time.
        """
        from transformers import ContinuousBatchingConfig, GenerationConfig

        settings = GenerationConfig(  # type: ignore[no-untyped-call]  # untyped in its library
            max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        limits = ContinuousBatchingConfig()
        if self._is_cpu:  # otherwise it allocates most of the machine's memory
            limits.max_batch_tokens = CPU_BATCH_TOKENS
            blocks = -(-(len(prompts[0]) + NEW_TOKENS) // CPU_BLOCK) + 1
            limits.num_blocks = len(prompts) * blocks
        results = self._model.generate_batch(
            prompts,
            generation_config=settings,
            continuous_batching_config=limits,
            record_timestamps=True,
        )
        errors = [result.error for result in results.values() if result.error is not None]
        if errors or len(results) < len(prompts):
            raise RuntimeError(errors[0] if errors else f"only {len(results)} requests have ended")
        rate = steady_rate([result.timestamps for result in results.values()])
        return rate, self._model.config._attn_implementation


def steady_rate(timestamps: list[list[float]]) -> float:
    """Return the tokens per second from the last request's first token to the first one's last.

    Args:
        timestamps: times in seconds at which each request's tokens arrived.

    Raises:
        RuntimeError: there is no such interval.
    """
    begin, end = max(times[0] for times in timestamps), min(times[-1] for times in timestamps)
    if end <= begin:
        raise RuntimeError(f"the first request had its {NEW_TOKENS} tokens before the last began")
    return sum(begin < time <= end for times in timestamps for time in times) / (end - begin)


def load_peer(folder: Path, load_format: str, dtype: torch.dtype, device: torch.device) -> Any:
    """Load the checkpoint, or random weights of its shape (`load_format`), in transformers."""
    if load_format == "dummy":
        hf_config = AutoConfig.from_pretrained(folder)
        with device:  # billions of random numbers take minutes on the host
            model = AutoModelForCausalLM.from_config(hf_config, dtype=dtype)  # type: ignore[no-untyped-call]  # untyped in its library
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, use_safetensors=True)
    return model.to(device).eval()
