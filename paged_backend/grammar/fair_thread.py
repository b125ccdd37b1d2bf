"""A thread that runs jobs of several tenants in a fair order."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

Result = TypeVar("Result")

MAX_ACCOUNTS = 2**10  # accounts of tenants without jobs that are kept; further ones are forgotten


class _Job(NamedTuple):
    future: Future[Any]
    work: Callable[[], Any]


class FairThread:
    """Runs the jobs of the tenant that has used the thread for the shortest time first.

    The jobs of a tenant keep their order. A tenant without jobs begins with the time of the tenant
    that was served last, so that it cannot save time up.

    Args:
        name: the thread's name.
    """

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[_Job]] = {}  # by tenant, none of them empty
        self._spent_s: dict[str, float] = {}  # processor time by tenant
        self._served_s = 0.0  # time of the tenant that was served last, when it was chosen

    def submit(self, tenant: str, work: Callable[[], Result]) -> Future[Result]:
        """Add a job of a tenant; the future has its result."""
        future: Future[Result] = Future()
        with self._lock:
            if tenant not in self._waiting:
                self._waiting[tenant] = deque()
                self._spent_s[tenant] = max(self._spent_s.get(tenant, 0.0), self._served_s)
            self._waiting[tenant].append(_Job(future, work))
        self._thread.submit(self._run_next)
        return future

    def _run_next(self) -> None:
        tenant, job = self._take()
        if not job.future.set_running_or_notify_cancel():
            return
        started_s = time.thread_time()
        try:
            job.future.set_result(job.work())
        except BaseException as error:  # a panic in a Rust library is a BaseException only
            job.future.set_exception(error)
        self._charge(tenant, time.thread_time() - started_s)

    def _take(self) -> tuple[str, _Job]:
        with self._lock:
            tenant = min(self._waiting, key=self._spent_s.__getitem__)
            jobs = self._waiting[tenant]
            job = jobs.popleft()
            if not jobs:
                del self._waiting[tenant]
            self._served_s = self._spent_s[tenant]
            return tenant, job

    def _charge(self, tenant: str, seconds: float) -> None:
        with self._lock:
            self._spent_s[tenant] = self._spent_s.get(tenant, self._served_s) + seconds
            if len(self._spent_s) > len(self._waiting) + MAX_ACCOUNTS:
                self._spent_s = {name: self._spent_s[name] for name in self._waiting}
