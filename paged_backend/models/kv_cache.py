"""The size and shape of the KV cache: fixed blocks of tokens, of one size in every group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch

from paged_backend.models.attention import AttentionLayer, CachedLayer
from paged_backend.models.states import StateSpec
from paged_backend.values.errors import ConfigError, option_error
from paged_backend.values.kv_cache_groups import NO_LAYERS, KVCacheGroup, KVSizes, group_layers

_FP8, _SCALE_BYTES = torch.float8_e4m3fn, 4


class KVScales(Enum):
    """The scales of the stored keys and values: number = stored number * scale."""

    NONE = "none"
    STATIC = "static"  # one for each layer and KV head, from the checkpoint
    TOKEN_HEAD = "token_head"  # one for each token and KV head, stored beside the numbers


@dataclass(frozen=True, slots=True)
class KVCacheFormat:
    """The storage format of keys and values."""

    dtype: torch.dtype
    scales: KVScales = KVScales.NONE

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.").removesuffix("fn").replace("float8", "fp8")
        return name if self.scales is KVScales.NONE else f"{name} with {_SCALES[self.scales]}"


_SCALES = {
    KVScales.STATIC: "the checkpoint's scales",
    KVScales.TOKEN_HEAD: "scales per token and head",
}


def kv_cache_format(
    option: str, layers: Sequence[CachedLayer], supported: Sequence[torch.dtype]
) -> KVCacheFormat:
    """Return the format of the KV cache for a value of the option ``kv_cache_dtype``.

    fp8 uses the scales of the checkpoint. If it has none, each token and head has a scale, so that
    the bytes of a block depend on its tokens only.

    Args:
        option: the value.
        layers: the model's attention layers; none for a model that only keeps states.
        supported: what the platform can store; the first one is the default.

    Raises:
        ConfigError: the platform does not support the dtype, some layers lack scales, the model has
            no layers, or the dtype has 8 bits and some layers keep latent vectors or positions.
    """
    if option == "auto":
        return KVCacheFormat(supported[0])
    if not layers:
        raise option_error(
            "kv_cache_dtype", f"can only be auto for a model without attention; got {option}"
        )
    heads = [layer for layer in layers if isinstance(layer, AttentionLayer)]
    latent = len(heads) < len(layers)
    if option != "bfloat16" and (latent or any(layer.has_positions for layer in heads)):
        kind = "latent attention" if latent else "attention with biases of positions (ALiBi)"
        raise ConfigError(
            f"{kind} cannot have a KV cache in {option}; option kv_cache_dtype can be "
            "bfloat16, or auto if the checkpoint asks for nothing else"
        )
    if option == "bfloat16":
        chosen = KVCacheFormat(torch.bfloat16)
    elif option == "int8_per_token_head":
        chosen = KVCacheFormat(torch.int8, KVScales.TOKEN_HEAD)
    elif option == "fp8_per_token_head":
        chosen = KVCacheFormat(_FP8, KVScales.TOKEN_HEAD)
    else:
        chosen = KVCacheFormat(_FP8, _fp8_scales(heads))
    if chosen.dtype not in supported:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in supported)
        raise ConfigError(
            f"option kv_cache_dtype is {option}; with this device and dtype, keys and values can "
            f"be stored as {names}"
        )
    return chosen


def _fp8_scales(layers: Sequence[AttentionLayer]) -> KVScales:
    has_scales = [None not in (layer.k_scale, layer.v_scale) for layer in layers]
    if all(has_scales):
        return KVScales.STATIC
    if any(has_scales):
        raise ConfigError(
            f"the checkpoint has no k_scale and v_scale for layer {has_scales.index(False)}, but "
            "for others; option kv_cache_dtype can be fp8_per_token_head"
        )
    return KVScales.TOKEN_HEAD


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """The groups of layers, the shape and format of their keys and values, and the block size.

    A block id stands for the same block in all layers of a group. `models.kv_pool.PoolTensor`
    divides the memory of a pool among the layers.

    Attributes:
        groups: the groups of the layers with attention.
        sizes: what each of these layers keeps for a token, by its number.
        block_size: tokens in a block.
        dtype: dtype of the stored numbers.
        scales: scales of the stored numbers.
        states: the states of sequences; None if no layer keeps one.
    """

    groups: tuple[KVCacheGroup, ...]
    sizes: Mapping[int, KVSizes]
    block_size: int
    dtype: torch.dtype
    scales: KVScales = KVScales.NONE
    states: StateSpec | None = None

    @classmethod
    def of(
        cls,
        layers: Sequence[CachedLayer],
        block_size: int,
        stored: KVCacheFormat,
        max_model_len: int,
        groups: tuple[KVCacheGroup, ...] | None = None,
    ) -> KVCacheSpec:
        """Return the spec of a model's attention layers.

        Args:
            layers: the layers; none for a model that only keeps states. Its block tables count
                tokens, and a block takes no bytes.
            block_size: tokens in a block.
            stored: the format of keys and values.
            max_model_len: maximum number of tokens of a sequence.
            groups: the groups of the layers; None for those that suit these layers best.
        """
        if not layers:
            return cls(NO_LAYERS, {}, block_size, stored.dtype, stored.scales)
        sizes = {layer.index: layer.kept for layer in layers}
        if groups is None:
            windows = [layer.window for layer in layers]
            groups = tuple(
                KVCacheGroup(group.window, tuple(layers[place].index for place in group.layers))
                for group in group_layers(windows, max_model_len, list(sizes.values()))
            )
        return cls(groups, sizes, block_size, stored.dtype, stored.scales)

    @property
    def keeps_tokens(self) -> bool:
        """True if layers keep something for tokens."""
        return bool(self.sizes)

    @property
    def is_uniform(self) -> bool:
        """True if all layers keep the same."""
        return len(set(self.sizes.values())) == 1

    @property
    def is_latent(self) -> bool:
        """True if the layers keep latent vectors, which are keys and values in one."""
        return self.keeps_tokens and not any(sizes.value_dim for sizes in self.sizes.values())

    @property
    def group_size(self) -> int:
        """The number of layers in the largest group."""
        return max(len(group.layers) for group in self.groups)

    @property
    def places(self) -> dict[int, KVCachePlace]:
        """The place of each layer, by its number."""
        return {
            layer: KVCachePlace(number, part)
            for number, group in enumerate(self.groups)
            for part, layer in enumerate(group.layers)
        }

    def largest(self, size_of: Callable[[KVSizes], int]) -> int:
        """Return the largest sum over the layers of a group."""
        return max(
            sum(size_of(self.sizes[layer]) for layer in group.layers) for group in self.groups
        )

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block takes in all layers of a group: keys, values and their scales.

        Each of the tensors of a pool has room for the group that needs the most of it.
        """
        numbers = self.largest(lambda sizes: sizes.numbers) * self.dtype.itemsize
        return (numbers + self.largest(self._scale_bytes)) * self.block_size

    @property
    def bytes_per_token(self) -> int:
        """Bytes that the keys and values of one token take in all layers."""
        layers = (self.sizes[layer] for group in self.groups for layer in group.layers)
        return sum(
            sizes.numbers * self.dtype.itemsize + self._scale_bytes(sizes) for sizes in layers
        )

    def _scale_bytes(self, sizes: KVSizes) -> int:
        return sizes.vectors * _SCALE_BYTES if self.scales is KVScales.TOKEN_HEAD else 0


class KVCachePlace(NamedTuple):
    """The place of the keys and values of a layer."""

    group: int  # it uses this group's block table
    part: int  # its place in the group
