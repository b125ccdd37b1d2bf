"""The text of one completion: detokenized and cut at stop strings."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Self

from paged_backend.text.detokenizer import Detokenizer
from paged_backend.text.stop_marks import StopMarks
from paged_backend.text.stop_strings import StopAutomaton, StopMatcher, automaton_of
from paged_backend.text.tokenizer import Tokenizer
from paged_backend.values.outputs import FinishReason
from paged_backend.values.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The new text and tokens of a completion."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None


class StreamState(NamedTuple):
    """The state that a stateless detokenizer needs to continue a stream."""

    context_ids: list[int]  # the last tokens, at the beginning the prompt's
    num_held: int  # number of the last of these that may belong to a stop string
    num_tokens: int  # length of the completion so far


# The most context_ids of a state: the context of the detokenizer, and 256 undecided characters of
# four tokens each, with those of an unfinished run of byte tokens before and after them.
MAX_CONTEXT_IDS = 2048


@dataclass(slots=True)
class _Held:
    """Tokens up to one that brought text, any of which may belong to a stop string."""

    context_ids: list[int]  # before them
    token_ids: list[int] = field(default_factory=list)
    num_characters: int = 0  # length of their text


class Stops:
    """The stop strings of a request, which the streams of all its completions share.

    What searches for them is built when the first text comes, so that a request is admitted fast.

    Args:
        tokenizer: tokenizer of the model.
        params: sampling parameters of the request.
        kept_special_ids: special tokens that are part of the text in any case.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        kept_special_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = params.stop
        hides = params.stop_special_tokens and params.skip_special_tokens and bool(params.stop)
        self._hidden = tokenizer.special_token_ids - kept_special_ids if hides else frozenset()

    @cached_property
    def marks(self) -> StopMarks:
        """The stop strings with marks for special tokens."""
        return StopMarks(self._tokenizer, self._stop, self._hidden)

    @cached_property
    def automaton(self) -> StopAutomaton:
        """The automaton of the stop strings with marks."""
        return automaton_of(tuple(self.marks.stop))

    @property
    def are_empty(self) -> bool:
        """True if there are no stop strings to search for."""
        return not self._stop

    def new_matcher(self) -> StopMatcher:
        """Return the search of one completion."""
        return StopMatcher(self.automaton)


