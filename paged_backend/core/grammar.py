"""The interface of grammars, which constrain the output of a completion."""

from __future__ import annotations

from typing import Protocol


class Grammar(Protocol):
    """The state of one completion's grammar. Only the engine's thread uses it.

    The state must depend only on the tokens. Another engine can then resume the completion.
    """

    def accept(self, token_ids: list[int]) -> bool:
        """Add tokens to the output; returns False, at each call, if it does not allow them."""
        ...

    def allows(self, token_id: int) -> bool:
        """Return True only if the next mask allows a token, which may not end the output."""
        ...

    def masks_along(self, draft_token_ids: list[int]) -> list[bytes]:
        """Return the masks of the next token, and of the token after each draft.

        There may be fewer masks if the grammar does not allow a draft. The state does not change.
        A mask has the form of :class:`paged_backend.core.scheduler_output.TokenMasks`.
        """
        ...

    def forced_token_ids(self) -> list[int]:
        """Return the tokens that must follow; tokenizing their text gives the same tokens."""
        ...
