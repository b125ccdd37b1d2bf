"""Bounds the memory of what is returned with tokens: logits and log-probabilities."""

from __future__ import annotations

from collections import Counter
from typing import NoReturn

from paged_backend.process.admission import PLACES_FOR_ONE_LEFT
from paged_backend.values.errors import RequestRefused
from paged_backend.values.sampling_params import SamplingParams

LOGIT_BYTES = 4
LOGPROB_BYTES = 64  # size of Python's numbers for a token id and its log-probability
_RETRY_AFTER_S = 1


def result_bytes(
    params: SamplingParams, num_prompt_tokens: int, vocab_size: int, *, stream: bool
) -> int:
    """Return how much memory the logits and log-probabilities of a request may take at once.

    A stream sends the log-probabilities of new tokens as they come, so they do not count.
    """
    num_output_tokens = params.n * (params.max_tokens or 0)
    num_bytes = 0
    if params.prompt_logprobs is not None:
        num_bytes += num_prompt_tokens * (1 + params.prompt_logprobs) * LOGPROB_BYTES
    if params.logprobs is not None and not stream:
        num_bytes += num_output_tokens * (1 + params.logprobs) * LOGPROB_BYTES
    if params.return_context_logits:
        num_bytes += num_prompt_tokens * vocab_size * LOGIT_BYTES
    if params.return_generation_logits:
        num_bytes += num_output_tokens * vocab_size * LOGIT_BYTES
    return num_bytes


class HeldResults:
    """The memory that the results of open requests may take.

    As in the queue of the engine, a tenant can fill about 8/9 of it. Requests without a tenant
    share one account.

    Args:
        max_bytes: limit for all of them. A request that has more alone may be the only one.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._of_tenants: Counter[str] = Counter()  # bytes; only of those that have some

    def add(self, num_bytes: int, tenant: str) -> None:
        """Count the results of a request.

        Raises:
            RequestRefused: no room is left for them now; nothing was counted.
        """
        if not num_bytes:
            return
        held, own = self._of_tenants.total(), self._of_tenants[tenant]
        left = self._max_bytes - held - num_bytes
        if held and left < 0:
            self._refuse("open requests", held)
        if held and own + num_bytes > PLACES_FOR_ONE_LEFT * left:
            self._refuse("open requests of this tenant", own)
        self._of_tenants[tenant] += num_bytes

    def _refuse(self, whose: str, num_bytes: int) -> NoReturn:
        raise RequestRefused(
            "queue_full",
            f"{whose} will return {num_bytes} bytes of logits and log-probabilities"
            f" already (max_open_result_bytes); retry after {_RETRY_AFTER_S} s",
        )

    def remove(self, num_bytes: int, tenant: str) -> None:
        """Stop counting the results of a request."""
        self._of_tenants[tenant] -= num_bytes
        if not self._of_tenants[tenant]:
            del self._of_tenants[tenant]
