"""Lets the beams of a request go on, once a step has computed the candidates of each of them."""

from __future__ import annotations

import time

from paged_backend.core.beams import Child, Hypothesis
from paged_backend.core.sequence import Sequence, SequenceStatus
from paged_backend.core.sequences import BeamGroup, Sequences
from paged_backend.values.outputs import FinishReason, SequenceOutput, TokenLogprobs

_TOO_FEW = "beam_width: must be lower, because too few tokens are possible"


class BeamGroups:
    """Compares candidates, and forks, ends and drops beams accordingly.

    A beam is a sequence that is in no step between its own candidates and this comparison. The
    beams of a request share full blocks; a partial block is copied when one of them writes to it.
    A beam that loses its blocks computes its tokens again, and the others wait for it.

    Args:
        sequences: the unfinished sequences.
        max_num_seqs: maximum number of running sequences.
    """

    def __init__(self, sequences: Sequences, max_num_seqs: int) -> None:
        self._sequences = sequences
        self._max_num_seqs = max_num_seqs

    def take(self, seq: Sequence, candidates: TokenLogprobs) -> list[SequenceOutput]:
        """Add the likeliest next tokens of a beam.

        Returns:
            New tokens that all results of the request have in common, or the results, if these
            candidates were the last ones of a comparison.
        """
        group = self._sequences.beam_groups[seq.request.request_id]
        self._sequences.charge_output(seq, 1)
        group.candidates[seq.seq_id] = candidates
        if len(group.candidates) < len(group.live):
            return []
        if seq.first_token_s is None:
            _share_start(seq, group)
        likeliest = [group.candidates[beam.seq_id] for beam in group.live]
        group.candidates.clear()
        children = group.search.advance(likeliest)
        if not children:
            return self._end(group)
        self._continue(group, children)
        return self._common_tokens(group)

    def _continue(self, group: BeamGroup, children: list[Child]) -> None:
        """Give each child a sequence: its parent's, or that of a beam that was not continued."""
        parents = group.live
        heirs = {child.parent: place for place, child in reversed(list(enumerate(children)))}
        kept = {parents[parent] for parent in heirs}
        unused = [beam for beam in group.sequences if beam not in kept]
        for beam in unused:
            if beam.status is SequenceStatus.RUNNING:
                self._sequences.park(beam)
        group.live = []
        for place, (parent, _) in enumerate(children):
            beam = parents[parent]
            if heirs[parent] != place:
                beam = self._fork(parents[parent], unused.pop(0))
            group.live.append(beam)
        # A heir is the first child of its parent, so the copies are made before it goes on.
        for beam, child in reversed(list(zip(group.live, children, strict=True))):
            beam.continue_from(parents[child.parent], child.token_id)
        for beam in group.live:
            if beam.status is SequenceStatus.WAITING:
                self._sequences.waiting.add(beam)

    def _fork(self, parent: Sequence, child: Sequence) -> Sequence:
        """Let a child share its parent's blocks, if the parent has any and the child may run."""
        child.block_hashes = list(parent.block_hashes)
        started = self._sequences.started
        if parent.status is SequenceStatus.RUNNING and len(started) < self._max_num_seqs:
            self._sequences.fork_beam(parent, child)
        return child

    def _common_tokens(self, group: BeamGroup) -> list[SequenceOutput]:
        """Return the new tokens that all results will have in common."""
        start, end = group.num_sent, group.search.num_common
        if end <= start:
            return []
        best = group.search.beams[0]
        outputs = [
            _output(seq, best._replace(token_ids=best.token_ids[:end]), start)
            for seq in group.sequences[: group.sequences[0].request.params.n]
        ]
        group.num_sent = end
        return outputs

    def _end(self, group: BeamGroup) -> list[SequenceOutput]:
        """End all beams of a request; returns the rest of its best outputs."""
        request = group.sequences[0].request
        results = group.search.finished[: request.params.n]
        outputs: list[SequenceOutput] = []
        for seq, result in zip(group.sequences, results, strict=False):
            outputs.append(_output(seq, result, group.num_sent))
            self._sequences.finish(seq, result.reason or FinishReason.LENGTH)
        return outputs + self._sequences.abort(request.request_id, FinishReason.ERROR, _TOO_FEW)


def _share_start(first: Sequence, group: BeamGroup) -> None:
    """Give all beams the start of the first one, which computed the prompt."""
    first_token_s = time.monotonic()
    for seq in group.sequences:
        seq.num_cached_tokens = first.num_cached_tokens
        seq.num_charged_tokens = first.num_charged_tokens
        seq.admitted_s, seq.first_token_s = first.admitted_s, first_token_s


def _output(seq: Sequence, hypothesis: Hypothesis, start: int) -> SequenceOutput:
    """Return the tokens of an answer from ``start`` on."""
    token_ids = hypothesis.token_ids[start:]
    with_logprobs = seq.request.params.logprobs is not None
    return SequenceOutput(
        seq.request.request_id,
        seq.index,
        token_ids,
        hypothesis.reason,
        seq.num_cached_tokens or 0,
        hypothesis.logprobs[start : start + len(token_ids)] if with_logprobs else None,
        times=seq.times if start == 0 else None,
    )
