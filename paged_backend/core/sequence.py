"""One growing answer: the unit that the scheduler runs."""

from __future__ import annotations

import time
from collections.abc import Iterable
from enum import IntEnum

from paged_backend.core.seeds import derive_seed
from paged_backend.outputs import TokenLogprobs
from paged_backend.request import Request

PENDING = -1
"""Stands for a token that a step under way is sampling."""


class SequenceStatus(IntEnum):
    """Where a sequence stands; only the scheduler changes it."""

    WAITING = 0  # new or preempted: owns no block
    RUNNING = 1
    FINISHED = 2


class Sequence:
    """Tokens known so far and how many of them have their K and V in the cache.

    There are no phases: a step lets ``num_computed_tokens`` catch up with ``num_tokens``, be it
    by a prompt, a chunk of one, one decoded token, or a whole recompute after preemption.
    """

    __slots__ = (
        "admitted_s", "block_hashes", "block_ids", "first_token_s", "index", "num_cached_tokens",
        "num_charged_tokens", "num_computed_tokens", "num_pending", "num_prompt_tokens",
        "prompt_logprobs", "queued_s", "request", "seed", "seq_id", "status", "token_ids",
    )  # fmt: skip

    def __init__(
        self, seq_id: int, request: Request, index: int, seed: int, progress: Iterable[int] = ()
    ) -> None:
        self.seq_id = seq_id
        self.request = request
        self.index = index
        self.seed = derive_seed(seed, index)
        self.status = SequenceStatus.WAITING
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.token_ids += progress  # what an engine that has ended generated
        resumed = len(self.token_ids) > self.num_prompt_tokens
        self.num_computed_tokens = 0  # those of steps under way included
        self.num_pending = 0  # last tokens that are not known yet
        # Set when first admitted; one that goes on was counted by the engine before.
        self.num_cached_tokens: int | None = 0 if resumed else None
        self.num_charged_tokens = self.num_prompt_tokens if resumed else 0  # of the prompt
        # Of the prompt's tokens after its first, as far as computed; None once they are told.
        wanted = index == 0 and request.params.prompt_logprobs is not None and not resumed
        self.prompt_logprobs: list[TokenLogprobs] | None = [] if wanted else None
        self.block_ids: list[int] = []
        self.block_hashes: list[bytes] = []  # of full blocks, as far as needed yet
        # Seconds of the monotonic clock.
        self.queued_s = time.monotonic()
        self.admitted_s: float | None = None  # for the first time
        self.first_token_s: float | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far, pending ones included."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far, pending ones included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_known_tokens(self) -> int:
        """Prompt and output tokens whose values have arrived."""
        return len(self.token_ids) - self.num_pending

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose K and V no step has written or is about to write."""
        return len(self.token_ids) - self.num_computed_tokens

    def expect_token(self) -> None:
        """Make room for the token that a step is about to sample."""
        self.token_ids.append(PENDING)
        self.num_pending += 1

    def take_token(self, token_id: int) -> None:
        """Fill in the earliest pending token."""
        if self.first_token_s is None:
            self.first_token_s = time.monotonic()
        self.token_ids[-self.num_pending] = token_id
        self.num_pending -= 1

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether each token of the prompt has to be computed, cached or not."""
        return self.prompt_logprobs is not None and self.num_output_tokens == 0

    @property
    def admission_order(self) -> tuple[int, int]:
        """The lower, the earlier admitted and the later preempted: by priority, then arrival."""
        return self.request.priority, self.seq_id

    @property
    def is_finished(self) -> bool:
        """Whether the sequence has ended, for any reason."""
        return self.status is SequenceStatus.FINISHED
