"""One checked request on its way to the engine."""

from __future__ import annotations

from dataclasses import dataclass

from paged_backend.errors import InvalidRequest
from paged_backend.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and what is wanted from it; never changes once accepted.

    Requests share cached blocks only if their ``cache_salt`` is equal.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    cache_salt: str = ""
    priority: int = 0  # lower is served first


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What the loaded model and its engine can take."""

    max_model_len: int  # tokens of prompt and output together
    vocab_size: int
    max_num_seqs: int

    def check(self, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """Check a request against the model.

        Raises:
            InvalidRequest: naming the field and the allowed range.
        """
        self._check_prompt(prompt_token_ids)
        if params.n > self.max_num_seqs:
            raise InvalidRequest(
                "n", f"must be at most max_num_seqs ({self.max_num_seqs}), got {params.n}"
            )
        if params.max_tokens is not None and params.max_tokens > self.max_model_len:
            raise InvalidRequest(
                "max_tokens",
                f"must be at most max_model_len ({self.max_model_len}), got {params.max_tokens}",
            )
        for name, token in params.named_token_ids():
            if token >= self.vocab_size:
                raise InvalidRequest(name, f"must be below {self.vocab_size}, got {token}")

    def _check_prompt(self, prompt_token_ids: list[int]) -> None:
        length = len(prompt_token_ids)
        if length == 0:
            raise InvalidRequest("prompt", "is empty; at least one token is needed")
        if length >= self.max_model_len:
            raise InvalidRequest(
                "prompt",
                f"has {length} tokens; at most {self.max_model_len - 1} fit below "
                f"max_model_len ({self.max_model_len})",
            )
        low, high = min(prompt_token_ids), max(prompt_token_ids)
        if low < 0 or high >= self.vocab_size:
            bad = low if low < 0 else high
            raise InvalidRequest(
                "prompt", f"token ids must be from 0 to {self.vocab_size - 1}, got {bad}"
            )
