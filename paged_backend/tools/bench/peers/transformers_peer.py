"""Static-batch ``transformers.generate``, the peer that every user has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM


class Peer:
    """Runs waiting requests as one batch, padded, until the last of them has its tokens."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(settings["threads"])
        self._device = torch.device(settings["device"])
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


def load_peer(folder: Path, load_format: str, dtype: torch.dtype, device: torch.device) -> Any:
    """Load the checkpoint, or random weights of its shape (`load_format`), in transformers."""
    if load_format == "dummy":
        hf_config = AutoConfig.from_pretrained(folder)
        with device:  # billions of random numbers take minutes on the host
            model = AutoModelForCausalLM.from_config(hf_config, dtype=dtype)  # type: ignore[no-untyped-call]  # untyped in its library
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, use_safetensors=True)
    return model.to(device).eval()
