"""The order of waiting sequences of equal priority: the least served tenant comes first.

This is the Virtual Token Counter (Sheng et al., "Fairness in Serving Large Language Models",
OSDI 2024, algorithm 2). Each tenant has a counter of the service that it received, divided by its
weight. When a tenant without waiting sequences adds one, its counter is raised at least to the
lowest counter of the tenants that already wait. A tenant therefore cannot save up service while it
is idle. While two tenants both have waiting sequences, their counters never differ by more than the
weighted cost of what one of them can have in flight at once.

The paper charges a whole prompt when it starts, because its engine has no chunked prefill. This
queue charges each chunk of a prompt when the chunk is scheduled. Sequences that arrive later can
therefore start between two chunks of a long prompt.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from paged_backend.core.fairness.lazy_heap import Key, LazyHeap
from paged_backend.core.sequence import Sequence

# The costs in the paper's experiments. Cached prompt tokens are free because nothing computes
# them. Tokens that are recomputed after a preemption are free because the engine caused it.
PROMPT_TOKEN_COST = 1
OUTPUT_TOKEN_COST = 2

MAX_DEBTORS = 256
"""Maximum number of tenants without open requests that are remembered, for each priority."""


class Account:
    """The counter of the service that one tenant received, and its waiting sequences."""

    __slots__ = ("_cost", "_initial", "_order", "num_open", "waiting", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self._initial = 0.0  # see `counter`
        self._cost = 0
        self.num_open = 0  # requests that wait or run
        self.waiting: dict[int, Sequence] = {}  # by seq_id
        self._order = LazyHeap[int](lambda seq_id: (seq_id, 0) if seq_id in self.waiting else None)

    @property
    def counter(self) -> float:
        """The cost of the service divided by the weight, plus an initial counter.

        Costs are added up exactly, so that it does not matter which of them are charged together.
        """
        return self._initial + self._cost / self.weight

    @counter.setter
    def counter(self, initial: float) -> None:
        self._initial, self._cost = initial, 0

    @property
    def key(self) -> Key | None:
        """Sort key of the tenant, lowest first; None while it has no waiting sequence."""
        first = self.first()
        return None if first is None else (self.counter, first.seq_id)

    def add(self, seq: Sequence) -> None:
        """Add a waiting sequence; its place depends on its ``seq_id`` only."""
        self.waiting[seq.seq_id] = seq
        self._order.push(seq.seq_id)

    def first(self) -> Sequence | None:
        """Return the oldest waiting sequence; None if there is none."""
        seq_id = self._order.first()
        return None if seq_id is None else self.waiting[seq_id]

    def charge(self, cost: int) -> None:
        """Add the cost of computed tokens, divided by the tenant's weight, to the counter."""
        self._cost += cost


class TenantQueue:
    """Orders sequences of equal priority by the service of their tenants, then by arrival.

    Each operation takes O(log n) amortized time for n tenants with waiting sequences. Memory grows
    with the number of open requests, not with the number of tenants ever seen: at most
    ``MAX_DEBTORS`` tenants without open requests are remembered.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._accounts: dict[str, Account] = {}  # accounts of tenants with open requests
        # Tenants that left with a higher counter than the others; the longest gone first.
        self._debtors: OrderedDict[str, Account] = OrderedDict()
        self._order = LazyHeap[Account](lambda account: account.key)
        self._last = Account(1.0)  # the tenant that stopped waiting last

    @property
    def num_tenants(self) -> int:
        """Number of tenants with at least one open request."""
        return len(self._accounts)

    def account(self, tenant: str) -> Account:
        """Return the account of a tenant, which must have an open request."""
        return self._accounts[tenant]

    def open(self, tenant: str) -> None:
        """Add one to the number of open requests of a tenant."""
        account = self._accounts.get(tenant) or self._debtors.pop(tenant, None)
        if account is None:
            account = Account(self._weights.get(tenant, 1.0))
        self._accounts[tenant] = account
        account.num_open += 1

    def close(self, tenant: str) -> None:
        """Subtract one from the number of open requests of a tenant.

        The caller must first remove the sequences of the closed request from the queue.
        """
        account = self._accounts[tenant]
        account.num_open -= 1
        if account.num_open == 0:
            self._debtors[tenant] = self._accounts.pop(tenant)
            self._forget_debtors()

    def add(self, tenant: str, seq: Sequence) -> None:
        """Add a sequence of a tenant with an open request.

        It goes before the tenant's newer sequences, because it may be a sequence that was
        preempted, or a completion of an earlier request.
        """
        account = self._accounts[tenant]
        if not account.waiting:
            account.counter = max(account.counter, self._initial_counter())
        account.add(seq)
        if account.first() is seq:
            self._order.push(account)

    def discard(self, tenant: str, seq: Sequence) -> None:
        """Remove a waiting sequence."""
        account = self._accounts[tenant]
        del account.waiting[seq.seq_id]
        if not account.waiting:
            self._last = account

    def first(self) -> Sequence | None:
        """Return the next sequence to start, without removing it; None if no sequence waits."""
        account = self._order.first()
        return None if account is None else account.first()

    def check_invariants(self) -> None:
        """Check every account.

        Raises:
            RuntimeError: the oldest sequence is not the first, or a tenant has no open request.
        """
        for tenant, account in self._accounts.items():
            first = account.first()
            oldest = min(account.waiting, default=None)
            if account.num_open < 1 or oldest != (None if first is None else first.seq_id):
                raise RuntimeError(f"the account of tenant {tenant!r} is wrong")

    def _initial_counter(self) -> float:
        """Return the lowest counter that a tenant can have when its first sequence is added."""
        account = self._order.first() or self._last
        return account.counter

    def _forget_debtors(self) -> None:
        """Forget debtors, the longest gone first.

        A debtor is forgotten if its counter is not above the initial counter of a new tenant, or if
        there are more than ``MAX_DEBTORS``.
        """
        start = self._initial_counter()
        while self._debtors:
            oldest = next(iter(self._debtors.values()))
            if oldest.counter > start and len(self._debtors) <= MAX_DEBTORS:
                break
            self._debtors.popitem(last=False)
