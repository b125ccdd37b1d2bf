"""The shares of a checkpoint's tensors that the ranks of a group have.

A model's shape is divided once (`divide`), and both shapes list their tensors
(`checkpoint.decoder_tensors`). A rank's share of a tensor follows from the two sizes of the
dimension `TensorSpec.shard`, so that no family and no layer says it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paged_backend.checkpoint.layer_sizes import LayerSizes
from paged_backend.checkpoint.mixer_shares import divide_mixers, part_of
from paged_backend.checkpoint.model_config import ModelConfig
from paged_backend.checkpoint.moe import ExpertLayout, MoeShape
from paged_backend.checkpoint.registry import tensors_of
from paged_backend.checkpoint.tensors import Role, TensorSpec
from paged_backend.checkpoint.tied_embeddings import EMBEDDING, OUTPUT_LAYER


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a checkpoint's tensor that a rank has.

    Attributes:
        whole: shape of the tensor in the checkpoint.
        shape: shape of the part.
        dim: the dimension that is divided; None for a bias that another rank adds, of which this
            rank has zeros.
        pieces: start and size of each piece of that dimension, one after the other in the part.
            Empty if other ranks have the whole tensor.
    """

    whole: tuple[int, ...]
    shape: tuple[int, ...]
    dim: int | None
    pieces: tuple[tuple[int, int], ...] = ()

    @property
    def is_elsewhere(self) -> bool:
        """Whether other ranks have the whole tensor."""
        return self.dim is not None and not self.pieces

    def take(self, tensor: Tensor) -> Tensor:
        """Return the part of a tensor of the whole shape; a view of it if there is one piece."""
        if self.dim is None:
            return torch.zeros_like(tensor)
        parts = [tensor.narrow(self.dim, *piece) for piece in self.pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)


Shares = Mapping[str, Share]
"""Shares by the checkpoint's names of the tensors; a rank has the others as a whole."""


def divide(config: ModelConfig, num_ranks: int, *, by_expert: bool) -> ModelConfig:
    """Return the shape of the part of a model that each of several ranks computes.

    Its vocabulary and its number of experts are those of the whole model. If there are fewer heads
    of keys and values than ranks, several ranks have the same one.

    Args:
        config: the whole model.
        num_ranks: number of all ranks.
        by_expert: each rank has some of the experts, and not a part of each of them.

    Raises:
        ConfigError: a size does not divide.
    """
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if config.attention_layers:
        heads = part_of(heads, num_ranks, "heads of queries")
        kv_heads = _kv_heads(kv_heads, num_ranks)
    moe = None if config.moe is None else _divide_experts(config.moe, num_ranks, by_expert)
    moe_layers = config.variant.moe_layers or (True,)
    has_mlp = config.moe is None or config.moe.beside_mlp or not all(moe_layers)
    has_mlp &= any(map(config.variant.has_mlp, range(config.num_layers)))
    has_mlp |= config.variant.shared_blocks is not None
    inner = config.intermediate_size
    layers = tuple(_divide_layer(layer, num_ranks) for layer in config.variant.layers)
    return replace(
        config,
        num_heads=heads,
        num_kv_heads=kv_heads,
        intermediate_size=part_of(inner, num_ranks, "intermediate_size") if has_mlp else inner,
        variant=replace(
            config.variant,
            moe=moe,
            state_mixers=divide_mixers(config.variant.state_mixers, num_ranks),
            layers=layers,
        ),
    )


def _divide_layer(sizes: LayerSizes, num_ranks: int) -> LayerSizes:
    return replace(
        sizes,
        num_kv_heads=_kv_heads(sizes.num_kv_heads, num_ranks),
        intermediate_size=part_of(sizes.intermediate_size, num_ranks, "intermediate_size"),
    )


def _divide_experts(moe: MoeShape, num_ranks: int, by_expert: bool) -> MoeShape:
    inner = moe.intermediate_size
    if by_expert:
        part_of(moe.num_experts, num_ranks, "experts")
    else:
        inner = part_of(inner, num_ranks, "intermediate size of an expert")
    shared = moe.shared_expert
    if shared is not None:
        size = part_of(shared.intermediate_size, num_ranks, "intermediate size of a shared expert")
        shared = replace(shared, intermediate_size=size)
    return replace(moe, intermediate_size=inner, shared_expert=shared)


