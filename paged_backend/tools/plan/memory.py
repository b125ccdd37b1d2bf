"""The division of GPU memory between weights, steps and KV blocks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from paged_backend.checkpoint.mixer_shares import divide_mixers
from paged_backend.checkpoint.mixers import StateMixer
from paged_backend.checkpoint.shape import ModelShape
from paged_backend.checkpoint.stages import Stage
from paged_backend.checkpoint.tensors import Role
from paged_backend.tools.plan.gpus import MIB, Gpu
from paged_backend.tools.plan.groups import Group
from paged_backend.tools.plan.number_types import KvType, WeightType
from paged_backend.tools.plan.sizes import KvSizes, count_parameters, state_bytes
from paged_backend.values.errors import ConfigError
from paged_backend.values.kv_cache_groups import (
    KVCacheGroup,
    KVCacheLayout,
    StateLayout,
    most_state_slots,
    num_empty_blocks,
    num_state_slots,
)
from paged_backend.values.options.scheduling import StepLimits

MAX_GPUS = 64  # maximum number that may share one model
CONTEXT_BYTES = 512 * MIB  # used by the CUDA context and its libraries
_NULL_BLOCKS = 1  # the pool's first block is never allocated


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes used on each GPU, and the pool of KV blocks that the GPUs hold together."""

    group: Group
    num_gpus: int
    weight_bytes: int
    step_bytes: int  # an estimate; the engine measures it when it starts
    pool_bytes: int
    state_bytes: int  # slots for states of sequences
    num_blocks: int  # available to sequences
    layout: KVCacheLayout  # with slots for states if they limit the number of sequences

    @property
    def num_slots(self) -> int:
        """The number of tokens that fit in all blocks, without windows."""
        return self.num_blocks // self.layout.num_groups * self.layout.block_size

    def num_sequences(self, num_tokens: int) -> int:
        """Return the number of sequences of `num_tokens` tokens that fit at once."""
        return self.layout.num_sequences(self.num_blocks, num_tokens)

    def limited(self, num_sequences: int) -> int:
        """Return a number of sequences, or less if memory has fewer slots for their states."""
        states = self.layout.states
        return num_sequences if states is None else min(num_sequences, states.num_sequences)


