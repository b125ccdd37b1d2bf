"""Samples one token for each row of logits, on the host; a GPU has its own sampler."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from paged_backend.core.scheduled_batch import SampleSpec
from paged_backend.sampling.draws import (
    NUM_CANDIDATES,
    draw_from_all,
    draw_from_candidates,
    draw_greedy,
)
from paged_backend.sampling.logit_adjustments import LogitAdjuster, needs_adjustment
from paged_backend.values.sampling_params import SamplingParams

# Below this temperature sampling is argmax in float32.
_GREEDY_TEMPERATURE = 1e-5

_Draw = Callable[[Tensor, Sequence[SampleSpec]], list[int]]


class Sampler:
    """Samples tokens with each row's sampling parameters.

    A token depends on no earlier step: all that is kept is what can be made again. The lists of
    token ids in the samples belong to one sequence each, which may only change them at the end.
    """

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._adjuster = LogitAdjuster(eos_token_ids)

    def sample_greedily(self, logits: Tensor, samples: Sequence[SampleSpec]) -> dict[int, int]:
        """Return the tokens of the greedy rows with logits that no parameter changes, by row.

        ``logits`` [R, vocab] float32 is not written. Row ``i`` belongs to ``samples[i]``.
        """
        rows = [
            row
            for row, spec in enumerate(samples)
            if _draw_for(spec.params) is draw_greedy and not needs_adjustment(spec)
        ]
        if not rows:
            return {}
        chosen = logits if len(rows) == len(samples) else logits[rows]
        return dict(zip(rows, draw_greedy(chosen, ()), strict=True))

    def sample(self, logits: Tensor, samples: Sequence[SampleSpec]) -> list[int]:
        """Return one token for each row of ``logits`` [R, vocab] float32, which may be overwritten.

        Row ``i`` belongs to ``samples[i]``. A row's token depends on its own logits, parameters,
        seed and position only.
        """
        self._adjuster.adjust(logits, samples)
        rows_by_draw: dict[_Draw, list[int]] = {}
        for row, spec in enumerate(samples):
            rows_by_draw.setdefault(_draw_for(spec.params), []).append(row)
        if len(rows_by_draw) == 1:
            (draw,) = rows_by_draw
            return draw(logits, samples)
        tokens = [0] * len(samples)
        for draw, rows in rows_by_draw.items():
            drawn = draw(logits[rows], [samples[row] for row in rows])
            for row, token in zip(rows, drawn, strict=True):
                tokens[row] = token
        return tokens


def _draw_for(params: SamplingParams) -> _Draw:
    if params.temperature < _GREEDY_TEMPERATURE or params.top_k == 1:
        return draw_greedy
    if 0 < params.top_k <= NUM_CANDIDATES:
        return draw_from_candidates
    return draw_from_all
