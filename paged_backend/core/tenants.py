"""Whose turn it is among tenants: that of the one who was served least.

This is the Virtual Token Counter (Sheng et al., "Fairness in Serving Large Language Models",
OSDI 2024, algorithm 2). A tenant that begins to wait starts no lower than those who wait already,
so that nobody saves up turns while there is nothing to serve. Between two tenants that both have
something waiting, the service by weight then never differs by more than what one of them can have
under way at once.

Prompts are charged as they are computed, not when they begin as in the paper, whose engine has no
chunks: so a long one under way takes turns with what others send meanwhile.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from paged_backend.core.lazy_heap import Key, LazyHeap
from paged_backend.core.sequence import Sequence

# The costs of the paper's experiments. A prompt's cached tokens are free, as nothing computes
# them, and so is what is computed again after preemption, which is the engine's doing.
PROMPT_TOKEN_COST = 1
OUTPUT_TOKEN_COST = 2

MAX_DEBTORS = 256
"""Tenants of one priority that have left and are still remembered."""


class Account:
    """What one tenant was served, and what of it waits."""

    __slots__ = ("counter", "num_open", "waiting", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.counter = 0.0  # cost by weight of what was served, above where the tenant started
        self.num_open = 0  # requests that wait or run
        self.waiting: OrderedDict[int, Sequence] = OrderedDict()  # by seq_id, in this order

    @property
    def key(self) -> Key | None:
        """The lower, the earlier it is the tenant's turn; none while nothing waits."""
        return (self.counter, next(iter(self.waiting))) if self.waiting else None

    def charge(self, cost: int) -> None:
        """Note what was served."""
        self.counter += cost / self.weight


class TenantQueue:
    """Waiting sequences of equal priority: the least served tenant's first, then by arrival.

    Each operation costs the logarithm of the number of tenants that wait, amortised, and what is
    kept grows with the requests that are open, not with the tenants that ever were.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._accounts: dict[str, Account] = {}  # of tenants with open requests
        # Those who left with more than the others had; the longest gone first.
        self._debtors: OrderedDict[str, Account] = OrderedDict()
        self._turns = LazyHeap[Account](lambda account: account.key)
        self._last = Account(1.0)  # that ceased to wait

    @property
    def num_tenants(self) -> int:
        """Those with a request that waits or runs."""
        return len(self._accounts)

    def account(self, tenant: str) -> Account:
        """That of a tenant with an open request."""
        return self._accounts[tenant]

    def open(self, tenant: str) -> None:
        """A tenant has one more request."""
        account = self._accounts.get(tenant) or self._debtors.pop(tenant, None)
        if account is None:
            account = Account(self._weights.get(tenant, 1.0))
        self._accounts[tenant] = account
        account.num_open += 1

    def close(self, tenant: str) -> None:
        """One of a tenant's requests has ended, with nothing of it waiting."""
        account = self._accounts[tenant]
        account.num_open -= 1
        if account.num_open == 0:
            self._debtors[tenant] = self._accounts.pop(tenant)
            self._forget_debtors()

    def add(self, tenant: str, seq: Sequence) -> None:
        """Put a sequence in its place: the tenant's last, or its first if it comes back."""
        account = self._accounts[tenant]
        if not account.waiting:
            account.counter = max(account.counter, self._start())
        account.waiting[seq.seq_id] = seq
        if seq.seq_id <= next(iter(account.waiting)):
            # Preempted: all that waits came later, or it would have been admitted before.
            account.waiting.move_to_end(seq.seq_id, last=False)
            self._turns.file(account)

    def discard(self, tenant: str, seq: Sequence) -> None:
        """Take a waiting sequence out."""
        account = self._accounts[tenant]
        del account.waiting[seq.seq_id]
        if not account.waiting:
            self._last = account

    def first(self) -> Sequence | None:
        """The next to be admitted, if any waits."""
        account = self._turns.first()
        return None if account is None else next(iter(account.waiting.values()))

    def check_invariants(self) -> None:
        """Check the books.

        Raises:
            RuntimeError: a tenant's sequences stand in the wrong order, or it has no request.
        """
        for tenant, account in self._accounts.items():
            if account.num_open < 1 or list(account.waiting) != sorted(account.waiting):
                raise RuntimeError(f"the account of tenant {tenant!r} is wrong")

    def _start(self) -> float:
        """Where a tenant starts that begins to wait."""
        account = self._turns.first() or self._last
        return account.counter

    def _forget_debtors(self) -> None:
        """Forget those who would start where anybody does, and the oldest of too many."""
        start = self._start()
        while self._debtors:
            oldest = next(iter(self._debtors.values()))
            if oldest.counter > start and len(self._debtors) <= MAX_DEBTORS:
                break
            self._debtors.popitem(last=False)
