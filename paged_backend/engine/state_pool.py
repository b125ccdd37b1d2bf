"""The pool of states of a model with layers that keep one state for each sequence."""

from __future__ import annotations

from dataclasses import replace

from paged_backend.engine.loaded_model import refuse_stages, refuse_tensor_ranks
from paged_backend.models.division import Ranks
from paged_backend.models.states import StateSpec
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import ConfigError, option_error
from paged_backend.values.kv_cache_groups import MIN_STATE_SLOTS, num_state_slots
from paged_backend.values.options.scheduling import StepLimits

_WITH_STATES = "for a model with layers that keep a state for each sequence"


def refuse_with_states(options: EngineConfig, ranks: Ranks) -> None:
    """Check that a model with states has what the options ask for.

    Raises:
        ConfigError: it has not.
    """
    refuse_tensor_ranks(ranks, _WITH_STATES)
    refuse_stages(ranks, _WITH_STATES)
    if options.speculative_config is not None:
        raise option_error("speculative_config", f"cannot be used {_WITH_STATES}")
    if options.enable_lora:
        raise option_error("enable_lora", f"can only be false {_WITH_STATES}")


def sized(states: StateSpec, budget: int, limits: StepLimits) -> StateSpec:
    """Return the states with the slots that have room in a part of the pool.

    Raises:
        ConfigError: there is no room for one sequence.
    """
    num_slots = num_state_slots(budget, states.bytes_per_slot, limits.max_num_seqs)
    if num_slots < MIN_STATE_SLOTS:
        raise ConfigError(
            f"option kv_cache_memory_bytes: half of {budget} bytes hold {num_slots} states of "
            f"{states.bytes_per_slot} bytes each, but one sequence needs {MIN_STATE_SLOTS}; give "
            f"{2 * MIN_STATE_SLOTS * states.bytes_per_slot} bytes or more"
        )
    return replace(states, num_slots=num_slots)
