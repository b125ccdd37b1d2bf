"""Scheduling: how steps are filled, and the order of requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paged_backend.values.errors import option_error
from paged_backend.values.options.speculation import (
    MAX_DRAFTS,
    SpeculativeConfig,
    describe_fields,
)
from paged_backend.values.validation import Rule, checked, from_string, shorten

_WEIGHT = Rule(float, 1e-6, 1e6)
_TENANT_NAME_LENGTH = 256
MAX_TENANT_WEIGHTS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """How much a step may hold, and whether the next one is scheduled before it is over."""

    max_num_seqs: int
    max_num_batched_tokens: int
    async_scheduling: bool
    max_num_drafts: int = 0  # guessed tokens that a step verifies, over all sequences
    # Whether the device draws drafts of sequences with steps in flight.
    draws_ahead: bool = False
    # Equal tokens before a draft from the sequence's own text, at least and at most; None: drafts
    # come from a draft model, or there are none.
    match_lengths: tuple[int, int] | None = None


# Where the options leave them open.
CPU_LIMITS = StepLimits(max_num_seqs=64, max_num_batched_tokens=512, async_scheduling=False)
GPU_LIMITS = StepLimits(
    max_num_seqs=256, max_num_batched_tokens=8192, async_scheduling=True, draws_ahead=True
)


@dataclass(frozen=True, kw_only=True)
class SchedulingOptions:
    """See :class:`paged_backend.values.config.EngineConfig`."""

    max_num_seqs: int | None = checked(
        None,
        Rule(int, 1, 4096, optional=True),
        "maximum number of running sequences; default: 64 on a CPU, 256 on a GPU",
    )
    max_num_batched_tokens: int | None = checked(
        None,
        Rule(int, 1, 2**20, optional=True),
        "maximum number of tokens per step, longer prompts are cut into chunks; default: 512 on a "
        "CPU, 8192 on a GPU, and at least 2048 for an encoder",
    )
    enable_chunked_prefill: bool = checked(True, Rule(bool), "cut long prompts into chunks")
    async_scheduling: bool | None = checked(
        None,
        Rule(bool, optional=True),
        "schedule the next step while the device computes; only on a GPU, where it is the default",
    )
    enforce_eager: bool = checked(
        False,
        Rule(bool),
        "run the Python code of the model at each step instead of replaying a graph of its kernels",
    )
    disable_cascade_attn: bool = checked(
        True,
        Rule(bool),
        "read a prefix that running sequences share once for each of them; if false, a decode "
        "step reads it once for all, where that saves enough, but without a CUDA graph; false only "
        "on a GPU",
    )
    speculative_config: dict[str, Any] | None = checked(
        None,
        Rule(dict, optional=True),
        "guess the next tokens of a sequence from earlier text, with a smaller model or with the "
        "MTP layer of the checkpoint, and verify several of them in a step, where that is faster; "
        "tokens stay the same. A JSON object, such as "
        f'{{"method": "suffix"}}; its fields are {describe_fields()}',
    )
    scheduling_policy: str = checked(
        "fair",
        Rule(str, choices=("fair", "priority")),
        "order of waiting requests: the lowest `priority` first, then, if fair, the `tenant` that "
        "was served least, then the earliest",
    )
    tenant_weights: str = checked(
        "", Rule(str), "shares of tenants, for example gold=4,free=0.5; other tenants have 1"
    )

    def check_scheduling(self) -> None:
        """Compare these options with each other.

        Raises:
            ConfigError: they do not fit together, ``tenant_weights`` cannot be read, or a field of
                ``speculative_config`` is not allowed.
        """
        self.weights_of_tenants()
        self.speculation()
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        if seqs is not None and tokens is not None and tokens < seqs:
            raise option_error(
                "max_num_batched_tokens",
                f"must be at least max_num_seqs ({seqs}), so that each running sequence can "
                f"decode in each step; got {tokens}",
            )

    def speculation(self) -> SpeculativeConfig | None:
        """Return the fields of ``speculative_config``; None without speculation.

        Raises:
            ConfigError: a field is not allowed.
        """
        values = self.speculative_config
        return None if values is None else SpeculativeConfig.read(values)

    def weights_of_tenants(self) -> dict[str, float]:
        """The weights in ``tenant_weights``, by tenant.

        Raises:
            ConfigError: they cannot be read.
        """
        entries = self.tenant_weights.split(",") if self.tenant_weights else []
        weights = dict(_tenant_weight(entry) for entry in entries)
        if len(weights) < len(entries) or len(weights) > MAX_TENANT_WEIGHTS:
            raise option_error(
                "tenant_weights",
                f"must name up to {MAX_TENANT_WEIGHTS} tenants, each once, "
                f"got {len(entries)} entries for {len(weights)} tenants",
            )
        return weights

    def step_limits(self, defaults: StepLimits) -> StepLimits:
        """The options that limit the size of a step; options that are not set take `defaults`."""
        tokens = self.max_num_batched_tokens or defaults.max_num_batched_tokens
        seqs = self.max_num_seqs or min(defaults.max_num_seqs, tokens)
        chosen = self.async_scheduling
        is_async = defaults.async_scheduling if chosen is None else chosen
        speculation = self.speculation()
        return StepLimits(
            max_num_seqs=seqs,
            max_num_batched_tokens=self.max_num_batched_tokens or max(tokens, seqs),
            async_scheduling=is_async,
            # Each of them needs a row of logits.
            max_num_drafts=0 if speculation is None else max(seqs, MAX_DRAFTS),
            draws_ahead=defaults.draws_ahead and is_async and speculation is not None,
            match_lengths=(
                None
                if speculation is None or speculation.is_drawn_by_worker
                else speculation.match_lengths
            ),
        )


def _tenant_weight(entry: str) -> tuple[str, float]:
    name, _, number = entry.rpartition("=")
    name, weight = name.strip(), from_string(float, number)
    if not 0 < len(name) <= _TENANT_NAME_LENGTH or not _WEIGHT.accepts(weight):
        raise option_error(
            "tenant_weights",
            f"must be tenant=weight, tenant=weight, ... with names of 1 to {_TENANT_NAME_LENGTH} "
            f"characters and weights from 1e-06 up to 1000000, got {shorten(entry)}",
        )
    return name, weight
