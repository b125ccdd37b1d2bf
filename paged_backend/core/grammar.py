"""The interface of grammars, which constrain the output of a completion."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Protocol

SLOW_S = 0.002  # seconds of processor time; 99% of the masks of real schemas take less
MAX_TOKENS_ASIDE = 64
_NUM_CALM = 256  # tokens in time after which an earlier delay counts half


class SharedLexer:
    """The lexer that the copies of a grammar share: one thread at a time can use it.

    It also remembers how long its grammar took lately. After a delay, the next tokens are worked
    on aside, by another thread than the engine's: 1 token at first, and twice as many after each
    further delay.

    Args:
        always_aside: never let the engine's thread work on the grammar.

    Attributes:
        is_always_aside: as given.
        lock: must be held to use a grammar of this lexer.
        num_aside: number of tokens that are still worked on aside.
        num_after_delay: number of tokens that were worked on aside after the last delay; 0 without
            delays for long.
    """

    __slots__ = ("_num_calm", "is_always_aside", "lock", "num_after_delay", "num_aside")

    def __init__(self, *, always_aside: bool = False) -> None:
        self.lock = threading.RLock()
        self.is_always_aside = always_aside
        self.num_aside = int(always_aside)
        self.num_after_delay = 0
        self._num_calm = 0

    def note(self, seconds: float) -> None:
        """Learn from the time that the work for a token took. Only the engine's thread does so."""
        if seconds > SLOW_S:
            self.delay()
            return
        self.num_aside = max(int(self.is_always_aside), self.num_aside - 1)
        self._num_calm += 1
        if self._num_calm == _NUM_CALM:
            self.num_after_delay //= 2
            self._num_calm = 0

    def delay(self) -> None:
        """Work aside for a while, because the engine's thread has no time for this grammar."""
        self.num_after_delay = min(MAX_TOKENS_ASIDE, max(1, 2 * self.num_after_delay))
        self.num_aside = self.num_after_delay
        self._num_calm = 0


class Grammar(Protocol):
    """The state of one completion's grammar; used by one thread at a time, under its lexer's lock.

    The state must depend only on the tokens. Another engine can then resume the completion.
    """

    @property
    def lexer(self) -> SharedLexer:
        """What it shares with other grammars; `recover` may replace it."""
        ...

    @property
    def is_stuck(self) -> bool:
        """True if `recover` must be called before the next mask."""
        ...

    @property
    def problem(self) -> str:
        """Why there can be no further mask; empty if there can be."""
        ...

    def accept(self, token_ids: list[int]) -> bool:
        """Add tokens to the output; returns False, at each call, if it does not allow them."""
        ...

    def allows(self, token_id: int) -> bool:
        """Return True only if the next mask allows a token, which may not end the output."""
        ...

    def num_allowed(self, draft_token_ids: list[int]) -> int:
        """Return the number of drafts before the first one that is surely not allowed."""
        ...

    def masks_along(self, draft_token_ids: list[int], first: int = 0) -> list[bytes]:
        """Return the masks of the next token, and of the token after each draft.

        There may be fewer masks if the grammar does not allow a draft. The state does not change.
        A mask has the form of :class:`paged_backend.core.scheduler_output.TokenMasks`.

        Args:
            draft_token_ids: the drafts.
            first: number of first masks to leave out.
        """
        ...

    def forced_token_ids(self) -> list[int]:
        """Return the tokens that must follow; tokenizing their text gives the same tokens."""
        ...

    def recover(self) -> Iterator[None]:
        """Make a grammar that is stuck usable again, in pieces: some work before each item."""
        ...