def _kv_heads(number: int, num_ranks: int) -> int:
    if num_ranks > number and num_ranks % number == 0:
        return 1
    return part_of(number, num_ranks, "heads of keys and values")


def shares_of(
    whole: ModelConfig, part: ModelConfig, rank: int, num_ranks: int, *, by_expert: bool
) -> Shares:
    """Return what a rank has of each tensor that is divided.

    Args:
        whole: the model in the checkpoint.
        part: the result of `divide`.
        rank: number of the rank, counted from 0.
        num_ranks: number of all ranks.
        by_expert: see `divide`.
    """
    shares = dict(_shares_of_tensors(whole, part, rank, num_ranks))
    if whole.moe is not None and by_expert:
        shares |= _shares_of_experts(whole, whole.moe.num_experts, rank, num_ranks)
    elif whole.moe is not None and whole.moe.names.is_fused:  # may be separated as they are read
        separate = _with_separate_experts(whole), _with_separate_experts(part)
        shares |= _shares_of_tensors(*separate, rank, num_ranks)
    if whole.tied_embeddings and EMBEDDING in shares:  # some files have it by the other name
        shares[OUTPUT_LAYER] = shares[EMBEDDING]
    for index in range(whole.num_layers):  # the scales of a KV cache, of which there may be none
        heads, local_heads = (shape.sizes_of(index).num_kv_heads for shape in (whole, part))
        piece = _piece(heads, local_heads, rank, num_ranks)
        for kind in ("k_scale", "v_scale"):
            name = f"model.layers.{index}.self_attn.{kind}"
            shares[name] = Share((heads,), (local_heads,), 0, (piece,))
    return shares


def _shares_of_tensors(
    whole: ModelConfig, part: ModelConfig, rank: int, num_ranks: int
) -> Iterator[tuple[str, Share]]:
    parts = tensors_of(part)
    for name, spec in tensors_of(whole).items():
        local = parts[name]
        if spec.role in (Role.EMBEDDING, Role.HEAD) and spec.shard is not None:
            if spec.shape[0] % num_ranks == 0:  # otherwise each rank has the whole vocabulary
                rows = spec.shape[0] // num_ranks
                yield name, Share(spec.shape, (rows, *spec.shape[1:]), 0, ((rank * rows, rows),))
        elif spec.is_added_once:
            if rank > 0:
                yield name, Share(spec.shape, spec.shape, None)
        elif spec.shard is not None and local.shape != spec.shape:
            pieces = _pieces(spec, local, rank, num_ranks)
            yield name, Share(spec.shape, local.shape, spec.shard, pieces)


def _shares_of_experts(
    whole: ModelConfig, num_experts: int, rank: int, num_ranks: int
) -> Iterator[tuple[str, Share]]:
    count = num_experts // num_ranks
    own = range(rank * count, (rank + 1) * count)
    for name, spec in tensors_of(whole).items():
        if spec.experts is None:
            continue
        if len(spec.experts) > 1:
            shape = count, *spec.shape[1:]
            yield name, Share(spec.shape, shape, 0, ((own.start, count),))
        elif spec.experts.start in own:
            yield name, Share(spec.shape, spec.shape, 0, ((0, spec.shape[0]),))
        else:
            yield name, Share(spec.shape, (0,), 0)


def _with_separate_experts(config: ModelConfig) -> ModelConfig:
    assert config.moe is not None
    moe = replace(config.moe, names=replace(config.moe.names, layout=ExpertLayout.SEPARATE))
    return replace(config, variant=replace(config.variant, moe=moe))


def _pieces(
    whole: TensorSpec, part: TensorSpec, rank: int, num_ranks: int
) -> tuple[tuple[int, int], ...]:
    assert whole.shard is not None
    sections = whole.sections or (whole.shape[whole.shard],)
    local_sections = part.sections or (part.shape[whole.shard],)
    pieces, start = [], 0
    for size, local in zip(sections, local_sections, strict=True):
        first, count = _piece(size, local, rank, num_ranks)
        pieces.append((start + first, count))
        start += size
    return tuple(pieces)


def _piece(size: int, local: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """Return start and size of a rank's piece; neighbors have the same one if there are few."""
    return rank * (size // local) // num_ranks * local, local
