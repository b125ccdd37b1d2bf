"""The pool of states of a model with layers that keep one state for each sequence."""

from __future__ import annotations

from dataclasses import replace

from paged_backend.engine.loaded_model import refuse_stages, refuse_tensor_ranks
from paged_backend.models.division import Ranks
from paged_backend.models.states import StateSpec
from paged_backend.platforms.base import Platform
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import ConfigError, option_error
from paged_backend.values.options.scheduling import StepLimits

MAX_CHECKPOINTS = 512
"""The largest number of slots beside those of running sequences."""
_WITH_STATES = "for a model with layers that keep a state for each sequence"


def refuse_with_states(options: EngineConfig, ranks: Ranks, platform: Platform) -> None:
    """Check that a model with states has what the options and the platform ask for.

    Raises:
        ConfigError: it has not.
    """
    if platform.state_functions is None:
        raise option_error("device", f"can only be cpu {_WITH_STATES}")
    refuse_tensor_ranks(ranks, _WITH_STATES)
    refuse_stages(ranks, _WITH_STATES)
    if options.speculative_config is not None:
        raise option_error("speculative_config", f"cannot be used {_WITH_STATES}")
    if options.enable_lora:
        raise option_error("enable_lora", f"can only be false {_WITH_STATES}")


def sized(states: StateSpec, budget: int, limits: StepLimits) -> StateSpec:
    """Return the states with as many slots as are useful, in at most half of the pool's bytes.

    Each running sequence has a slot, and may write to another one.

    Raises:
        ConfigError: there is no room for one sequence.
    """
    most = 1 + 2 * limits.max_num_seqs + MAX_CHECKPOINTS
    least = 3  # the state of zeros, the state of a sequence, and its next one
    num_slots = min(most, budget // 2 // states.bytes_per_slot)
    if num_slots < least:
        raise ConfigError(
            f"option kv_cache_memory_bytes: half of {budget} bytes hold {num_slots} states of "
            f"{states.bytes_per_slot} bytes each, but one sequence needs {least}; give "
            f"{2 * least * states.bytes_per_slot} bytes or more"
        )
    return replace(states, num_slots=num_slots)
