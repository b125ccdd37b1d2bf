"""A queue policy by priority, fair among tenants of equal priority."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping

from paged_backend.core.fairness.lazy_heap import Key, LazyHeap
from paged_backend.core.fairness.tenant_queue import Account, TenantQueue
from paged_backend.core.sequence import Sequence
from paged_backend.request import Request


class FairQueue:
    """Orders sequences by priority, then by the service of their tenants, then by arrival.

    See :class:`~paged_backend.core.fairness.policy.QueuePolicy`. Only tenants of equal priority
    compete, so each priority has its own counters.

    Args:
        tenant_weights: the shares of tenants; tenants that are not named have a share of 1.
        fair: whether tenants are told apart; if not, equal priorities are served by arrival.
    """

    def __init__(self, tenant_weights: Mapping[str, float], *, fair: bool) -> None:
        self._weights = tenant_weights
        self._fair = fair
        self._queues: dict[int, TenantQueue] = {}  # by priority, of open requests
        self._order = LazyHeap[int](self._key)  # of priorities
        self._by_id: dict[int, Sequence] = {}
        self._by_tenant: Counter[str] = Counter()  # waiting sequences, whether fair or not
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all waiting sequences."""
        return self._num_tokens

    def open(self, request: Request) -> None:
        """Announce a request; its sequences may be added until it is closed."""
        if request.priority not in self._queues:
            self._queues[request.priority] = TenantQueue(self._weights)
        self._queues[request.priority].open(self._tenant(request))

    def close(self, request: Request) -> None:
        """Announce that all sequences of a request have ended."""
        queue = self._queues[request.priority]
        queue.close(self._tenant(request))
        if queue.num_tenants == 0:
            del self._queues[request.priority]

    def add(self, seq: Sequence) -> None:
        """Add a sequence of an open request, new or preempted."""
        queue = self._queues[seq.request.priority]
        was_empty = queue.first() is None
        queue.add(self._tenant(seq.request), seq)
        if was_empty:
            self._order.push(seq.request.priority)
        self._by_id[seq.seq_id] = seq
        self._by_tenant[seq.request.tenant] += 1
        self._num_tokens += seq.num_tokens

    def discard(self, seq: Sequence) -> None:
        """Remove a sequence if it waits."""
        if self._by_id.pop(seq.seq_id, None) is not None:
            self._queues[seq.request.priority].discard(self._tenant(seq.request), seq)
            self._num_tokens -= seq.num_tokens  # the number cannot change while it waits
            self._by_tenant[seq.request.tenant] -= 1
            if not self._by_tenant[seq.request.tenant]:
                del self._by_tenant[seq.request.tenant]

    def num_waiting_of(self, tenant: str) -> int:
        """Return the number of waiting sequences of a tenant."""
        return self._by_tenant[tenant]

    def first(self) -> Sequence:
        """Return the next sequence to start.

        Raises:
            LookupError: none waits.
        """
        priority = self._order.first()
        seq = None if priority is None else self._queues[priority].first()
        if seq is None:
            raise LookupError("nothing waits")
        return seq

    def priority_key(self, seq: Sequence) -> tuple[int, float]:
        """Return the sort key of a sequence, waiting or not: lower keys come first."""
        return (seq.request.priority, self._account(seq.request).counter)

    def find_victim(self, seq: Sequence, running: Iterable[Sequence]) -> Sequence | None:
        """Choose a victim to preempt for ``seq``; None if ``seq`` has to wait.

        The victim is the newest sequence of the tenant with the largest weighted share among those
        that were served more than ``seq``'s tenant, provided that this share is more than twice
        what ``seq``'s tenant would then hold. No tenant can hold all sequences until long outputs
        end, and two tenants with enough work do not preempt each other in turn.
        """
        if self._queues[seq.request.priority].num_tenants == 1:
            return None
        own = self._account(seq.request)
        held: defaultdict[Account, list[Sequence]] = defaultdict(list)
        for other in running:
            if other.request.priority == seq.request.priority:
                held[self._account(other.request)].append(other)
        own_share = (len(held[own]) + 1) / own.weight
        shares = {
            account: len(others) / account.weight
            for account, others in held.items()
            if account.counter > own.counter
        }
        largest = max(shares, key=shares.__getitem__, default=own)
        if largest is own or shares[largest] <= 2 * own_share:
            return None
        return max(held[largest], key=lambda other: other.seq_id)

    def charge(self, request: Request, cost: int) -> None:
        """Charge computed tokens to the tenant of an open request, see ``*_TOKEN_COST``."""
        self._account(request).charge(cost)

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._by_id

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_id.values())

    def check_invariants(self) -> None:
        """Compare all counts with the sequences that wait.

        Raises:
            RuntimeError: a count is wrong.
        """
        if self._num_tokens != sum(seq.num_tokens for seq in self):
            raise RuntimeError(f"the queue counts {self._num_tokens} waiting tokens, wrongly")
        if self._by_tenant != Counter(seq.request.tenant for seq in self):
            raise RuntimeError("the queue counts the sequences of a tenant wrongly")
        for queue in self._queues.values():
            queue.check_invariants()

    def _key(self, priority: int) -> Key | None:
        queue = self._queues.get(priority)
        return None if queue is None or queue.first() is None else (priority, 0)

    def _account(self, request: Request) -> Account:
        return self._queues[request.priority].account(self._tenant(request))

    def _tenant(self, request: Request) -> str:
        return request.tenant if self._fair else ""
