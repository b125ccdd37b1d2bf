"""The interface of a queue policy: the order in which waiting sequences start."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from paged_backend.core.sequence import Sequence
from paged_backend.values.request import Request


class QueuePolicy(Protocol):
    """Holds the waiting sequences and chooses the one to start next.

    It also chooses a running sequence to preempt, if the next one cannot start otherwise.
    """

    @property
    def num_tokens(self) -> int:
        """Total number of tokens in the waiting sequences; a request's prompt counts once."""
        ...

    @property
    def num_requests(self) -> int:
        """Number of requests whose first completion waits."""
        ...

    def open(self, request: Request) -> None:
        """Announce a request. Its sequences may be added until :meth:`close`."""
        ...

    def close(self, request: Request) -> None:
        """Announce that all sequences of a request have ended."""
        ...

    def add(self, seq: Sequence) -> None:
        """Add a sequence of an open request. The sequence is new or was preempted."""
        ...

    def discard(self, seq: Sequence) -> None:
        """Remove a sequence from the queue; do nothing if it does not wait."""
        ...

    def first(self) -> Sequence:
        """Return the next sequence to start, without removing it.

        Raises:
            LookupError: no sequence waits.
        """
        ...

    def priority_key(self, seq: Sequence) -> tuple[int, float]:
        """Return the sort key of a waiting or running sequence. Lower keys come first."""
        ...

    def find_victim(self, seq: Sequence, running: Iterable[Sequence]) -> Sequence | None:
        """Return a running sequence to preempt so that ``seq`` can start.

        Return None if ``seq`` must wait instead.
        """
        ...

    def charge(self, request: Request, cost: int) -> None:
        """Charge computed tokens of an open request to its tenant.

        Args:
            request: the request.
            cost: number of tokens times their ``PROMPT_TOKEN_COST`` or ``OUTPUT_TOKEN_COST``.
        """
        ...

    def num_waiting_of(self, tenant: str) -> int:
        """Return the number of requests of a tenant whose first completion waits."""
        ...

    def check_invariants(self) -> None:
        """Check the internal state of the policy.

        Raises:
            RuntimeError: the state is inconsistent.
        """
        ...

    def __len__(self) -> int: ...

    def __contains__(self, seq_id: int) -> bool: ...

    def __iter__(self) -> Iterator[Sequence]: ...
