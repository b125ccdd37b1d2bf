"""Checkpoints with a layer that predicts one more token, and transformers' own drafts of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from checkpoints import make_checkpoint
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import MtpModel


def make_predicting(family: str, folder: Path, **overrides: Any) -> PreTrainedModel:
    """Save a checkpoint with a random layer that predicts; return transformers' model of the rest.

    The layer has the tensors of the layer before it, and its own.
    """
    model = make_checkpoint(family, folder, num_nextn_predict_layers=1, **overrides)
    number, size = model.config.num_hidden_layers, model.config.hidden_size
    file = folder / "model.safetensors"
    stored = load_file(file)
    last = re.compile(rf"model\.layers\.{number - 1}\.(.*)")
    names = [match[1] for match in map(last.fullmatch, stored) if match]
    generator = torch.Generator().manual_seed(3)
    layer = {name: stored[f"model.layers.{number - 1}.{name}"] for name in names}
    layer |= {name: torch.empty(size) for name in _NORMS}
    layer["eh_proj.weight"] = torch.empty(size, 2 * size)
    for name, tensor in layer.items():
        values = torch.empty_like(tensor)
        if name.endswith("norm.weight"):
            values.uniform_(0.5, 1.5, generator=generator)
        else:
            values.normal_(0, float(tensor.std()) if name in names else 0.1, generator=generator)
        stored[f"model.layers.{number}.{name}"] = values
    # Files have copies of these two, which nobody reads.
    copies = {"embed_tokens.weight": stored["model.embed_tokens.weight"].clone()}
    copies["shared_head.head.weight"] = torch.ones(1)
    stored |= {f"model.layers.{number}.{name}": tensor for name, tensor in copies.items()}
    save_file(stored, file, {"format": "pt"})
    return model


_NORMS = ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")


def make_always_right(family: str, folder: Path, **overrides: Any) -> None:
    """Save a checkpoint of which the layer that predicts computes what the whole model computes.

    Attention, and all layers but the last one, add nothing; so the last token decides.
    """
    make_predicting(family, folder, **overrides)
    number = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    file = folder / "model.safetensors"
    stored = load_file(file)
    embeddings = stored["model.embed_tokens.weight"]
    embeddings /= embeddings.square().mean(1, keepdim=True).sqrt()
    for name, tensor in stored.items():
        is_last = name.startswith((f"model.layers.{number}.", f"model.layers.{number - 1}."))
        if name.endswith(("o_proj.weight", "o_proj.bias")):
            tensor.zero_()
        elif "down_proj" in name and not is_last:
            tensor.zero_()
        copied = name.replace(f"model.layers.{number}.", f"model.layers.{number - 1}.")
        if copied in stored:
            tensor.copy_(stored[copied])
    layer = f"model.layers.{number}."
    stored[f"{layer}shared_head.norm.weight"].copy_(stored["model.norm.weight"])
    stored[f"{layer}enorm.weight"].fill_(1)
    projection = stored[f"{layer}eh_proj.weight"]
    projection.zero_()[:, : len(projection)] = torch.eye(len(projection))
    save_file(stored, file, {"format": "pt"})


class DraftOracle:
    """transformers' own layer of a checkpoint, in float32."""

    def __init__(self, folder: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        number = model.config.num_hidden_layers
        # transformers finds the layer by this list, which has the numbers in the real checkpoints.
        model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{number}.*"]
        self._model, self._layer = model.eval(), MtpModel.from_pretrained(model).eval()

    @torch.inference_mode()
    def drafts(self, tokens: list[int], number: int) -> list[int]:
        """The likeliest tokens after some, which the layer predicts one from the other."""
        ids = torch.tensor([tokens])
        outputs = self._model(ids[:, :-1], output_hidden_states=True)
        hidden, found = outputs.hidden_states[-1], []
        ids = ids[:, 1:]
        for _ in range(number):
            positions = torch.arange(1, ids.shape[1] + 1)[None]
            results = self._layer.forward_layer(0, hidden, positions, None, input_ids=ids)
            token = self._layer._project_to_logits(results[:, -1:])[0, 0].argmax()
            found.append(int(token))
            ids = torch.cat((ids, token.view(1, 1)), dim=1)
            hidden = torch.cat((hidden, results[:, -1:]), dim=1)
        return found
