"""Threads that run jobs of several tenants in a fair order."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from paged_backend.values.log import write_internal_error

Work = Callable[[], None]
"""A job. It must not raise."""

NUM_THREADS = 2  # threads of a lane; a tenant uses one of them at a time, and the others can go on
# After a longer job, tenants share NUM_THREADS - 1 threads, so that others find one free.
SLOW_S = 0.25
MAX_ACCOUNTS = 2**10  # accounts of tenants without jobs; what the others have spent is forgotten
# Jobs that are smaller by this and arrive within a second after a large one overtake it.
_CHARACTERS_PER_S = 100_000
_MAX_PASSED_S = 1.0


@dataclass(order=True, slots=True)
class _LaneJob:
    due_s: float
    number: int
    work: Work = field(compare=False)
    size: int = field(compare=False)


@dataclass(slots=True)
class _Account:
    """The jobs of a tenant, and the time that they have taken so far."""

    spent_s: float  # time on the threads, or more if the tenant came later than others
    jobs: list[_LaneJob] = field(default_factory=list)  # a heap
    num_running: int = 0
    size: int = 0  # total size of all jobs that wait or run
    is_slow: bool = False

    @property
    def num_jobs(self) -> int:
        """The number of jobs that wait or run."""
        return len(self.jobs) + self.num_running


class Lane:
    """Threads that run jobs.

    The tenant with jobs that have held the threads for the shortest time comes first. A tenant that
    had no job begins with the time of the tenant that was served last, so that it cannot save time
    up. A tenant has one running job at most.

    A job of a tenant is due after a delay that grows with its size, up to ``_MAX_PASSED_S``
    seconds. The one that is due first runs first. So small jobs overtake large ones, but only for a
    limited time.
    """

    def __init__(self, name: str) -> None:
        self._accounts: dict[str, _Account] = {}  # by tenant
        self._served_s = 0.0  # time of the tenant that was served last, when it was chosen
        self._num_slow = 0  # running jobs of slow tenants
        self._changed = threading.Condition()
        self._numbers = count()
        self._closed = False
        self.size = 0  # total size of all jobs that wait or run
        self.num_jobs = 0
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{index}", daemon=True)
            for index in range(NUM_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, work: Work, size: int, tenant: str) -> None:
        """Add a job of a tenant."""
        due_s = time.monotonic() + min(size / _CHARACTERS_PER_S, _MAX_PASSED_S)
        with self._changed:
            account = self._accounts.setdefault(tenant, _Account(self._served_s))
            if not account.num_jobs:
                account.spent_s = max(account.spent_s, self._served_s)
            heapq.heappush(account.jobs, _LaneJob(due_s, next(self._numbers), work, size))
            account.size += size
            self.size += size
            self.num_jobs += 1
            self._changed.notify()

    def share_of(self, tenant: str) -> tuple[int, int]:
        """Return the number and the size of a tenant's jobs that wait or run."""
        with self._changed:
            account = self._accounts.get(tenant)
            return (account.num_jobs, account.size) if account is not None else (0, 0)

    def close(self) -> None:
        """Run the remaining jobs, and end the threads."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (found := self._next()) is not None:
            account, job = found
            started_s = time.monotonic()
            try:
                job.work()
            except BaseException as error:  # an internal error of one request
                write_internal_error(error)
            self._end(account, job, time.monotonic() - started_s)

    def _next(self) -> tuple[_Account, _LaneJob] | None:
        """Wait for the next job; None once the lane is closed and nothing waits."""
        with self._changed:
            while (account := self._first()) is None:
                if self._closed and not any(found.jobs for found in self._accounts.values()):
                    return None
                self._changed.wait()
            self._served_s = account.spent_s
            self._num_slow += account.is_slow
            account.num_running += 1
            return account, heapq.heappop(account.jobs)

    def _first(self) -> _Account | None:
        """Return the first account with a job that may start now; None if there is none."""
        may_be_slow = self._num_slow < NUM_THREADS - 1
        return min(
            (
                account
                for account in self._accounts.values()
                if account.jobs and not account.num_running and (may_be_slow or not account.is_slow)
            ),
            key=lambda account: (account.spent_s, account.jobs[0]),
            default=None,
        )

    def _end(self, account: _Account, job: _LaneJob, seconds: float) -> None:
        with self._changed:
            self._num_slow -= account.is_slow
            account.num_running -= 1
            account.spent_s += seconds
            account.is_slow = seconds > SLOW_S
            account.size -= job.size
            self.size -= job.size
            self.num_jobs -= 1
            if not self.num_jobs:  # nobody competes
                self._accounts.clear()
            elif len(self._accounts) > self.num_jobs + MAX_ACCOUNTS:
                self._accounts = {
                    tenant: found for tenant, found in self._accounts.items() if found.num_jobs
                }
            self._changed.notify_all()
