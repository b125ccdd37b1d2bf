"""The queue of waiting sequences: by priority, and fair among tenants of equal priority."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping

from paged_backend.core.fairness.lazy_heap import Key, LazyHeap
from paged_backend.core.fairness.tenant_queue import Account, TenantQueue
from paged_backend.core.sequence import Sequence
from paged_backend.values.request import Request


class FairQueue:
    """Orders sequences by priority, then by the service of their tenants, then by arrival.

    The service of a tenant is the cost of its computed tokens, divided by its weight. It is counted
    separately for each priority, because tenants compete only at equal priority. The queue also
    chooses a running sequence to preempt, if the next one cannot start otherwise.

    Args:
        tenant_weights: the weight of each tenant. A tenant with weight 2 gets twice the service of
            a tenant with weight 1. The default weight is 1.
        fair: if False, tenants are ignored, and sequences of equal priority start in the order of
            arrival.
    """

    def __init__(self, tenant_weights: Mapping[str, float], *, fair: bool) -> None:
        self._weights = tenant_weights
        self._fair = fair
        self._queues: dict[int, TenantQueue] = {}  # by priority, of open requests
        self._order = LazyHeap[int](self._key)  # heap of the priorities
        self._by_id: dict[int, Sequence] = {}
        self._by_tenant: Counter[str] = Counter()  # waiting requests, whether fair or not
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Total number of tokens in the waiting sequences; a request's prompt counts once."""
        return self._num_tokens

    @property
    def num_requests(self) -> int:
        """Number of requests with a first completion that waits."""
        return self._by_tenant.total()

    def open(self, request: Request) -> None:
        """Announce a request. Its sequences may be added until :meth:`close`."""
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
        """Add a sequence of an open request. The sequence is new or was preempted."""
        queue = self._queues[seq.request.priority]
        was_empty = queue.first() is None
        queue.add(self._tenant(seq.request), seq)
        if was_empty:
            self._order.push(seq.request.priority)
        self._by_id[seq.seq_id] = seq
        self._by_tenant[seq.request.tenant] += _is_first(seq)
        self._num_tokens += _size(seq)

    def discard(self, seq: Sequence) -> None:
        """Remove a sequence from the queue; do nothing if it does not wait."""
        if self._by_id.pop(seq.seq_id, None) is not None:
            self._queues[seq.request.priority].discard(self._tenant(seq.request), seq)
            self._num_tokens -= _size(seq)  # the number cannot change while it waits
            self._by_tenant[seq.request.tenant] -= _is_first(seq)
            if not self._by_tenant[seq.request.tenant]:
                del self._by_tenant[seq.request.tenant]

    def num_waiting_of(self, tenant: str) -> int:
        """Return the number of requests of a tenant with a first completion that waits."""
        return self._by_tenant[tenant]

    def first(self) -> Sequence:
        """Return the next sequence to start, without removing it.

        Raises:
            LookupError: no sequence waits.
        """
        priority = self._order.first()
        seq = None if priority is None else self._queues[priority].first()
        if seq is None:
            raise LookupError("nothing waits")
        return seq

    def priority_key(self, seq: Sequence) -> tuple[int, float]:
        """Return (priority, counter of the tenant) as the sort key; lower keys come first."""
        return (seq.request.priority, self._account(seq.request).counter)

    def find_victim(self, seq: Sequence, running: Iterable[Sequence]) -> Sequence | None:
        """Return a running sequence to preempt for ``seq``; None if ``seq`` must wait.

        The share of a tenant is its number of running sequences divided by its weight. Only
        sequences with the priority of ``seq`` count, and only tenants that received more service
        than the tenant of ``seq``. The victim is the newest sequence of the tenant with the largest
        share. This share must exceed twice the share that the tenant of ``seq`` has once ``seq``
        runs; otherwise there is no victim.

        A tenant with long outputs therefore cannot keep the other tenants waiting until they end.
        The factor of two prevents two tenants from preempting each other again and again.
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
        """Charge computed tokens of an open request to its tenant.

        Args:
            request: the request.
            cost: number of tokens times their ``PROMPT_TOKEN_COST`` or ``OUTPUT_TOKEN_COST``.
        """
        self._account(request).charge(cost)

    def charge_each(self, requests: Iterable[Request], cost: int) -> None:
        """Charge each of many open requests the same, with little work for each.

        Args:
            requests: the requests; one that is there twice is charged twice.
            cost: cost for each, as in `charge`.
        """
        numbers: dict[tuple[int, str], int] = {}  # for few requests, faster than a Counter
        for request in requests:
            key = request.priority, request.tenant
            numbers[key] = numbers.get(key, 0) + 1
        for (priority, tenant), number in numbers.items():
            account = self._queues[priority].account(tenant if self._fair else "")
            account.charge(number * cost)

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._by_id

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_id.values())

    def check_invariants(self) -> None:
        """Check all counts against the waiting sequences.

        Raises:
            RuntimeError: a count is wrong.
        """
        if self._num_tokens != sum(map(_size, self)):
            raise RuntimeError(f"the queue counts {self._num_tokens} waiting tokens, wrongly")
        if self._by_tenant != Counter(seq.request.tenant for seq in self if _is_first(seq)):
            raise RuntimeError("the queue counts the requests of a tenant wrongly")
        for queue in self._queues.values():
            queue.check_invariants()

    def _key(self, priority: int) -> Key | None:
        queue = self._queues.get(priority)
        return None if queue is None or queue.first() is None else (priority, 0)

    def _account(self, request: Request) -> Account:
        return self._queues[request.priority].account(self._tenant(request))

    def _tenant(self, request: Request) -> str:
        return request.tenant if self._fair else ""


def _is_first(seq: Sequence) -> bool:
    return seq.index == 0


def _size(seq: Sequence) -> int:
    """Return the tokens of a waiting sequence that no other completion of its request counts."""
    return seq.num_tokens if _is_first(seq) else seq.num_output_tokens
