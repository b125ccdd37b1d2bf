"""Checkpoints with an MTP layer, and the drafts of transformers for them."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from checkpoints import make_checkpoint
from free_drafts import SeenDrafts
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel


def make_predicting(
    family: str, folder: Path, *, num_likely: int | None = None, **overrides: Any
) -> PreTrainedModel:
    """Save a checkpoint with a random MTP layer; return the model of transformers without it.

    The layer has the shapes of another layer with attention, and its own tensors.

    Args:
        family: see `make_checkpoint`.
        folder: the checkpoint.
        num_likely: number of tokens that are ever likely, of which some are then guessed; None for
            all of them.
        overrides: see `make_checkpoint`.
    """
    if family.startswith("qwen"):  # transformers takes the kinds of modules from the last layer
        overrides["layer_types"] = ["linear_attention"] * 2 + ["full_attention"]
    else:
        overrides["num_nextn_predict_layers"] = 1
    model = make_checkpoint(family, folder, **overrides)
    file, size = folder / "model.safetensors", model.config.hidden_size
    stored, generator = load_file(file), torch.Generator().manual_seed(3)
    layer = layer_like_others(model, stored)
    layout = layout_of(family, model.config.num_hidden_layers)
    own = {f"{name}.weight": torch.empty(size) for name in layout.norms}
    own[f"{layout.projection}.weight"] = torch.empty(size, 2 * size)
    for name, tensor in {**{f"{layout.layer}.{key}": t for key, t in layer.items()}, **own}.items():
        values = torch.empty_like(tensor)
        if name.endswith("weight") and tensor.ndim == 1:
            values.uniform_(0.5, 1.5, generator=generator)
        else:
            deviation = 0.1 if name in own else float(tensor.std())
            values.normal_(0, deviation, generator=generator)
        stored[name] = values
    if num_likely is not None:
        head = stored["lm_head.weight"]
        head[:_FIRST] = head[_FIRST + num_likely :] = 0
    if layout.has_copies:  # nobody reads them
        stored[f"{layout.layer}.embed_tokens.weight"] = stored["model.embed_tokens.weight"].clone()
        stored[f"{layout.layer}.shared_head.head.weight"] = torch.ones(1)
    save_file(stored, file, {"format": "pt"})
    return model


_FIRST = 3  # the first token that may be likely, behind those that end a generation


class Layout(NamedTuple):
    """The names of the layer's modules; `norms` are those of embeddings, states and results."""

    layer: str
    projection: str
    norms: tuple[str, str, str]
    has_copies: bool


def layout_of(family: str, num_layers: int) -> Layout:
    if family.startswith("qwen"):
        norms = "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"
        return Layout("mtp.layers.0", "mtp.fc", norms, has_copies=False)
    layer = f"model.layers.{num_layers}"
    norms = f"{layer}.enorm", f"{layer}.hnorm", f"{layer}.shared_head.norm"
    return Layout(layer, f"{layer}.eh_proj", norms, has_copies=True)


def layer_like_others(model: PreTrainedModel, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a layer with attention, and with experts if any layer has some."""
    layers = [f"model.layers.{number}." for number in range(model.config.num_hidden_layers)]
    parts = ("self_attn.", "mlp.experts." if "mlp.experts." in " ".join(stored) else "mlp.")
    found: dict[str, Tensor] = {}
    for part in parts:
        layer = next(one for one in reversed(layers) if any(f"{one}{part}" in n for n in stored))
        module = f"{layer}{part.partition('.')[0]}."
        names = [name for name in stored if name.startswith(module) or "layernorm" in name]
        found |= {n.removeprefix(layer): stored[n] for n in names if n.startswith(layer)}
    return found


def make_always_right(family: str, folder: Path, **overrides: Any) -> None:
    """Save a checkpoint with an MTP layer that computes the same as the whole model.

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
        # A machine with a GPU may have an earlier release.
        layers = importlib.import_module("transformers.modeling_layers")
        if not hasattr(layers, "MtpModel"):
            pytest.skip("this release of transformers has no MtpModel")
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        config = model.config
        if config.model_type.startswith("qwen"):  # transformers knows no more than the names
            config.num_mtp_layers, config.mtp_layer_types = 1, ["full_attention"]
        else:
            # transformers finds the layer by this list, which has the numbers in real checkpoints.
            number = config.num_hidden_layers
            model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{number}.*"]
        self._model, self._layer = model.eval(), layers.MtpModel.from_pretrained(model).eval()
        self._layer.layers[0].register_forward_hook(self._keep_results)

    def _keep_results(self, layer: torch.nn.Module, inputs: object, results: Tensor) -> None:
        """Keep the hidden states that the layer returns, as transformers returns logits only."""
        self._results = results  # [1, number of inputs, hidden_size]

    @torch.inference_mode()
    def confirm(self, seen: SeenDrafts) -> None:
        """Check that each draft is the likeliest token after all before it.

        Of two that are equally likely but for rounding, it may be either.
        """
        known: list[tuple[list[int], Tensor]] = []  # long texts with their last hidden states
        for tokens, drafts in sorted(seen, key=lambda entry: -len(entry[0])):
            hidden = next((h for text, h in known if text[: len(tokens)] == tokens), None)
            if hidden is None:
                outputs = self._model(torch.tensor([tokens]), output_hidden_states=True)
                hidden = outputs.hidden_states[-1]
                known.append((tokens, hidden))
            self._confirm(tokens[1:], hidden[:, : len(tokens) - 1], drafts)

    def _confirm(self, inputs: list[int], hidden: Tensor, drafts: list[int]) -> None:
        """Check the drafts after a text.

        Args:
            inputs: the text but for its first token.
            hidden: [1, number of inputs, hidden_size] the states of the tokens before the inputs.
            drafts: the drafts.
        """
        for draft in drafts:
            ids = torch.tensor([inputs])
            positions = torch.arange(1, len(inputs) + 1)[None]
            logits = self._layer(ids, hidden, torch.ones_like(ids), positions, None)[1][0, 0]
            assert logits[draft] > logits.max() - 1e-4
            inputs = [*inputs, draft]
            hidden = torch.cat((hidden, self._results[:, -1:]), dim=1)
