"""The engine: one object that turns requests into tokens, a step at a time.

It knows neither text nor sockets; :class:`paged_backend.LLM` runs it in-process and
``paged_backend.process`` runs it in a process of its own.
"""

from __future__ import annotations

import random
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

from paged_backend.config import EngineConfig
from paged_backend.core.kv_cache_manager import KVCacheManager
from paged_backend.core.scheduler import Progress, Scheduler, SchedulerConfig
from paged_backend.core.scheduler_output import ModelRunnerOutput, PendingOutput, SchedulerOutput
from paged_backend.outputs import EngineStats, EngineView, QueueState, SequenceOutput
from paged_backend.request import Request, RequestLimits
from paged_backend.worker import Worker


class Engine:
    """Scheduler and worker of one model; used by one thread.

    Args:
        config: the engine's options.
        folder: the checkpoint, already on this machine.

    Raises:
        ConfigError: the options and the checkpoint do not go together.
    """

    def __init__(self, config: EngineConfig, folder: Path) -> None:
        self.worker = Worker(config, folder)
        steps = self.worker.step_limits
        self.limits = RequestLimits.of(
            config,
            max_model_len=self.worker.max_model_len,
            vocab_size=self.worker.vocab_size,
            max_num_seqs=steps.max_num_seqs,
        )
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=steps.max_num_seqs,
                max_num_batched_tokens=steps.max_num_batched_tokens,
                max_model_len=self.worker.max_model_len,
                enable_chunked_prefill=config.enable_chunked_prefill,
                eos_token_ids=self.worker.eos_token_ids,
                fair=config.scheduling_policy == "fair",
                tenant_weights=config.weights_of_tenants(),
            ),
            KVCacheManager(
                self.worker.num_blocks,
                config.block_size,
                enable_prefix_caching=config.enable_prefix_caching,
            ),
        )
        self._seeds = random.Random(config.seed)
        self._under_way: deque[_UnderWay] = deque()
        self._last_end_s = 0.0  # of a step
        self._max_under_way = 1 if steps.async_scheduling else 0  # when a step returns

    def add_request(self, request: Request, progress: Progress = ()) -> None:
        """Queue a request that the front-end has checked; ``progress`` is what it has already.

        Raises:
            InvalidRequest: it does not fit this model after all.
        """
        self.limits.check(request.prompt_token_ids, request.params)
        self.scheduler.add_request(request, self._seeds.getrandbits(64), progress)

    def abort_request(self, request_id: str) -> None:
        """End a request now; unknown ids are ignored."""
        self.scheduler.abort_request(request_id)

    def stop_answer(self, request_id: str, index: int) -> None:
        """End an answer whose text has come to a stop string; unknown ones are ignored."""
        self.scheduler.stop_answer(request_id, index)

    def cancel_request(self, request_id: str) -> list[SequenceOutput]:
        """End a request for a caller who still listens; the last outputs, none for unknown ids."""
        return self.scheduler.cancel_request(request_id)

    def is_open(self, request_id: str) -> bool:
        """Whether any answer of the request has yet to end."""
        return self.scheduler.is_open(request_id)

    @property
    def has_unfinished(self) -> bool:
        """Whether a step has anything to do."""
        return self.scheduler.has_unfinished or bool(self._under_way)

    def step(self) -> list[SequenceOutput]:
        """Schedule and start one step; returns what is new.

        With asynchronous scheduling that are the tokens of the step before, so that the device
        computes while the next step is planned.
        """
        started_s = time.monotonic()
        plan = self.scheduler.schedule()
        if plan.scheduled:
            self._under_way.append(_UnderWay(started_s, plan, self.worker.submit(plan)))
            if len(self._under_way) <= self._max_under_way:
                return []
        return self.scheduler.update_from_output(self._wait())

    def stats(self) -> EngineStats:
        """Counts since the start and the present state."""
        return self.scheduler.stats()

    @property
    def num_finished(self) -> int:
        """Sequences that have ended since the start, for whatever reason."""
        return self.scheduler.num_finished

    def num_waiting_of(self, tenant: str) -> int:
        """How many requests of a tenant wait."""
        return self.scheduler.num_waiting_of(tenant)

    def queue_state(self) -> QueueState:
        """How much waits now."""
        return self.scheduler.queue_state()

    def view(self) -> EngineView:
        """All unfinished sequences with their blocks."""
        return self.scheduler.view()

    def _wait(self) -> ModelRunnerOutput:
        """The result of the earliest step under way."""
        step = self._under_way.popleft()
        result = step.pending.result()
        now = time.monotonic()
        # One that was planned ahead begins when the step before it is over.
        seconds = now - max(step.started_s, self._last_end_s)
        self._last_end_s = now
        scheduled = step.plan.scheduled
        num_tokens = sum(len(slice_.token_ids) for slice_ in scheduled)
        self.scheduler.measurements.step(seconds, len(scheduled), num_tokens)
        return result


class _UnderWay(NamedTuple):
    started_s: float  # of the monotonic clock
    plan: SchedulerOutput
    pending: PendingOutput
