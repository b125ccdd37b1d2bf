"""A drafter that finds guesses in earlier text: in the sequence's own, and in earlier answers.

- ``ngram`` is prompt lookup decoding (Saxena, 2023): the last n tokens have occurred before in the
  prompt or the answer, and what followed them then may follow them now.
- ``suffix`` is suffix decoding (Oliaro et al., SuffixDecoding, 2024): it also looks into earlier
  answers of the tenant, takes the longest match, and guesses more after a longer match. It compares
  only the newest places with the same last token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, islice
from math import prod
from operator import mul
from typing import NamedTuple

from paged_backend.core.drafter import Draft, Drafter
from paged_backend.core.scheduler_output import SchedulerOutput
from paged_backend.core.sequence import PLACEHOLDER, Sequence, SequenceStatus
from paged_backend.core.stopping import may_go_ahead
from paged_backend.speculation.acceptance import (
    DECAY,
    Acceptance,
    Evidence,
    numbers_of_drafts,
)
from paged_backend.speculation.answers import Answers
from paged_backend.speculation.drawn_drafts import DrawnAcceptance, DrawnDrafts
from paged_backend.speculation.references import Reference
from paged_backend.speculation.step_costs import NUM_COLD, StepCosts
from paged_backend.speculation.token_index import Match, TokenIndex
from paged_backend.speculation.votes import Elected, elect
from paged_backend.values.options.speculation import MAX_DRAFTS, SpeculativeConfig

_WINDOW = 2**16  # tokens of a sequence that are searched, which take a MiB
_MAX_READ = 2**12  # tokens that a step adds to indexes, so that a long text delays nobody
# If only drafts that are likelier than this pay, nothing is searched: they would give 5% at most.
_HOPELESS = 0.95
# Tokens that the device gets of the rest of an earlier answer, and those that a step sends it for
# all sequences.
_MAX_REFERENCE, _MAX_SENT = 2**9, 2**12
# A text is searched less often while its guesses are wrong: after each `_PATIENCE` of them, a step
# more is left out, up to `_MAX_PAUSE`, or up to as many as leave about `_SEARCHES` in each step.
_PATIENCE, _MAX_PAUSE, _SEARCHES = 4, 3, 8
# Numbers of drafts differ from step to step by more than this variance, so that what they cost is
# measured rather than assumed.
_PRIOR_WEIGHT = 0.25


class _Guess(NamedTuple):
    draft: Draft
    evidence: list[Evidence]  # one entry for each token of the draft
    place: int  # number of tokens of the sequence before the guess
    # The device has the text that it comes from, or gets it with the drafts.
    is_on_device: bool
    reference: list[int] = []  # the text that it gets; see Draft


class _Source:
    """A text that grows, and its index, which has read a part of it.

    Args:
        key_length: number of tokens that a match has at least.
    """

    def __init__(self, key_length: int) -> None:
        self._key_length = key_length
        self.index = TokenIndex(0, key_length)

    def read(self, token_ids: list[int], end: int, limit: int) -> int:
        """Add the next of the first `end` tokens to the index.

        An index that is too small is replaced by a larger one, and the text is read again.

        Args:
            token_ids: the text.
            end: number of its tokens that are known.
            limit: number of tokens to add at most.

        Returns:
            The number of added tokens.
        """
        if end > self.index.window and self.index.window < _WINDOW:
            self.index = TokenIndex(min(end, _WINDOW), self._key_length)
        start = self.index.num_tokens
        added = token_ids[start : min(end, start + max(limit, 0))]
        self.index.extend(added)
        return len(added)


@dataclass(slots=True)
class _Text:
    """What is known about the text of a sequence."""

    seq: Sequence
    source: _Source
    predicted: _Source | None  # tokens of the prediction, if the request has one
    acceptance: Acceptance
    drawn: DrawnDrafts
    guess: _Guess | None = None  # the newest one, whether or not a step has verified it
    reference: Reference | None = None  # the newest one
    num_failures: int = 0  # searches since the last right guess
    pause: int = 0  # number of steps until the next search

    def read(self, limit: int) -> int:
        """Read the next known tokens, at most `limit`; return their number."""
        num_read = 0
        if self.predicted is not None:
            predicted = self.seq.request.predicted_token_ids
            num_read = self.predicted.read(predicted, len(predicted), limit)
        known = self.seq.num_known_tokens
        return num_read + self.source.read(self.seq.token_ids, known, limit - num_read)

    @property
    def has_guess_on_device(self) -> bool:
        """True if there is a guess from a text that the device has."""
        return self.guess is not None and self.guess.is_on_device

    @property
    def num_unsent(self) -> int:
        """Number of tokens that the device gets with the next drafts, to look for these in them."""
        reference = [] if self.guess is None else self.guess.reference
        return 0 if reference is self.seq.sent_reference else len(reference)

    def chances(self, most: int) -> list[float]:
        """Return the chance of each token that may be drafted, if those before it are right.

        Args:
            most: number of drafts at most, if the device draws them.
        """
        if self.guess is None:
            return []
        if self.seq.num_output_placeholders == 0:
            return self.acceptance.chances(self.guess.evidence)
        room = min(most, self.seq.max_num_tokens - self.seq.num_tokens - 1)
        if not self.guess.is_on_device or room <= 0:
            return []
        return self.drawn.chances(self._certainty(), room)

    def draft(self, number: int) -> Draft:
        """Return the first drafts; after tokens in flight, the device draws them."""
        assert self.guess is not None
        if self.seq.num_output_placeholders == 0:
            return self.guess.draft.first(number)
        self.drawn.plan(self.seq.num_computed_tokens, self._certainty())
        return Draft([PLACEHOLDER] * number, reference=self.guess.reference)

    def _certainty(self) -> float:
        """Return the chance that all tokens in flight are as guessed."""
        ahead = self.seq.num_output_placeholders
        evidence = [] if self.guess is None else self.guess.evidence
        return prod(self.acceptance.chances(evidence[:ahead])) if len(evidence) >= ahead else 0.0

    def learn(self, usual: Acceptance) -> None:
        """Compare the newest guess with the tokens that have become known since.

        Args:
            usual: the chances of guesses of all texts, which learn, too.
        """
        self.drawn.learn(self.seq.num_known_tokens)
        if self.guess is None:
            return
        self.num_failures += 1
        guess, self.guess = self.guess, None
        following = self.seq.token_ids[guess.place : self.seq.num_known_tokens]
        guessed = zip(guess.draft.token_ids, guess.evidence, strict=True)
        for (guessed_id, evidence), token_id in zip(guessed, following, strict=False):
            self.acceptance.observe(evidence, guessed_id == token_id)
            usual.observe(evidence, guessed_id == token_id)
            if guessed_id != token_id:
                break
            self.num_failures = 0


class LookupDrafter(Drafter):
    """See :class:`~paged_backend.core.drafter.Drafter`.

    Where the device draws drafts, it looks up the text of the sequence itself and the prediction,
    or the part of an earlier answer that this drafter sends it. This drafter then guesses only how
    many tokens it should verify, from the text before the steps in flight.

    Args:
        config: the lengths of matches and guesses.
        draws_ahead: whether the device draws drafts of sequences with steps in flight.
    """

    def __init__(self, config: SpeculativeConfig, draws_ahead: bool = False) -> None:
        self.draws_ahead = draws_ahead
        self._num_tokens = config.num_speculative_tokens
        self._is_suffix = config.method == "suffix"
        self._min_match, self._max_match = config.match_lengths
        if self._is_suffix:
            self._factor = config.suffix_decoding_max_spec_factor
            self._min_share = config.suffix_decoding_min_token_prob
            max_answers = config.suffix_decoding_max_cached_requests
        else:
            self._factor, self._min_share, max_answers = float(MAX_DRAFTS), 0.0, 0
        self._answers = Answers(max_answers, self._min_match)
        self._texts: dict[int, _Text] = {}  # by seq_id
        # Chances of the guesses of all texts, and of the drafts that the device draws.
        self._usual, self._usual_drawn = Acceptance(), DrawnAcceptance()
        self._costs = StepCosts(prior_weight=_PRIOR_WEIGHT)
        self._num_seen: Counter[int] = Counter()  # steps by their number of tokens
        # Of the step that is scheduled: sequences with a token in flight that are not drafted for,
        # and the texts of those that may be drafted for, by seq_id.
        self._num_ahead = 0
        self._searched: dict[int, _Text] = {}

    def observe_step(self, seconds: float, output: SchedulerOutput) -> None:
        """Record the duration of a step, unless it computed parts of prompts or was cold."""
        for item in output.slices:
            text = self._texts.get(item.seq_id)
            if text is not None and item.draft_token_ids[:1] == [PLACEHOLDER]:
                number, num_known = len(item.draft_token_ids), text.seq.num_known_tokens
                text.drawn.note_return(item.start, number, num_known)
        if all(len(item.draft_token_ids) + 1 == item.num_tokens for item in output.slices):
            size = output.num_tokens
            self._num_seen[size] += 1
            if self._num_seen[size] > NUM_COLD:
                self._costs.observe(seconds, size)

    def propose(self, sequences: Iterable[Sequence], budget: int) -> dict[int, Draft]:
        """Guess the next tokens of some of the sequences; see the class."""
        decodes = list(sequences)
        texts = [self._text(seq) for seq in decodes if seq.request.speculate]
        searched, self._searched = self._searched, {}
        self._let_go()
        to_read = _MAX_READ - self._answers.read(_MAX_READ)
        if budget <= 0 or self._costs.chance_needed(len(decodes)) > _HOPELESS:
            return {}
        found = self._search([text for text in texts if text.seq.seq_id not in searched], to_read)
        found += [text for text in searched.values() if text.guess is not None]
        return self._chosen(found, len(decodes) + self._num_ahead, budget) if found else {}

    def awaits(self, sequences: Iterable[Sequence]) -> set[int]:
        """Return the sequences with guesses that give more than the token of a step."""
        ahead = list(sequences)
        self._num_ahead = sum(not self._is_drawn_ahead(seq) for seq in ahead)
        if not ahead or self._costs.chance_needed(len(ahead)) > _HOPELESS:
            return set()
        texts = [self._text(seq) for seq in ahead if seq.request.speculate]
        found = self._search(texts, _MAX_READ)
        awaiting: set[int] = set()
        for text in found:
            is_drawn = self._is_drawn_ahead(text.seq)
            if not (is_drawn and text.has_guess_on_device) and _pays_off(text):
                awaiting.add(text.seq.seq_id)
                self._num_ahead -= not is_drawn
        self._searched = {text.seq.seq_id: text for text in texts if self._is_drawn_ahead(text.seq)}
        return awaiting

    def _is_drawn_ahead(self, seq: Sequence) -> bool:
        return self.draws_ahead and may_go_ahead(seq)

    def _search(self, texts: list[_Text], to_read: int) -> list[_Text]:
        """Guess how texts go on; returns those with a guess.

        Args:
            texts: the texts.
            to_read: tokens that are added to indexes at most.
        """
        found: list[_Text] = []
        for text in texts:
            text.learn(self._usual)
            if text.pause > 0:
                text.pause -= 1
                continue
            longest = max(_MAX_PAUSE, len(texts) // _SEARCHES)
            text.pause = min(text.num_failures // _PATIENCE, longest)
            to_read -= text.read(to_read)
            if text.source.index.num_tokens == text.seq.num_known_tokens:
                text.guess = self._guess(text)
                if text.guess is not None:
                    found.append(text)
                else:
                    text.num_failures += 1
        return found

    def _text(self, seq: Sequence) -> _Text:
        text = self._texts.get(seq.seq_id)
        if text is None:
            predicted = _Source(self._min_match) if seq.request.predicted_token_ids else None
            acceptance, drawn = self._usual.copy(DECAY), DrawnDrafts(self._usual_drawn)
            text = _Text(seq, _Source(self._min_match), predicted, acceptance, drawn)
            self._texts[seq.seq_id] = text
        return text

    def _let_go(self) -> None:
        """Keep the answers of the sequences that have ended, and forget those that were preempted.

        A queue may become long, and what is known about a text takes memory.
        """
        gone = [t.seq for t in self._texts.values() if t.seq.status is not SequenceStatus.RUNNING]
        for seq in gone:
            del self._texts[seq.seq_id]
            if seq.is_finished:
                self._answers.add(seq)

    def _chosen(self, texts: list[_Text], num_sequences: int, budget: int) -> dict[int, Draft]:
        """Return as many tokens of the texts' guesses as pay, by ``seq_id``."""
        chances = {text.seq.seq_id: text.chances(self._num_tokens) for text in texts}
        chances = {seq_id: guess for seq_id, guess in chances.items() if guess}
        numbers = numbers_of_drafts(chances, num_sequences, budget, self._costs)
        drafts: dict[int, Draft] = {}
        num_to_send = _MAX_SENT
        for text in texts:
            number = numbers.get(text.seq.seq_id, 0)
            if number and text.num_unsent <= num_to_send:  # or else it has drafts in a later step
                num_to_send -= text.num_unsent
                drafts[text.seq.seq_id] = text.draft(number)
        return drafts

    def _guess(self, text: _Text) -> _Guess | None:
        """Look for the end of a text in earlier text, and guess that it goes on as it did there."""
        seq = text.seq
        end = seq.num_known_tokens
        tail = seq.token_ids[max(end - self._max_match, 0) : end]
        own = text.source.index
        predicted = None if text.predicted is None else text.predicted.index
        index, match = own, Match(0, [])
        # Among equally long matches, the caller's own word comes first.
        for other in (predicted, own, self._answers.index(seq.request)):
            if other is not None and match.length < self._max_match:
                found = other.find(tail, self._max_match)
                if found.length > match.length:
                    index, match = other, found
        if not match.ends:
            return None
        # A guess of all tokens in flight shows how certain they are.
        most = max(self._num_tokens, seq.num_output_placeholders)
        room = max(0, seq.max_num_tokens - end - 1)
        number = min(most, int(self._factor * match.length), room)
        if number <= 0:
            return None
        places = match.ends if self._is_suffix else match.ends[:1]
        follow = _repeated if index is own else TokenIndex.following
        followers = {place: follow(index, place, number) for place in places}
        elected = elect(followers, number, self._min_share)
        token_ids = elected.token_ids
        if not token_ids:
            return None
        steady = index.followers.are_steady([tail[-1], *token_ids[:-1]])
        evidence = [
            Evidence(match.length + place, support, is_steady)
            for place, (support, is_steady) in enumerate(zip(elected.supports, steady, strict=True))
        ]
        draft = Draft(token_ids, is_predicted=index is predicted)
        if index is own or draft.is_predicted:
            return _Guess(draft, evidence, end, is_on_device=True)
        reference = self._refer(text, index, match.length, elected)
        return _Guess(draft, evidence, end, is_on_device=bool(reference), reference=reference)

    def _refer(
        self, text: _Text, answers: TokenIndex, match_length: int, elected: Elected
    ) -> list[int]:
        """Return the part of an earlier answer in which the device finds drafts.

        It is empty if no tokens are in flight, so that the guess is the draft, or if the device has
        no room for it. A prediction keeps its place on the device.

        Args:
            text: the text that matches.
            answers: the earlier answers.
            match_length: number of tokens of the match.
            elected: the guess, and the places in the answers that it comes from.
        """
        seq, held = text.seq, text.reference
        if text.predicted is not None or not self._is_drawn_ahead(seq):
            return []
        room, number = _WINDOW - seq.num_tokens, len(elected.token_ids)
        if held is not None and held.has(answers, elected.places, match_length, number):
            return held.token_ids if len(held.token_ids) <= room else []
        after = min(room - self._max_match, seq.max_num_tokens - seq.num_known_tokens)
        if after < number:
            return []
        size = min(after, _MAX_REFERENCE)
        text.reference = Reference(answers, elected.places[0], self._max_match, size)
        return text.reference.token_ids


def _pays_off(text: _Text) -> bool:
    """Return True if a guess is worth that its sequence leaves out a step.

    The guess begins with the tokens in flight. If these are right, the others become drafts.
    """
    if text.guess is None:
        return False
    # The chance that all tokens up to each place are right.
    together: Iterator[float] = accumulate(text.acceptance.chances(text.guess.evidence), mul)
    return sum(islice(together, text.seq.num_output_placeholders, None)) > 1


def _repeated(index: TokenIndex, end: int, number: int) -> list[int]:
    """Return the tokens that follow a place, and again from there when the text ends."""
    found = index.following(end, number)
    return (found * -(-number // len(found)))[:number]