class TextStream:
    """Turns the tokens of one completion into chunks of text.

    Text that may be the beginning of a stop string is held back until that is known. The first
    token that can complete a stop string is the one after ``min_tokens`` others, as with stop
    tokens.

    Args:
        tokenizer: tokenizer of the model.
        params: sampling parameters of the request.
        kept_special_ids: special tokens that are part of the text in any case.
        prompt: tokens before the completion; the completion's text continues theirs.
        stops: stop strings of the request, if another stream has them too.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        kept_special_ids: frozenset[int] = frozenset(),
        prompt: Sequence[int] = (),
        stops: Stops | None = None,
    ) -> None:
        self._detokenizer = Detokenizer(
            tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            kept_special_ids=kept_special_ids,
            prompt=prompt,
        )
        self._stops = stops or Stops(tokenizer, params, kept_special_ids)
        self._min_tokens = params.min_tokens
        self._keeps_stop = params.include_stop_str_in_output
        self._num_tokens = 0
        self._held = ""
        self._stop_string = ""  # that was found
        self._context_ids = self._detokenizer.context_ids  # after the last token
        self._tokens = deque([_Held(self._context_ids)])  # the last one still grows
        self._num_characters = 0  # length of the text of these tokens

    @cached_property
    def _marks(self) -> StopMarks:
        return self._stops.marks

    @cached_property
    def _matcher(self) -> StopMatcher:
        return self._stops.new_matcher()

    @classmethod
    def resume(
        cls,
        tokenizer: Tokenizer,
        params: SamplingParams,
        state: StreamState,
        stops: Stops | None = None,
    ) -> Self:
        """Return a stream that continues from a state, with the same tokenizer and parameters."""
        stream = cls(tokenizer, params, stops=stops)
        num_held = 0 if stream._stops.are_empty else state.num_held
        shown = len(state.context_ids) - num_held
        stream._detokenizer.append(state.context_ids[:shown])
        stream._forget()
        for token_id in state.context_ids[shown:]:
            stream._add(token_id)  # does not stop, as it counts as one of the first min_tokens
        stream._num_tokens = state.num_tokens
        return stream

    @property
    def state(self) -> StreamState:
        """The state for ``resume``; its size does not grow with the completion."""
        if self._stops.are_empty:
            return StreamState(self._detokenizer.context_ids, 0, self._num_tokens)
        held_ids = [token_id for part in self._tokens for token_id in part.token_ids]
        context_ids = self._tokens[0].context_ids + held_ids
        return StreamState(context_ids, len(held_ids), self._num_tokens)

    def first_of_text(self, token_ids: Sequence[int]) -> int | None:
        """Return the index of the next token that begins the text; None if none does.

        Without a prompt that has text, it is the first of these tokens that is not left out.
        """
        if not self._detokenizer.is_at_start:
            return None
        shown = (i for i, id_ in enumerate(token_ids) if self._detokenizer.shows(id_))
        return next(shown, None)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found, so that the engine can end the sequence."""
        return bool(self._stop_string)

    @property
    def stop_string(self) -> str:
        """The stop string that was found; empty if none was."""
        return self._stop_string

    def append(
        self, new_token_ids: list[int], finish_reason: FinishReason | None = None
    ) -> TextDelta:
        """Add tokens of the engine, with the finish reason if the engine ended the sequence.

        Tokens after the one that completes a stop string are dropped, and so are later tokens.
        """
        if self.stopped:
            return TextDelta("", [], FinishReason.STOP)
        hidden = finish_reason is FinishReason.STOP and not self._keeps_stop
        if self._stops.are_empty:
            return self._append_without_search(new_token_ids, finish_reason, hidden=hidden)
        pieces: list[str] = []
        for count, token_id in enumerate(new_token_ids, 1):
            self._num_tokens += 1
            if hidden and count == len(new_token_ids):
                break  # the token that ended the sequence has no text
            pieces.append(self._add(token_id))
            if self.stopped:
                return TextDelta("".join(pieces), new_token_ids[:count], FinishReason.STOP)
        if finish_reason is not None:
            pieces.append(self._release(self._detokenizer.finish()))
            if self.stopped:
                finish_reason = FinishReason.STOP
            else:
                pieces.append(self._marks.without(self._held))
                self._held = ""
        return TextDelta("".join(pieces), new_token_ids, finish_reason)

    def _append_without_search(
        self, new_token_ids: list[int], finish_reason: FinishReason | None, *, hidden: bool
    ) -> TextDelta:
        """Do the same without stop strings, with which no text is held back."""
        self._num_tokens += len(new_token_ids)
        text = self._detokenizer.append(new_token_ids[:-1] if hidden else new_token_ids)
        if finish_reason is not None:
            text += self._detokenizer.finish()
        return TextDelta(text, new_token_ids, finish_reason)

    def _text_of(self, token_id: int) -> str:
        """Return the text that is final after a token; the mark of one that only stops."""
        if mark := self._marks.of(token_id):
            return self._detokenizer.finish() + mark
        return self._detokenizer.append((token_id,))

    def _add(self, token_id: int) -> str:
        """Return the text that is final after one more token."""
        text = self._text_of(token_id)
        released = self._release(text)
        if self._matcher.num_undecided:
            self._hold(token_id, len(text), self._matcher.num_undecided)
        else:
            self._forget()
        return released

    def _forget(self) -> None:
        """Keep no tokens but the detokenizer's, as none may belong to a stop string."""
        self._context_ids = self._detokenizer.context_ids
        self._tokens = deque([_Held(self._context_ids)])
        self._num_characters = 0

    def _hold(self, token_id: int, num_characters: int, num_undecided: int) -> None:
        """Keep a token, and only as many before it as have the undecided characters."""
        last, context_ids = self._tokens[-1], self._detokenizer.context_ids
        if not num_characters and context_ids == self._context_ids:
            return  # it has changed nothing
        last.token_ids.append(token_id)
        last.num_characters = num_characters
        self._num_characters += num_characters
        self._context_ids = context_ids
        if num_characters:
            self._tokens.append(_Held(context_ids))
        while self._num_characters - self._tokens[0].num_characters >= num_undecided:
            self._num_characters -= self._tokens.popleft().num_characters

    def _release(self, piece: str) -> str:
        """Return the text that is final after ``piece``."""
        if not piece:
            return piece
        text = self._held + piece
        if self._num_tokens <= self._min_tokens:
            self._matcher.skip(piece)
        elif match := self._matcher.find(piece):
            self._stop_string = self._marks.original(self._matcher.found)
            self._held = ""
            end = match.end if self._keeps_stop else match.start
            return self._marks.without(text[: len(text) - len(piece) + end])
        undecided = 0 if self._keeps_stop else self._matcher.num_undecided
        clear = len(text) - undecided
        self._held = text[clear:]
        return self._marks.without(text[:clear])


def resumed_delta(
    tokenizer: Tokenizer,
    params: SamplingParams,
    state: StreamState,
    new_token_ids: list[int],
    finish_reason: FinishReason | None,
    stops: Stops | None = None,
) -> TextDelta:
    """Return what a stream in ``state`` adds with these tokens; ``finish_reason`` may come from
    itself.

    The reason ``stop`` does not say whether a stop string ended the completion, with a token that
    has text, or the engine, with a stop token that has none. So the tokens are first added without
    the reason. With another reason, all tokens have text.
    """
    stream = TextStream.resume(tokenizer, params, state, stops)
    if finish_reason is not FinishReason.STOP:
        return stream.append(new_token_ids, finish_reason)
    delta = stream.append(new_token_ids)
    if stream.stopped:
        return delta
    return TextStream.resume(tokenizer, params, state, stops).append(new_token_ids, finish_reason)
