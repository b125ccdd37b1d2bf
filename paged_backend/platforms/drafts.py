"""Decides which of the tokens that a step has sampled are kept."""

from __future__ import annotations

from paged_backend.core.scheduled_batch import ScheduledBatch, ScheduledSequence
from paged_backend.values.outputs import TokenLogprobs


def keep_accepted(
    scheduled_batch: ScheduledBatch, token_ids: list[int], logprobs: dict[int, TokenLogprobs]
) -> tuple[list[list[int]], dict[int, list[TokenLogprobs]]]:
    """Group the samples of a step by sequence, and drop the samples that follow a wrong draft.

    A draft is wrong if it differs from the token that is sampled at its position. That token is
    kept, and all later samples of the sequence are dropped.

    A sample depends only on the seed, the position and the logits. So the kept tokens are those
    that the sequence would sample without drafts.

    Args:
        scheduled_batch: the step.
        token_ids: the token of each sample, in the order of the step's sequences.
        logprobs: the log-probabilities of samples that need them, by index in ``token_ids``.

    Returns:
        A list with the kept tokens of each sequence that samples, and the log-probabilities of
        these tokens, by index in this list.
    """
    place = len(scheduled_batch.continued.sequences)
    kept = [range(index, index + 1) for index in range(place)]  # sample indices of each sequence
    for item in scheduled_batch.scheduled:
        num_samples = len(item.samples)
        if item.num_draft_tokens:
            sampled = token_ids[place : place + num_samples]
            kept.append(range(place, place + 1 + _num_right(item, sampled)))
        else:
            kept += [range(index, index + 1) for index in range(place, place + num_samples)]
        place += num_samples
    return (
        [[token_ids[place] for place in places] for places in kept],
        {
            index: [logprobs[place] for place in places]
            for index, places in enumerate(kept)
            if places[0] in logprobs
        },
    )


def _num_right(item: ScheduledSequence, sampled: list[int]) -> int:
    """The number of leading drafts of a slice that equal the tokens sampled in their place."""
    drafts = item.token_ids[-item.num_draft_tokens :]
    pairs = zip(drafts, sampled, strict=False)
    return next((count for count, (a, b) in enumerate(pairs) if a != b), len(drafts))
