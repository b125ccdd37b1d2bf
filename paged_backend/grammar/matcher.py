"""What a grammar allows after the tokens of a completion so far."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from paged_backend.core.grammar import SharedLexer
from paged_backend.grammar.limits import parser_limits

MAX_FORCED_TOKENS = 32  # that one step adds to an output: many outputs make one long step
# Where llguidance found an error in the grammar that we have written.
_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
# In llguidance's errors.
_FULL = "too many states"
_TOO_MANY_ITEMS = ("Too many items", "Current row has")
_REFUSED = ("doesn't satisfy the grammar", "out of range")  # not an error of the grammar


class GrammarError(ValueError):
    """A grammar that cannot be compiled, or that takes more work than the limits allow."""


class Matcher:
    """The state of one completion's grammar; used by one thread at a time.

    Attributes:
        lexer: the lock and the delays of the lexer that copies share.
        is_stuck: True if the lexer has no room for more states, or if a step needs more items than
            the engine's thread may work on, until `recover` is called.
        problem: why there can be no further mask; empty if there can be.

    Args:
        matcher: llguidance's matcher at the start of the output.
        eos_token_ids: tokens that end the output. They are allowed where it is complete.
        stop_token_ids: more tokens of this kind.
        ignore_eos: end the output only where the grammar allows nothing else.
        renew: returns another matcher at the start of the output, with a lexer that has room for
            more states, and that lexer. Copies of a matcher share a lexer, which has a limited
            number of states. With True, the matcher must have room for more items.
        lexer: what copies of the matcher share; a new one by default.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        eos_token_ids: tuple[int, ...],
        stop_token_ids: tuple[int, ...] = (),
        *,
        ignore_eos: bool = False,
        renew: Callable[[bool], tuple[LLMatcher, SharedLexer]] | None = None,
        lexer: SharedLexer | None = None,
    ) -> None:
        self._matcher = matcher
        self.lexer = lexer or SharedLexer()
        self.is_stuck = False
        self.problem = ""
        self._renew = renew
        self._is_renewed = False  # and has given no mask since then
        self._has_more_items = False
        self._token_ids: list[int] = []
        self._forced: deque[int] | None = None  # after these tokens; None if it was not computed
        self._mask_size = 0  # bytes; 0 before the first mask
        self._eos_token_ids = eos_token_ids
        self._stop_token_ids = stop_token_ids
        self._ignore_eos = ignore_eos

    @property
    def is_finished(self) -> bool:
        """True if only an end-of-sequence token may follow, or if the grammar has failed."""
        return self._matcher.is_stopped()

    @property
    def may_end(self) -> bool:
        """True if the grammar accepts the output as it is."""
        return self._matcher.is_accepting()

    def copy(self) -> Matcher:
        """Return an independent copy, for another completion of the request."""
        copy = Matcher(
            self._matcher.deep_copy(),
            self._eos_token_ids,
            self._stop_token_ids,
            ignore_eos=self._ignore_eos,
            renew=self._renew,
            lexer=self.lexer,
        )
        copy._token_ids = list(self._token_ids)
        return copy

    def accept(self, token_ids: list[int]) -> bool:
        """Add tokens to the output; returns False if the grammar does not allow them.

        A grammar that is stuck cannot decide. It accepts tokens that a mask allowed, and `recover`
        decides about others.
        """
        if not self.is_stuck:
            if self._matcher.is_stopped() and not self._matcher.is_error():
                return all(token_id in self._eos_token_ids for token_id in token_ids)
            if not self._matcher.consume_tokens(token_ids):
                self._note_error()
                if not self.is_stuck:
                    return False
        self._token_ids += token_ids
        self._skip_forced(token_ids)
        return True

    def _skip_forced(self, token_ids: list[int]) -> None:
        """Keep the forced tokens after these: computing them for a long text takes 10 ms."""
        for token_id in token_ids:
            if not self._forced or self._forced.popleft() != token_id:
                self._forced = None
                return
        if not self._forced:  # there may be more now
            self._forced = None

    def allows(self, token_id: int) -> bool:
        """Return True only if the next mask allows a token.

        False says nothing about a token that may end the output.
        """
        if token_id in self._eos_token_ids or token_id in self._stop_token_ids:
            return False
        # Where the text is forced, a mask allows its canonical tokenization only.
        forced = self._forced_token_ids()
        if forced:
            return token_id == forced[0]
        return self._matcher.validate_tokens([token_id]) == 1

    def mask(self) -> bytes:
        """Return the mask of the next token; it is empty if the grammar is stuck or has failed."""
        if self._forced and self._mask_size and not self.may_end:
            return self._mask_of(self._forced[0])  # which takes no time
        mask = self._mask()
        self._note_error()
        if not self._matcher.is_error():
            self._is_renewed = False
        return mask

    def _mask(self) -> bytes:
        mask = self._matcher.compute_bitmask()
        self._mask_size = len(mask)
        if self._matcher.is_error():  # llguidance allows the end of the output then
            return bytes(len(mask))
        if (self._stop_token_ids or self._ignore_eos) and self.may_end:
            return self._with_ends(mask)
        return mask

    def _mask_of(self, token_id: int) -> bytes:
        """Return the mask that allows one token only."""
        bits = bytearray(self._mask_size)
        bits[token_id // 8] = 1 << token_id % 8
        return bytes(bits)

    def _with_ends(self, mask: bytes) -> bytes:
        """Return the mask of a complete output, with the tokens that may end it."""
        bits = bytearray(mask)
        for token_id in self._stop_token_ids:
            bits[token_id // 8] |= 1 << token_id % 8
        if self._ignore_eos and not self.is_finished:
            for token_id in self._eos_token_ids:
                bits[token_id // 8] &= ~(1 << token_id % 8)
        return bytes(bits)

    def num_allowed(self, draft_token_ids: list[int]) -> int:
        """Return the number of drafts before the first one that is surely not allowed."""
        ends = {*self._eos_token_ids, *self._stop_token_ids}
        number = next(
            (place for place, token in enumerate(draft_token_ids) if token in ends),
            len(draft_token_ids),
        )
        num_valid = self._matcher.validate_tokens(draft_token_ids[:number])
        # Only a mask can tell whether the output may end.
        return min(number + 1, len(draft_token_ids)) if num_valid == number else num_valid

    def masks_along(self, draft_token_ids: list[int], first: int = 0) -> list[bytes]:
        """Return the masks of the next token and of the token after each allowed draft.

        Args:
            draft_token_ids: the drafts.
            first: number of first masks to leave out.
        """
        masks = [] if first else [self.mask()]
        if not draft_token_ids:
            return masks
        num_accepted = 0
        for token_id in draft_token_ids:
            if self.is_finished or self._matcher.try_consume_tokens([token_id]) == 0:
                break
            num_accepted += 1
            if num_accepted < first:
                continue
            mask = self._mask()
            if self._matcher.is_error():
                break
            masks.append(mask)
        self._matcher.rollback(num_accepted)
        self._note_error()
        return masks

    def forced_token_ids(self) -> list[int]:
        """Return the tokens that must follow, in the canonical tokenization of their text.

        Of more than MAX_FORCED_TOKENS, the first ones.
        """
        if self.is_finished and not self._matcher.is_error():
            return list(self._eos_token_ids[:1])
        return self._forced_token_ids()

    def _forced_token_ids(self) -> list[int]:
        if self._forced is None:
            self._forced = deque(self._matcher.compute_ff_tokens())
        return list(islice(self._forced, MAX_FORCED_TOKENS))

    def recover(self) -> Iterator[None]:
        """Go on with another matcher, which has more room, token by token."""
        assert self._renew is not None
        if _FULL not in self._matcher.get_error():
            self._has_more_items = True
        self._matcher, self.lexer = self._renew(self._has_more_items)
        self._is_renewed, self._forced = True, None
        for token_id in self._token_ids:
            yield
            if not self._matcher.consume_tokens([token_id]):
                self._note_error()
                break
        self.is_stuck = False

    def _may_recover(self) -> bool:
        """Return True if a matcher with more room would have no error."""
        if self._renew is None:
            return False
        error = self._matcher.get_error()
        if _FULL in error:
            return not self._is_renewed  # else this output alone fills a lexer
        is_too_much = any(text in error for text in _TOO_MANY_ITEMS)
        return is_too_much and not self._has_more_items

    def _note_error(self) -> None:
        """Learn from an error of the matcher, if there is one, whether it is final."""
        if self.problem or not self._matcher.is_error():
            return
        self.is_stuck = self._may_recover()
        if not (self.is_stuck or any(text in self._matcher.get_error() for text in _REFUSED)):
            self.problem = "needs too much work for one token"


def compile_grammar(
    vocabulary: LLTokenizer, grammar: str, limits: LLParserLimits | None = None
) -> LLMatcher:
    """Compile a grammar and find its first tokens; other threads may run meanwhile.

    Deep copies of the matcher share its lexer: a state that one of them has found is known to all.

    Args:
        vocabulary: vocabulary of the model.
        grammar: the text of the grammar.
        limits: limits of the matcher; by default the highest ones.

    Raises:
        GrammarError: the grammar is invalid, too large, or allows no output.
    """
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=limits or parser_limits())
    if not matcher.is_error() and any(matcher.compute_bitmask()) and not matcher.is_error():
        return matcher
    raise GrammarError(_reason(matcher.get_error()))


def _reason(error: str) -> str:
    """Return llguidance's error as one line, without the excerpts of the grammar."""
    lines = [line.strip() for line in error.splitlines()]
    told = [line for line in lines if line and not line.startswith("<") and "|" not in line[:8]]
    if not told or told[0].startswith("NoExtension"):
        return "allows no output"
    reason = _PLACE.sub("", told[0])
    for beginning, meaning in _MEANINGS.items():
        if reason.startswith(beginning):
            return meaning
    found = [line.removeprefix("error: ") for line in told if line.startswith("error: ")]
    return f"{reason} {found[0]}" if found else reason


# What errors of llguidance mean to somebody who does not know its options.
_MEANINGS = {
    "oneOf constraints": "the keyword oneOf needs schemas that clearly exclude each other",
    "min/maxProperties only": "the keywords minProperties and maxProperties can be combined with "
    "properties only if all of these are required",
    "Resource '": "the keyword $ref or $schema leads out of the schema, and nothing is fetched",
    "Failed to generate regex for": "the keywords minimum and maximum have values that are too far "
    "from zero",
}