@dataclass(frozen=True, slots=True)
class MemoryPlanner:
    """Divides the memory of a group of identical GPUs."""

    shape: ModelShape
    weights: WeightType
    kv: KvType
    gpu: Gpu
    gpu_memory_utilization: float
    block_size: int
    limits: StepLimits
    max_model_len: int

    def divide(self, group: Group) -> Memory:
        """Divide the memory of a group's GPUs; the resulting pool may be empty."""
        weights = self._weight_bytes(group)
        step = self._step_bytes()
        usable = int(self.gpu.memory_bytes * self.gpu_memory_utilization)
        pool = max(0, usable - CONTEXT_BYTES - weights - step)
        sizes = KvSizes.of(self.shape, self.kv, group.tensor)
        groups = sizes.groups(self.max_model_len)
        slots, slot_bytes = self._slots_of_states(group, pool)
        has_few_slots = slots < most_state_slots(self.limits.max_num_seqs) or not sizes.layers
        layout = KVCacheLayout(
            self.block_size,
            self.limits.max_num_batched_tokens,
            tuple(group.window for group in groups),
            StateLayout(slots, 0) if self.shape.variant.state_mixers and has_few_slots else None,
        )
        blocks, left = math.inf, pool
        for stage, size in slot_bytes.items():
            room = pool - slots * size
            left = min(left, room)
            block_bytes = sizes.block_bytes(self._groups_of_stage(sizes, stage), self.block_size)
            if block_bytes:
                blocks = min(blocks, max(0, room // block_bytes - _NULL_BLOCKS))
        if not sizes.layers:
            blocks = num_empty_blocks(layout, slots, self.max_model_len) - _NULL_BLOCKS
            left = 0
        states = slots * max(slot_bytes.values())
        return Memory(group, group.num_gpus, weights, step, left, states, int(blocks), layout)

    def least(self, groups: Iterable[Group], num_tokens: int, num_sequences: int) -> Memory | None:
        """Divide the memory of the first group that fits `num_sequences` sequences at once.

        Returns None if none of them does.
        """
        for group in groups:
            memory = self.divide(group)
            if memory.num_sequences(num_tokens) >= num_sequences:
                return memory
        return None

    def _groups_of_stage(self, sizes: KvSizes, stage: Stage) -> tuple[KVCacheGroup, ...]:
        """The groups with the places of layers among those that keep something for tokens."""
        if len(stage.layers) == stage.num_layers:
            return sizes.groups(self.max_model_len)
        numbers = self.shape.keeping_layers
        first = sum(number < stage.layers.start for number in numbers)
        count = sum(number in stage.layers for number in numbers)
        return sizes.groups(self.max_model_len, range(first, first + count))

    def _slots_of_states(self, group: Group, pool: int) -> tuple[int, dict[Stage, int]]:
        """Return the number of slots for states of sequences, and the bytes of a slot on each GPU.

        All stages have the same number of slots. The bytes differ.
        """
        slots = {
            stage: state_bytes(self.shape, self.weights, group.tensor, stage)
            for stage in group.stages(self.shape.num_layers)
        }
        largest, alone = max(slots.values()), not self.shape.attention_layers
        if not largest:
            return 0, slots
        seqs = self.limits.max_num_seqs
        return num_state_slots(pool, largest, seqs, alone=alone), slots

    def _weight_bytes(self, group: Group) -> int:
        """Bytes of weights on each GPU of the largest stage."""
        parameters = count_parameters(self.shape)
        total = parameters.bytes(self.weights)
        if group.pipeline == 1:
            return -(-total // group.tensor)
        head = parameters.head_bytes(self.weights)
        embedding = parameters.embedding * self.weights.rest_bits // 8
        layers = total - embedding - (head if parameters.head else 0)
        largest = max(
            layers * len(stage.layers) // stage.num_layers
            + stage.is_first * embedding
            + stage.is_last * head
            for stage in group.stages(self.shape.num_layers)
        )
        return -(-largest // group.tensor)

    def _step_bytes(self) -> int:
        """Bytes of the largest step's activations and logits, twice: CUDA graphs keep their own.

        A token needs its residual, the normalized copy, the attention output, queries, keys and
        values, or what a layer with a state computes in their place, and in the MLP the two halves
        and their product. A sequence needs its logits in
        float32 and a copy that is sorted or masked.
        """
        shape = self.shape
        attention = sum(_step_numbers(shape)) if shape.attention_layers else 0
        attention = max([attention, *map(_numbers_of_state, set(shape.variant.state_mixers))])
        sizes = map(shape.sizes_of, _layers_with_mlps(shape))
        inner = max((each.intermediate_size for each in sizes), default=0)
        numbers = 2 * shape.hidden_size + attention + 3 * inner
        tokens = self.limits.max_num_batched_tokens * numbers * self.weights.rest_bits // 8
        return 2 * (tokens + self.limits.max_num_seqs * shape.vocab_size * 4 * 2)


def _step_numbers(shape: ModelShape) -> tuple[int, int]:
    """The numbers of a token's attention output, and of its queries, keys and values."""
    latent = shape.variant.latent
    if latent is None:
        sections = map(shape.attention_sections, shape.attention_layers)
        return max((query, query + 2 * key) for query, key, _ in sections)
    # The results for the latent vectors and for values; queries before and after the absorption.
    results = shape.num_heads * (latent.rank + latent.value_dim)
    queries = shape.num_heads * (latent.query_dim + latent.row_size)
    return results, queries + (latent.query_rank or 0) + 2 * latent.row_size


def _layers_with_mlps(shape: ModelShape) -> list[int]:
    variant, layers = shape.variant, range(shape.num_layers)
    if variant.shared_blocks is not None:
        return list(variant.shared_blocks.layers)
    return [layer for layer in layers if variant.has_mlp(layer)]


def _numbers_of_state(mixer: StateMixer | None) -> int:
    """The numbers of a token that the products of a layer with a state read and write."""
    if mixer is None:
        return 0
    sizes = (spec.shape for _, spec in mixer.tensors() if spec.role is Role.LINEAR)
    return mixer.values_size + sum(outputs for outputs, _ in sizes)


def group_sizes(shape: ModelShape) -> Iterator[int]:
    """The numbers of GPUs that can share the heads, and states, evenly, in ascending order."""
    layers = range(shape.num_layers)
    heads = {shape.num_kv_heads, *(shape.sizes_of(layer).num_kv_heads for layer in layers)}
    has_attention = bool(shape.attention_layers)
    for number in range(1, MAX_GPUS + 1):
        divides = all(count % number == 0 or number % count == 0 for count in heads)
        divides &= shape.num_heads % number == 0
        if (divides or not has_attention) and _divides_states(shape, number):
            yield number


def _divides_states(shape: ModelShape, number: int) -> bool:
    try:
        divide_mixers(shape.variant.state_mixers, number)
    except ConfigError:
        return False
    return True
