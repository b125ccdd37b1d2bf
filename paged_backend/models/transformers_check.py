"""The check of a model of transformers over the paged KV cache, before it serves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from paged_backend.models.attention import AttentionBackend, AttentionMetadata
from paged_backend.models.base import Model
from paged_backend.models.kv_cache import KVCacheFormat, KVCacheSpec
from paged_backend.models.layers import Kernels
from paged_backend.values.errors import ConfigError

_LENGTHS, _BLOCK_SIZE = (24, 5), 16


class AttentionKernels(Kernels, Protocol):
    """A platform that can attend over a KV pool."""

    @property
    def kv_dtypes(self) -> Sequence[torch.dtype]:
        """The dtypes in which the attention can store keys and values; the default comes first."""
        ...

    def attention(self, spec: KVCacheSpec, num_blocks: int) -> AttentionBackend:
        """Create an attention backend with a KV pool of `num_blocks` blocks."""
        ...


def rope_limit(config: Any) -> int | None:
    """Return the length of sequences up to which rotary embeddings do not depend on the batch.

    The frequencies of two kinds change with the longest sequence of a batch, so answers would, too.

    Args:
        config: transformers' configuration.

    Returns:
        None if there is no limit.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    ropes = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    limits = {
        "dynamic": lambda rope: config.max_position_embeddings,
        "longrope": lambda rope: rope.get("original_max_position_embeddings", 0),
    }
    found = [limits[kind](rope) for rope in ropes if (kind := rope.get("rope_type")) in limits]
    return min(found, default=None)


def check_rope(config: Any, name: str, max_model_len: int) -> None:
    """Refuse models with rotary embeddings that depend on other sequences of a batch.

    Raises:
        ConfigError: the longest one is too long.
    """
    limit = rope_limit(config)
    if limit is not None and max_model_len > limit:
        raise ConfigError(
            f"option max_model_len must be at most {limit} for {name}, whose rotary embedding of "
            f"longer sequences depends on the batch; got {max_model_len}"
        )


def check_prompts(vocab_size: int, max_model_len: int) -> list[Tensor]:
    """Return the token ids of two prompts, of which the first one fills more than a block."""
    lengths = [min(length, max_model_len) for length in _LENGTHS]
    return [torch.arange(length) * 7 % vocab_size for length in lengths]


def paged_logits(model: Model, prompts: list[Tensor], kernels: AttentionKernels) -> list[Tensor]:
    """Compute the logits of two prompts: part of the first one, then its rest with the second."""
    stored = KVCacheFormat(kernels.kv_dtypes[0])
    layers = model.attention_layers
    spec = KVCacheSpec.of(layers, _BLOCK_SIZE, stored, model.max_model_len)
    num_groups = len(spec.groups)
    attention = kernels.attention(spec, 1 + 4 * num_groups)
    tables = 1 + torch.arange(4 * num_groups, dtype=torch.int32).view(num_groups, 2, 2)
    half = len(prompts[0]) // 2

    def step(ids: Tensor, starts: list[int], counts: list[int]) -> Tensor:
        device = kernels.device
        positions = [torch.arange(a, a + n) for a, n in zip(starts, counts, strict=True)]
        slots = [
            tables[:, seq, here // _BLOCK_SIZE] * _BLOCK_SIZE + here % _BLOCK_SIZE
            for seq, here in enumerate(positions)
        ]
        ends = torch.tensor([0, *counts]).cumsum(0)
        lengths = torch.tensor(starts) + torch.tensor(counts)
        meta = AttentionMetadata(
            query_start_loc=ends.int().to(device),
            seq_lens=lengths.int().to(device),
            block_tables=tables[:, : len(starts)].contiguous().to(device).unbind(),
            slot_mappings=torch.cat(slots, dim=1).long().to(device).unbind(),
            positions=torch.cat(positions).int().to(device),
            num_decodes=0,
        )
        return model.forward(ids.to(device), attention, meta, None)

    first = step(prompts[0][:half], [0], [half])
    rest = len(prompts[0]) - half
    both = step(torch.cat((prompts[0][half:], prompts[1])), [half, 0], [rest, len(prompts[1])])
    return [torch.cat((first, both[:rest])), both[rest:]]


def compare(expected: list[Tensor], actual: list[Tensor], subject: str, *, exact: bool) -> None:
    """Check that numbers agree within a thousandth of the largest, or within a tenth in 16 bits.

    Args:
        expected: computed with the model's own attention.
        actual: computed with ours.
        subject: what the error message says about them.
        exact: whether both were computed in float32.

    Raises:
        ConfigError: they do not.
    """
    bound = 1e-3 if exact else 0.1
    for wanted, found in zip(expected, actual, strict=True):
        error = (wanted.float() - found.float()).abs().max() / wanted.float().abs().max()
        if not error <= bound:
            raise ConfigError(
                f"{subject} differ from those of its own attention by {float(error):.2g} of the "
                "largest"
            )
