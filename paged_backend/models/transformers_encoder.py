"""Encoders of the BERT family that transformers computes: whole prompts, without a KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paged_backend.checkpoint.classifier import ClassifierSpec
from paged_backend.checkpoint.encoder_config import EncoderConfig
from paged_backend.models.classifier import activate
from paged_backend.models.layers import Kernels
from paged_backend.models.loader import resolve_max_model_len
from paged_backend.models.transformers_attention import NAME, attend_with
from paged_backend.models.transformers_check import (
    check_prompts,
    check_rope,
    compare,
)
from paged_backend.models.transformers_linear import replace_linear_layers, watch_linear_layers
from paged_backend.models.transformers_loading import (
    check_not_quantized,
    load_pretrained,
    refuse_tensors,
    tensor_names,
)
from paged_backend.models.transformers_rows import replace_row_functions
from paged_backend.values.errors import ConfigError
from paged_backend.values.options.model import ModelOptions
from paged_backend.values.validation import shorten

# Buffers that older versions of transformers saved.
_BUFFERS = "position_ids", "token_type_ids", "inv_freq"


class EncoderHead:
    """The head of a reranker; see `models.classifier.Head`.

    Args:
        classifier: transformers' layers, which read the first token of sequences.
        spec: its activation.
    """

    def __init__(self, classifier: nn.Module, spec: ClassifierSpec) -> None:
        self._classifier = classifier
        self._activation = spec.activation

    def __call__(self, pooled: Tensor) -> Tensor:
        """Return scores [rows, 1] float32 for `pooled` [rows, hidden_size] float32."""
        dtype = next(self._classifier.parameters()).dtype
        # Row by row, as torch rounds the result of a row in another way if there are other rows.
        logits = [self._classifier(row.to(dtype).view(1, 1, -1)) for row in pooled]
        return activate(torch.cat(logits).float(), self._activation)


class TransformersEncoder:
    """An encoder on one device, for inference only.

    Args:
        config: the sizes.
        max_model_len: tokens of the longest prompt.
        model: transformers' model, with a head if it is a reranker.
        kernels: the platform.
    """

    def __init__(
        self, config: EncoderConfig, max_model_len: int, model: Any, kernels: Kernels
    ) -> None:
        self.config = config
        self.max_model_len = max_model_len
        self.head: EncoderHead | None = None
        if config.classifier is not None:
            self.head = EncoderHead(model.classifier, config.classifier)
            model = model.base_model
        self._model = model
        self._attention = kernels.prompt_attention
        # Others add a bias to the scores by themselves, so they compute one prompt at a time.
        self._packs = bool(model._supports_attention_backend)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        device: torch.device = self._model.device
        return device

    @torch.inference_mode()
    def own_hidden(self, prompt: Tensor) -> Tensor:
        """Compute the hidden states [tokens, hidden_size] of a prompt with nothing of ours."""
        hidden: Tensor = self._model(prompt[None].to(self.device)).last_hidden_state[0]
        return hidden

    def use_packed_attention(self) -> None:
        """Let `forward` attend to all prompts of a step in one pass, where the model can."""
        if self._packs:
            self._model.set_attn_implementation(NAME)

    @torch.inference_mode()
    def forward(self, input_ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """Compute the last hidden states [num_tokens, hidden_size] of whole prompts.

        Args:
            input_ids: [num_tokens] int64, the prompts one after the other.
            lengths: the number of tokens of each prompt.
        """
        if not self._packs:
            return torch.cat(
                [self.own_hidden(prompt) for prompt in torch.split(input_ids, list(lengths))]
            )
        counts = torch.tensor(lengths, device=input_ids.device)
        with attend_with(self._attention(lengths)):
            output = self._model(
                input_ids=input_ids[None], position_ids=self._positions(input_ids, counts)[None]
            )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def _positions(self, input_ids: Tensor, lengths: Tensor) -> Tensor:
        """Return the position [num_tokens] of each token, as transformers counts them."""
        padding = self.config.padding_id
        counted = torch.ones_like(input_ids) if padding is None else (input_ids != padding).long()
        ends = counted.cumsum(0)
        starts = lengths.cumsum(0) - lengths
        before = (ends - counted)[starts].repeat_interleave(lengths)
        if padding is None:
            return ends - before - 1
        return (ends - before) * counted + padding


def load_encoder(
    options: ModelOptions, config: EncoderConfig, folder: Path, kernels: Kernels
) -> TransformersEncoder:
    """Load the checkpoint in `folder` with transformers.

    Before the model serves, its hidden states in a batch are compared with those of its own
    attention.

    Raises:
        ConfigError: transformers cannot load it, or it cannot compute several prompts at once.
    """
    check_not_quantized(options, folder, config.file)
    limit = config.max_position_embeddings
    if options.max_model_len is None:
        limit = min(limit, config.max_seq_length or limit)
    max_model_len = resolve_max_model_len(options, limit)
    model = load_pretrained(config.architecture, options, folder, kernels, _check_complete)
    check_rope(model.config, config.architecture, max_model_len)
    loaded = TransformersEncoder(config, max_model_len, model, kernels)
    prompts = check_prompts(config.vocab_size, max_model_len)
    try:
        with watch_linear_layers(model) as called:
            loaded.own_hidden(prompts[1])
        replace_linear_layers(model, called.groups(), kernels)  # a head's layers stay
        replace_row_functions(model, kernels.layers)
        expected = [loaded.own_hidden(prompt) for prompt in prompts]
        loaded.use_packed_attention()
        lengths = [len(prompt) for prompt in prompts]
        packed = loaded.forward(torch.cat(prompts).to(kernels.device), lengths)
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        line = " ".join(str(error).split())
        raise ConfigError(
            f"{config.architecture} cannot compute prompts: {shorten(line)}"
        ) from error
    subject = f"{config.architecture} cannot compute several prompts at once: its hidden states"
    compare(
        expected, list(torch.split(packed, lengths)), subject, exact=kernels.dtype == torch.float32
    )
    return loaded


def _check_complete(folder: Path, model: Any, info: dict[str, Any]) -> None:
    """Refuse missing tensors, and tensors of parts that the model has; heads are not needed."""
    for problem in ("missing", "mismatched"):
        refuse_tensors(folder, problem, tensor_names(info, problem))
    prefix = f"{model.base_model_prefix}."
    parts = {name for name, _ in model.named_children()}

    def is_of_model(name: str) -> bool:
        own = name.removeprefix(prefix)
        is_inside = own != name or own.partition(".")[0] in parts
        return is_inside and not own.startswith("pooler.") and not own.endswith(_BUFFERS)

    refuse_tensors(folder, "unexpected", filter(is_of_model, tensor_names(info, "unexpected")))
