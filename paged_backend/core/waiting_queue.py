"""Sequences that wait, in the order of their admission."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping

from paged_backend.core.lazy_heap import Key, LazyHeap
from paged_backend.core.sequence import Sequence
from paged_backend.core.tenants import Account, TenantQueue
from paged_backend.request import Request


class WaitingQueue:
    """Ordered by priority, then the least served tenant, then arrival.

    Only tenants of equal priority compete, so each priority has its own counters.

    Args:
        tenant_weights: shares of tenants; those not named have 1.
        fair: whether tenants are told apart; if not, arrival decides among equal priorities.
    """

    def __init__(self, tenant_weights: Mapping[str, float], *, fair: bool) -> None:
        self._weights = tenant_weights
        self._fair = fair
        self._queues: dict[int, TenantQueue] = {}  # by priority, of open requests
        self._order = LazyHeap[int](self._key)  # of priorities
        self._by_id: dict[int, Sequence] = {}
        self._by_tenant: Counter[str] = Counter()  # how many wait; fair or not
        self.num_tokens = 0  # of all that wait

    def open(self, request: Request) -> None:
        """A request has come; its sequences may be added until it is closed."""
        if request.priority not in self._queues:
            self._queues[request.priority] = TenantQueue(self._weights)
        self._queues[request.priority].open(self._tenant(request))

    def close(self, request: Request) -> None:
        """All of a request has ended."""
        queue = self._queues[request.priority]
        queue.close(self._tenant(request))
        if queue.num_tenants == 0:
            del self._queues[request.priority]

    def add(self, seq: Sequence) -> None:
        """Put a sequence of an open request in its place."""
        queue = self._queues[seq.request.priority]
        begins = queue.first() is None
        queue.add(self._tenant(seq.request), seq)
        if begins:
            self._order.file(seq.request.priority)
        self._by_id[seq.seq_id] = seq
        self._by_tenant[seq.request.tenant] += 1
        self.num_tokens += seq.num_tokens

    def discard(self, seq: Sequence) -> None:
        """Take a sequence out if it waits."""
        if self._by_id.pop(seq.seq_id, None) is not None:
            self._queues[seq.request.priority].discard(self._tenant(seq.request), seq)
            self.num_tokens -= seq.num_tokens  # which cannot change while it waits
            self._by_tenant[seq.request.tenant] -= 1
            if not self._by_tenant[seq.request.tenant]:
                del self._by_tenant[seq.request.tenant]

    def num_waiting_of(self, tenant: str) -> int:
        """How many sequences of a tenant wait."""
        return self._by_tenant[tenant]

    def first(self) -> Sequence:
        """The next to be admitted; there must be one."""
        priority = self._order.first()
        seq = None if priority is None else self._queues[priority].first()
        if seq is None:
            raise LookupError("nothing waits")
        return seq

    def turn(self, seq: Sequence) -> tuple[int, float]:
        """When it is the turn of a sequence, waiting or not: the lower, the earlier."""
        return (seq.request.priority, self._account(seq.request).counter)

    def has_rivals(self, seq: Sequence) -> bool:
        """Whether other tenants have open requests of the same priority."""
        return self._queues[seq.request.priority].num_tenants > 1

    def displaced_by(self, seq: Sequence, running: Iterable[Sequence]) -> Sequence | None:
        """Which running sequence has to make way for a waiting one that finds no place, if any.

        It is the last one of the tenant that runs most, by weight, among those that were served
        more than the waiting one's, if that is more than twice what the latter then runs. So
        nobody holds all seats until long answers end, and two tenants that both have enough to
        do do not drive out each other in turn.
        """
        own = self._account(seq.request)
        held: defaultdict[Account, list[Sequence]] = defaultdict(list)
        for other in running:
            if other.request.priority == seq.request.priority:
                held[self._account(other.request)].append(other)
        fair_part = (len(held[own]) + 1) / own.weight
        parts = {
            account: len(others) / account.weight
            for account, others in held.items()
            if account.counter > own.counter
        }
        most = max(parts, key=parts.__getitem__, default=own)
        if most is own or parts[most] <= 2 * fair_part:
            return None
        return max(held[most], key=lambda other: other.seq_id)

    def charge(self, request: Request, cost: int) -> None:
        """An open request was served, at a cost of ``tenants.*_TOKEN_COST``."""
        self._account(request).charge(cost)

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._by_id

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_id.values())

    def check_invariants(self) -> None:
        """Check the books.

        Raises:
            RuntimeError: they are wrong.
        """
        if self.num_tokens != sum(seq.num_tokens for seq in self):
            raise RuntimeError(f"{self.num_tokens} tokens are said to wait")
        if self._by_tenant != Counter(seq.request.tenant for seq in self):
            raise RuntimeError("tenants are said to wait with more or less than they do")
        for queue in self._queues.values():
            queue.check_invariants()

    def _key(self, priority: int) -> Key | None:
        queue = self._queues.get(priority)
        return None if queue is None or queue.first() is None else (priority, 0)

    def _account(self, request: Request) -> Account:
        return self._queues[request.priority].account(self._tenant(request))

    def _tenant(self, request: Request) -> str:
        return request.tenant if self._fair else ""
