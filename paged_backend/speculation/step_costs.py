"""The time of a step by its number of tokens, as measured."""

from __future__ import annotations

_DECAY = 1 / 64  # weight of a new step
# Where recent steps had one size: the share of a step's time that another token is assumed to take
# at most, and the share that all tokens of the step are assumed to take together.
_PRIOR_SHARE, _PRIOR_SHARE_OF_ALL = 1 / 8, 1 / 2
_MAX_RATIO = 4.0  # a step that takes longer than expected by this factor waited for something else
NUM_COLD = 2
"""Steps of each size that do not count: buffers are made and graphs are captured in them."""


class StepCosts:
    """A line through the times of recent steps: fixed seconds, and seconds for each token.

    Only steps of decodes and drafts count, since tokens of prompts are cheaper.

    Args:
        decay: weight of a new step.
        prior_weight: weight of the assumption about the time of a token, as a variance of the
            number of tokens of steps.
        is_hopeful: assume that a token takes no time, so that larger steps are tried.

    Attributes:
        num_steps: number of steps so far.
    """

    def __init__(
        self, decay: float = _DECAY, prior_weight: float = 1.0, *, is_hopeful: bool = False
    ) -> None:
        self._decay, self._prior_weight, self._is_hopeful = decay, prior_weight, is_hopeful
        self.num_steps = 0
        self._mean_tokens = 0.0
        self._mean_s = 0.0
        self._variance = 0.0  # tokens squared
        self._covariance = 0.0  # tokens times seconds

    def observe(self, seconds: float, num_tokens: int) -> None:
        """Record a step."""
        self.num_steps += 1
        weight = max(self._decay, 1 / self.num_steps)
        if self.num_steps > 1:
            seconds = min(seconds, _MAX_RATIO * self.step_s(num_tokens))
        tokens_off = num_tokens - self._mean_tokens
        self._mean_tokens += weight * tokens_off
        self._mean_s += weight * (seconds - self._mean_s)
        self._variance += weight * (tokens_off * (num_tokens - self._mean_tokens) - self._variance)
        self._covariance += weight * (tokens_off * (seconds - self._mean_s) - self._covariance)

    @property
    def token_s(self) -> float:
        """Seconds that a step takes longer with one more token."""
        # With the same share for any number of tokens, a steady batch of 8 would never try a draft.
        share = min(_PRIOR_SHARE, _PRIOR_SHARE_OF_ALL / max(self._mean_tokens, 1))
        prior = 0.0 if self._is_hopeful else share * self._mean_s
        slope = self._covariance + self._prior_weight * prior
        return max(slope / (self._variance + self._prior_weight), 0.0)

    def step_s(self, num_tokens: int) -> float:
        """Seconds of a step; 0 before any step was observed."""
        return max(
            self._mean_s + self.token_s * (num_tokens - self._mean_tokens),
            self.token_s * num_tokens,
        )

    def chance_needed(self, num_tokens: int) -> float:
        """Return how likely a draft must be, to give more tokens per second than it costs.

        Args:
            num_tokens: number of tokens that the step gives without the draft.
        """
        seconds = self.step_s(num_tokens)
        return self.token_s * num_tokens / seconds if seconds > 0 else 0.0
