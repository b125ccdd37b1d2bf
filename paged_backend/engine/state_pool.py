"""The pool of states of a model with layers that keep one state for each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from paged_backend.models.division import Ranks
from paged_backend.models.states import StateLayer, StateSpec
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import ConfigError, option_error
from paged_backend.values.kv_cache_groups import (
    MIN_STATE_SLOTS,
    StateChunks,
    StateLayout,
    num_state_slots,
)
from paged_backend.values.options.cache import ALL
from paged_backend.values.options.scheduling import StepLimits

_WITH_STATES = "for a model with layers that keep a state for each sequence"


def state_layout(
    num_slots: int, options: EngineConfig, limits: StepLimits, chunks: StateChunks | None
) -> StateLayout:
    """Return the slots as the scheduler sees them.

    Args:
        num_slots: slots of the pool.
        options: the engine's options.
        limits: limits of a step.
        chunks: the tokens that the platform computes together; None for one by one.

    Raises:
        ConfigError: the prefix cache would keep states within a chunk, or a step has no room for a
            chunk beside all decodes.
    """
    interval = options.state_interval
    if chunks is None:
        return StateLayout(num_slots, interval)
    if options.mamba_cache_mode == ALL:
        interval = max(interval, chunks.size)
    if interval % chunks.size:
        raise option_error(
            "mamba_block_size",
            f"must be a multiple of {chunks.size} {_WITH_STATES}, on a GPU in 16 bits; got "
            f"{interval}",
        )
    # While prompts are computed, drafts get at most half of what decodes leave.
    spare = chunks.size if limits.max_num_drafts == 0 else 2 * chunks.size
    if limits.max_num_batched_tokens < limits.max_num_seqs + spare:
        raise option_error(
            "max_num_batched_tokens",
            f"must be at least {spare} more than max_num_seqs ({limits.max_num_seqs}) "
            f"{_WITH_STATES}, on a GPU in 16 bits; got {limits.max_num_batched_tokens}",
        )
    return StateLayout(num_slots, interval, chunks)


def sized(
    layers: Sequence[StateLayer],
    budget: int,
    limits: StepLimits,
    ranks: Ranks,
    device: torch.device,
    *,
    alone: bool,
) -> StateSpec:
    """Return the states of a rank, with the slots that have room in a part of the pool of each.

    Some rank has a layer with a state.

    Args:
        layers: the rank's layers with a state. Other stages may have others.
        budget: bytes of the rank's pool.
        limits: limits of a step.
        ranks: the ranks, which get equal numbers of slots.
        device: where ranks exchange tensors.
        alone: the pool holds nothing but states, so that they may have all of it.

    Raises:
        ConfigError: there is no room for one sequence.
    """
    states = StateSpec(tuple(layers))
    room = torch.tensor([budget, states.bytes_per_slot], device=device)
    rooms = [(size, each) for size, each in ranks.gather(room).tolist() if each]
    num_slots, pool, slot = min(
        (num_state_slots(*each, limits.max_num_seqs, alone=alone), *each) for each in rooms
    )
    if num_slots < MIN_STATE_SLOTS:
        needed = MIN_STATE_SLOTS * slot * (1 if alone else 2)
        raise ConfigError(
            f"option kv_cache_memory_bytes: {'' if alone else 'half of '}{pool} bytes hold "
            f"{num_slots} states of {slot} bytes each, but one sequence needs {MIN_STATE_SLOTS}; "
            f"give {needed} bytes or more"
        )
    return replace(states, num_slots=num_slots)
