"""The text of one answer as its reader gets it: detokenised, cut at stop strings."""

from __future__ import annotations

from dataclasses import dataclass

from paged_backend.outputs import FinishReason
from paged_backend.sampling_params import SamplingParams
from paged_backend.text.detokenizer import Detokenizer
from paged_backend.text.stop_strings import StopMatcher
from paged_backend.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What is new in an answer."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None


class TextStream:
    """Turns the tokens of one answer into pieces of text.

    Text that may become a stop string is held back until it is clear. The first token that can
    complete a stop string is the one after ``min_tokens`` others, as with stop tokens.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._matcher = StopMatcher(params.stop) if params.stop else None
        self._min_tokens = params.min_tokens
        self._keeps_stop = params.include_stop_str_in_output
        self._num_tokens = 0
        self._held = ""
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found: the engine need not go on with the sequence."""
        return self._stopped

    def append(
        self, new_token_ids: list[int], finish_reason: FinishReason | None = None
    ) -> TextDelta:
        """Take tokens from the engine, with the reason if it ended the sequence with them.

        Tokens after the one that completes a stop string are dropped, as is everything in later
        calls.
        """
        if self._stopped:
            return TextDelta("", [], FinishReason.STOP)
        pieces: list[str] = []
        hidden = finish_reason is FinishReason.STOP and not self._keeps_stop
        for count, token_id in enumerate(new_token_ids, 1):
            self._num_tokens += 1
            if hidden and count == len(new_token_ids):
                break  # the token that ended the sequence is no part of its text
            pieces.append(self._release(self._detokenizer.append((token_id,))))
            if self._stopped:
                return TextDelta("".join(pieces), new_token_ids[:count], FinishReason.STOP)
        if finish_reason is not None:
            pieces.append(self._release(self._detokenizer.finish()))
            if self._stopped:
                finish_reason = FinishReason.STOP
            else:
                pieces.append(self._held)
                self._held = ""
        return TextDelta("".join(pieces), new_token_ids, finish_reason)

    def _release(self, piece: str) -> str:
        """The text that is clear once ``piece`` has come."""
        if self._matcher is None or not piece:
            return piece
        text = self._held + piece
        if self._num_tokens <= self._min_tokens:
            self._matcher.skip(piece)
        elif match := self._matcher.find(piece):
            self._stopped = True
            self._held = ""
            return text[: len(text) - len(piece) + (match.end if self._keeps_stop else match.start)]
        undecided = 0 if self._keeps_stop else self._matcher.num_undecided
        clear = len(text) - undecided
        self._held = text[clear:]
        return text[:clear]
