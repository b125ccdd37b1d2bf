"""The times of steps with and without the drafts of a draft model, and what follows from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paged_backend.core.scheduler_output import DraftPass, DrawnDrafts
from paged_backend.speculation.step_costs import NUM_COLD, StepCosts

# Drafts must give this many times the tokens per second of steps without them. Otherwise errors in
# the measured times would decide.
_MARGIN = 1.05
_NUM_PLAIN = 8  # steps without drafts that are measured before there are drafts
_DECAY_OF_PLAIN = 1 / 16  # weight of a new step without drafts, because these may be rare
# Weights of a pass that catches up and takes less or more time for a token than those before it,
# which may have waited for something else.
_DECAY_DOWN, _DECAY_UP = 1 / 2, 1 / 16
# The share of a pass for one token that a token takes at most if many are computed together.
_MAX_CATCH_UP = 1 / 4
_CATCH_UP = ("catch up", 0)  # the size of all passes that compute earlier tokens
_MAX_RATIO = 4.0  # a step that takes longer than expected by this factor waited for something else
_MAX_UNKNOWN = 4  # drafts of a sequence while the time to draw them is not known
_MAX_ROUNDS = 8  # in the search for the best numbers, which takes 2 to 4


class DraftPlan(NamedTuple):
    """The numbers of drafts with which steps give most tokens per second."""

    numbers: Mapping[int, int]  # by seq_id, without zeros
    # For each of these sequences: seconds that a step with its drafts saves, and its tokens.
    saved_s: Mapping[int, float]
    num_tokens: Mapping[int, float]


NO_PLAN = DraftPlan({}, {}, {})


class DraftingCosts:
    """What drafts of a draft model cost, from the measured times of three kinds of work.

    Steps without drafts are measured apart for each power of two of their sizes, and decide what
    drafts must exceed. Steps with drafts are measured without the passes that draw them. A pass
    that draws drafts computes about one token of each sequence; what the draft model computes
    before that, because it lacks earlier tokens, is measured apart, too.

    One more token in a step, or in a pass, is assumed to take no time until steps of different
    sizes show what it takes. What a few drafts of one sequence take tells little about many drafts
    of many: a GPU needs most of the time to read the weights, once for all of them. Too much hope
    costs a few steps, too little is never corrected.
    """

    def __init__(self) -> None:
        self._plain: dict[int, StepCosts] = {}  # by the bit length of the number of tokens
        self._verified = StepCosts(is_hopeful=True)
        self._passes = StepCosts(is_hopeful=True)
        self._catch_up_s = 0.0  # seconds to catch up by one token
        self._num_seen: Counter[tuple[str, int]] = Counter()

    def observe_plain(self, seconds: float, num_tokens: int) -> None:
        """Record a step that decodes one token of each sequence."""
        if self._is_warm("plain", num_tokens):
            costs = self._plain.setdefault(num_tokens.bit_length(), StepCosts(_DECAY_OF_PLAIN))
            costs.observe(seconds, num_tokens)

    def observe_drafted(
        self, seconds: float, num_sequences: int, drawn: DrawnDrafts
    ) -> float | None:
        """Record a step for which the draft model has computed something.

        Args:
            seconds: the whole time of the step.
            num_sequences: number of sequences that the step decodes.
            drawn: what the draft model has done.

        Returns:
            The seconds, or fewer if the step seems to have waited for something else; None for one
            of the first steps of its size, and if its time is not known.
        """
        num_drafts = sum(map(len, drawn.token_ids.values()))
        num_tokens = num_sequences + num_drafts
        sizes = [
            ("pass", item.num_tokens) if _is_usual(item) else _CATCH_UP for item in drawn.passes
        ]
        if not all([self._is_warm(*size) for size in [("verified", num_tokens), *sizes]]):
            return None
        verified_s = seconds - sum(item.seconds for item in drawn.passes)
        if verified_s <= 0:  # the passes were counted in an earlier step, which was in flight
            return None
        for item in drawn.passes:
            self._observe_pass(item)
        if num_drafts:
            self._verified.observe(verified_s, num_tokens)
        expected_s = self._verified.step_s(num_tokens) + sum(map(self._pass_s, drawn.passes))
        return min(seconds, _MAX_RATIO * expected_s)

    def _observe_pass(self, item: DraftPass) -> None:
        if _is_usual(item):
            self._passes.observe(item.seconds, item.num_tokens)
            return
        extra = item.num_tokens - item.num_drafts
        seconds = max(item.seconds - self._passes.step_s(item.num_drafts), 0.0) / extra
        weight = _DECAY_UP if seconds > self._catch_up_s else _DECAY_DOWN
        weight = weight if self._catch_up_s else 1.0
        self._catch_up_s += weight * (seconds - self._catch_up_s)

    def _pass_s(self, item: DraftPass) -> float:
        """Return the expected seconds of a pass."""
        if _is_usual(item):
            return self._passes.step_s(item.num_tokens)
        extra = item.num_tokens - item.num_drafts
        return self._passes.step_s(item.num_drafts) + self.catch_up_s(extra)

    def knows_plain(self, num_sequences: int) -> bool:
        """Return True if enough steps without drafts of about this size were measured."""
        costs = self._plain.get(num_sequences.bit_length())
        return costs is not None and costs.num_steps >= _NUM_PLAIN

    def plain_s(self, num_sequences: int) -> float:
        """Seconds of a step without drafts; 0 if none of about this size was measured."""
        costs = self._plain.get(num_sequences.bit_length())
        return 0.0 if costs is None else costs.step_s(num_sequences)

    def catch_up_s(self, num_tokens: int) -> float:
        """Seconds in which the draft model computes tokens that it lacks."""
        token_s = self._catch_up_s
        if self._passes.num_steps:
            token_s = min(token_s, _MAX_CATCH_UP * self._passes.step_s(1))
        return token_s * num_tokens

    def trial_s(self, num_missing: int) -> float:
        """Seconds that a step takes longer with one draft.

        Args:
            num_missing: number of tokens that the draft model lacks.
        """
        return (
            self._passes.step_s(1)
            + self._verified.token_s
            + self.catch_up_s(max(num_missing - 1, 0))
        )

    def plan(
        self, chances: Mapping[int, tuple[float, int]], num_sequences: int, budget: int
    ) -> DraftPlan:
        """Return the best numbers of drafts; none if steps without drafts are as good.

        A step with the drafts gives T tokens in S seconds. The largest T / S is found as Dinkelbach
        (On Nonlinear Fractional Programming, 1967) does: for a rate R, the numbers with the largest
        T - R S are easy to find, because each draft counts alone, and each pass of the draft model
        counts with all its drafts. Then R becomes the rate that these numbers give.

        Args:
            chances: the chance of each draft if those before it are right, and the number of drafts
                at most, by ``seq_id``.
            num_sequences: number of sequences that the step decodes.
            budget: number of drafts that fit in the step.
        """
        plain_s = self.plain_s(num_sequences)
        if not chances or budget <= 0 or plain_s <= 0:
            return NO_PLAN
        verified = self._verified if self._verified.num_steps else self._plain_costs(num_sequences)
        base_s = verified.step_s(num_sequences)
        draft_s, pass_s = verified.token_s + self._passes.token_s, self._passes.step_s(0)
        rate, best = _MARGIN * num_sequences / plain_s, None
        least = rate * base_s - num_sequences  # tokens that the drafts must be worth
        if _most_worth(chances, rate * draft_s, rate * pass_s) <= least:
            return NO_PLAN
        gains = _gains(chances, None if self._passes.num_steps else _MAX_UNKNOWN)
        for _ in range(_MAX_ROUNDS):
            chosen = _chosen(gains, rate, draft_s, pass_s, budget)
            num_passes = int(chosen.any(0).sum())
            tokens = num_sequences + float(gains[chosen].sum())
            seconds = base_s + num_passes * pass_s + int(chosen.sum()) * draft_s
            if num_passes == 0 or tokens - rate * seconds <= 0:
                break
            best, rate = chosen, max(rate, tokens / seconds)
        if best is None:
            return NO_PLAN
        return _plan(list(chances), gains, best, rate, draft_s, pass_s)

    def _plain_costs(self, num_sequences: int) -> StepCosts:
        return self._plain[num_sequences.bit_length()]

    def _is_warm(self, kind: str, num_tokens: int) -> bool:
        self._num_seen[kind, num_tokens] += 1
        return self._num_seen[kind, num_tokens] > NUM_COLD


def _is_usual(item: DraftPass) -> bool:
    """Return True if a pass computes no tokens but the newest: if a last draft was right, two."""
    return item.num_tokens <= 2 * item.num_drafts


_Gains = NDArray[np.float64]
_Chosen = NDArray[np.bool_]


def _most_worth(
    chances: Mapping[int, tuple[float, int]], draft_cost: float, pass_cost: float
) -> float:
    """Return how many tokens more than their cost the drafts give, if all are equally likely.

    The likelihood is the largest of `chances`. Plain numbers take less time here than arrays.

    Args:
        chances: as of `DraftingCosts.plan`.
        draft_cost: tokens that a draft must give.
        pass_cost: tokens that the drafts of a pass must give together, beyond those.
    """
    highest = max(chance for chance, _ in chances.values())
    worth, gain = 0.0, 1.0
    for _ in range(max(length for _, length in chances.values())):
        gain *= highest
        more = len(chances) * (gain - draft_cost) - pass_cost
        if more <= 0:
            break
        worth += more
    return worth


def _gains(chances: Mapping[int, tuple[float, int]], limit: int | None) -> _Gains:
    """Return the expected tokens [sequences, places] that each draft of a sequence adds."""
    lengths = np.array([length for _, length in chances.values()])
    if limit is not None:
        lengths = np.minimum(lengths, limit)
    single = np.array([chance for chance, _ in chances.values()])
    places = np.arange(1, lengths.max() + 1)
    gains: _Gains = np.power(single[:, None], places)
    gains[places > lengths[:, None]] = 0.0
    return gains


def _chosen(gains: _Gains, rate: float, draft_s: float, pass_s: float, budget: int) -> _Chosen:
    """Return which drafts [sequences, places] are worth more than their time at a rate."""
    chosen: _Chosen = (gains > rate * draft_s) & (gains > 0)
    if int(chosen.sum()) > budget:
        smallest = np.sort(gains[chosen])[-budget]
        chosen &= gains >= smallest
        ties: list[tuple[int, int]] = np.argwhere(chosen & (gains == smallest)).tolist()
        ties.sort(key=lambda tie: tie[1], reverse=True)  # so that there are fewer passes
        for row, place in ties[: int(chosen.sum()) - budget]:
            chosen[row, place] = False
    worth = np.where(chosen, gains - rate * draft_s, 0.0).sum(0) - rate * pass_s
    num_passes = int(np.argmax(np.append(0.0, np.cumsum(worth))))
    chosen[:, num_passes:] = False
    return chosen


def _plan(
    seq_ids: list[int],
    gains: _Gains,
    chosen: _Chosen,
    rate: float,
    draft_s: float,
    pass_s: float,
) -> DraftPlan:
    numbers = chosen.sum(1)
    tokens = np.where(chosen, gains, 0.0).sum(1)
    # Sequences with a draft in a pass share its time.
    shares = (chosen / np.maximum(chosen.sum(0), 1)).sum(1) * pass_s
    saved = tokens / rate - numbers * draft_s - shares
    used = [index for index, number in enumerate(numbers) if number]
    return DraftPlan(
        {seq_ids[index]: int(numbers[index]) for index in used},
        {seq_ids[index]: float(saved[index]) for index in used},
        {seq_ids[index]: 1 + float(tokens[index]) for index in used},
    )
