"""The interface of a queue policy: the order in which waiting sequences start."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from paged_backend.core.sequence import Sequence
from paged_backend.request import Request


class QueuePolicy(Protocol):
    """Holds the waiting sequences, and chooses the next one and its victims."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all waiting sequences."""
        ...

    def open(self, request: Request) -> None:
        """Announce a request; its sequences may be added until it is closed."""
        ...

    def close(self, request: Request) -> None:
        """Announce that all sequences of a request have ended."""
        ...

    def add(self, seq: Sequence) -> None:
        """Add a sequence of an open request, new or preempted."""
        ...

    def discard(self, seq: Sequence) -> None:
        """Remove a sequence if it waits."""
        ...

    def first(self) -> Sequence:
        """Return the next sequence to start.

        Raises:
            LookupError: none waits.
        """
        ...

    def priority_key(self, seq: Sequence) -> tuple[int, float]:
        """Return the sort key of a sequence, waiting or not: lower keys come first."""
        ...

    def find_victim(self, seq: Sequence, running: Iterable[Sequence]) -> Sequence | None:
        """Return the running sequence to preempt so that ``seq`` gets its share; None for none."""
        ...

    def charge(self, request: Request, cost: int) -> None:
        """Charge computed tokens to an open request."""
        ...

    def num_waiting_of(self, tenant: str) -> int:
        """Return the number of waiting sequences of a tenant."""
        ...

    def check_invariants(self) -> None:
        """Check the policy's own state.

        Raises:
            RuntimeError: the state is inconsistent.
        """
        ...

    def __len__(self) -> int: ...

    def __contains__(self, seq_id: int) -> bool: ...

    def __iter__(self) -> Iterator[Sequence]: ...
