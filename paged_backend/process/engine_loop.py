"""The engine's loop, which serves every front end (stub process) of one model.

Each turn handles the messages that have arrived, runs one step, and passes the outputs to ZeroMQ's
thread, so that no front end can block the loop. The loop ends when the server ends, when the last
front end leaves, or on SIGTERM.
"""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections import defaultdict
from pathlib import Path

from paged_backend.checkpoint.hub import Checkpoint, resolve_checkpoint
from paged_backend.engine.engine import Engine
from paged_backend.engine.executors import open_executor
from paged_backend.engine.machine_share import take_share
from paged_backend.grammar.compiler import LlguidanceCompiler
from paged_backend.process import wire
from paged_backend.process.adapter_changes import AdapterChanges
from paged_backend.process.adapter_names import FILE
from paged_backend.process.admission import QueueBounds, ThroughputEstimate, rate_limited
from paged_backend.process.kv_events.publisher import KVEventPublisher
from paged_backend.process.lifetime import ProcessId, end_enrolled, remove_runtime_folder
from paged_backend.process.mailbox import SERVER, Mailbox
from paged_backend.process.rate_limit import TenantRateLimit
from paged_backend.process.status_page import StatusPage
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import (
    ConfigError,
    EngineDead,
    InvalidRequest,
    PagedError,
    RequestRefused,
)
from paged_backend.values.garbage import keep_loaded
from paged_backend.values.log import LOG, log_to_stderr
from paged_backend.values.outputs import EngineStats, SequenceOutput
from paged_backend.values.request import Request

IDLE_POLL_S = 0.5
STATS_INTERVAL_S = 0.2  # each value that has changed is a call to tritonserver
FULL_CHECK_INTERVAL_S = 300.0  # between checks of all blocks, made when no request is open
FAREWELL_S = 10.0  # how long front ends may still ask why the engine failed
INSPECT_IS_OFF = "task: inspect is off; the engine's option enable_inspect turns it on"


class RequestsByCallId:
    """The open requests by ``call_id``, the name that a client may give to a request.

    Several open requests may have the same name, as a client may use it again as soon as it has its
    answer. The engine may learn later than the client that the request has ended.
    """

    def __init__(self) -> None:
        self._request_ids: defaultdict[str, set[str]] = defaultdict(set)  # by call_id
        self._call_ids: dict[str, str] = {}  # by request_id

    def add(self, request: Request) -> None:
        """Remember a request under the name that its client chose, if any."""
        if request.call_id:
            self._request_ids[request.call_id].add(request.request_id)
            self._call_ids[request.request_id] = request.call_id

    def remove(self, request_id: str) -> None:
        """Forget a request; unknown ids are ignored."""
        call_id = self._call_ids.pop(request_id, None)
        if call_id is not None:
            self._request_ids[call_id].discard(request_id)
            if not self._request_ids[call_id]:
                del self._request_ids[call_id]

    def named(self, call_id: str) -> list[str]:
        """Return the ids of all open requests with that name."""
        return sorted(self._request_ids.get(call_id, ()))


class EngineLoop:
    """Runs steps while there is work, and answers front ends, all on one thread."""

    def __init__(
        self,
        engine: Engine,
        mailbox: Mailbox,
        page: StatusPage,
        config: EngineConfig,
        checkpoint: Checkpoint,
        kv_events: KVEventPublisher | None,
    ) -> None:
        self._engine = engine
        self._mailbox = mailbox
        self._kv_events = kv_events
        self._journal = engine.scheduler.kv.journal
        self._page = page
        self._may_inspect = config.enable_inspect
        self._bounds = QueueBounds.of(config)
        self._is_fair = config.scheduling_policy == "fair"
        self._throughput = ThroughputEstimate()
        rate = config.max_tenant_request_rate
        self._rates = None if rate is None else TenantRateLimit(rate)
        self._ready = wire.EngineReady(
            engine.limits,
            engine.executor.info.sampling_defaults,
            str(checkpoint.tokenizer),
            checkpoint.commits,
            engine.executor.info.describe(),
        )
        self._owners: dict[str, str] = {}  # request_id -> front end
        self._requests = RequestsByCallId()
        self._changes = AdapterChanges(engine.adapters)
        self._front_ends: list[str] = []  # the first of them reports the metrics
        self._running = True
        self.is_deserted = False  # no front end is left, or no server
        self._stats_due = 0.0
        self._reported: EngineStats | None = None
        self._earlier: EngineStats | None = None  # counts of the previous engines

    def stop(self) -> None:
        """End the loop after the present step."""
        self._running = False

    def run(self) -> None:
        """Serve until the server or all front ends have ended, or ``stop`` was called."""
        checked = True
        fully_checked_s = time.monotonic()
        while self._running:
            self._show()
            idle = not self._engine.has_unfinished
            if idle:
                self._engine.executor.check()
            messages = self._mailbox.receive(IDLE_POLL_S if idle else 0)
            for sender, message in messages:
                self._handle(sender, message)
            if self._engine.has_unfinished:
                outputs = self._engine.step()
                if not self._engine.has_unfinished:
                    self._report()  # before the last response, for a client that looks at once
                self._send(outputs)
                checked = False
            elif not messages and not checked:
                self._engine.scheduler.check_empty()
                # This one looks at every block, so it runs rarely, and only while nobody waits.
                if time.monotonic() - fully_checked_s > FULL_CHECK_INTERVAL_S:
                    self._engine.scheduler.check_invariants()
                    fully_checked_s = time.monotonic()
                checked = True
            for front_end, change in self._changes.take_done():
                self._mailbox.send(front_end, change)
            if self._kv_events is not None and self._journal is not None:
                self._kv_events.publish(self._journal)
            self._report()

    def _handle(self, sender: str, message: wire.ToEngine) -> None:
        match message:
            case wire.Hello(process, counts):
                self._front_ends.append(sender)
                self._go_on_from(counts)
                self._mailbox.watch(ProcessId.parse(process), sender)
                self._mailbox.send(sender, self._ready)
            case wire.AddRequest(request, progress):
                self._add(sender, request, progress)
            case wire.AbortRequest(request_id):
                self._abort(request_id)
            case wire.StopCompletion(request_id, index):
                self._engine.scheduler.stop_completion(request_id, index)
                self._forget(request_id)
            case wire.ChargeTenant(tenant):
                with contextlib.suppress(RequestRefused):
                    self._check_rate(sender, tenant)
            case wire.LoadAdapter(change_id):
                try:
                    self._changes.load(sender, message)
                except InvalidRequest as error:
                    self._mailbox.send(sender, wire.AdapterChanged(change_id, str(error)))
            case wire.DropAdapter():
                self._changes.drop(sender, message)
            case wire.Inspect(request_id):
                self._inspect(sender, request_id)
            case wire.CancelRequests(request_id, call_id):
                for named in self._requests.named(call_id):
                    self._send(self._engine.cancel_request(named))
                self._mailbox.send(sender, wire.RequestsCancelled(request_id))
            case wire.Goodbye():
                self._leave(sender)

    def _add(self, sender: str, request: Request, progress: list[list[int] | None] | None) -> None:
        try:
            if progress is None:
                self._check_room(request)
                self._check_rate(sender, request.tenant)
            self._engine.add_request(request, progress or ())
        except RequestRefused as error:
            refusal = wire.RequestDeclined(request.request_id, error.reason, error.problem)
            self._mailbox.send(sender, refusal)
        except (PagedError, ValueError) as error:
            self._mailbox.send(sender, wire.RequestRejected(request.request_id, str(error)))
        else:
            self._owners[request.request_id] = sender
            self._requests.add(request)
            self._changes.add(request)

    def _check_room(self, request: Request) -> None:
        queue, retry_after_s = self._engine.scheduler.queue_state(), self._page.retry_after_s
        self._bounds.check(queue, len(request.prompt_token_ids), retry_after_s)
        if request.tenant and self._is_fair:
            num_own = self._engine.scheduler.num_waiting_of(request.tenant)
            self._bounds.check_share(queue, num_own, retry_after_s)

    def _check_rate(self, sender: str, tenant: str) -> None:
        if self._rates is None:
            return
        wait_s = self._rates.admit(tenant, time.monotonic())
        if wait_s is not None:
            self._mailbox.send(sender, wire.TenantBlocked(tenant, wait_s))
            raise rate_limited(tenant, wait_s)

    def _inspect(self, sender: str, request_id: str) -> None:
        answer: wire.FromEngine
        if self._may_inspect:
            answer = wire.Inspection(request_id, self._engine.scheduler.view())
        else:
            answer = wire.RequestRejected(request_id, INSPECT_IS_OFF)
        self._mailbox.send(sender, answer)

    def _abort(self, request_id: str) -> None:
        self._engine.abort_request(request_id)
        self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        if not self._engine.is_open(request_id):
            self._owners.pop(request_id, None)
            self._requests.remove(request_id)
            self._changes.remove(request_id)

    def _leave(self, sender: str) -> None:
        """Handle the end of a front end, or of the server and so of all front ends."""
        for request_id in [r for r, owner in self._owners.items() if owner == sender]:
            self._abort(request_id)
        if sender in self._front_ends:
            self._front_ends.remove(sender)
            self._reported = None  # the next one was told nothing yet
        if sender == SERVER:
            end_enrolled(self._mailbox.run_dir)
        if not self._front_ends or sender == SERVER:
            self.is_deserted = True
            self.stop()

    def _send(self, outputs: list[SequenceOutput]) -> None:
        by_front_end: defaultdict[str, list[SequenceOutput]] = defaultdict(list)
        for output in outputs:
            by_front_end[self._owners[output.request_id]].append(output)
        for front_end, part in by_front_end.items():
            self._mailbox.send(front_end, wire.StepOutputs(part))
        for output in outputs:
            if output.finish_reason is not None:
                self._forget(output.request_id)

    def _show(self) -> None:
        """Update the heartbeat and the queue occupancy on the status page."""
        queue = self._engine.scheduler.queue_state()
        self._throughput.note(self._engine.scheduler.counters.num_finished, time.monotonic())
        self._page.write(queue, self._throughput.seconds_for(queue.num_waiting))

    def _go_on_from(self, counts: EngineStats | None) -> None:
        """Restore the counters of the previous engine process."""
        earlier = self._earlier
        if counts is not None and (earlier is None or earlier.num_steps < counts.num_steps):
            self._earlier = counts

    def _report(self) -> None:
        """Send the counts to the front end that reports them, at intervals and when work ends."""
        now = time.monotonic()
        due = now >= self._stats_due or not self._engine.has_unfinished
        if not due or not self._front_ends:
            return
        stats = self._engine.stats()
        if self._earlier is not None:
            stats = stats.after(self._earlier)
        if stats != self._reported:
            anew = self._reported is None
            self._mailbox.send(self._front_ends[0], wire.Stats(stats, anew))
            self._stats_due = now + STATS_INTERVAL_S
            self._reported = stats


def load(config: EngineConfig) -> tuple[Engine, Checkpoint]:
    """Find the checkpoint and load it.

    Returns:
        The engine, and where its checkpoint is.

    Raises:
        ConfigError: the options or the checkpoint cannot be used.
    """
    checkpoint = resolve_checkpoint(config)
    executor = open_executor(config, checkpoint.model, checkpoint.tokenizer)
    info = executor.info
    grammars = LlguidanceCompiler(checkpoint.tokenizer, info.vocab_size, info.eos_token_ids)
    if info.pooling is None:
        try:
            grammars.load()  # later the other requests would have to wait
        except ConfigError as error:
            LOG.warning("%s", error)
    has_journal = config.kv_events().is_on
    return Engine(config, executor, grammars=grammars, has_journal=has_journal), checkpoint


def tell_failure(mailbox: Mailbox, message: str) -> None:
    """Tell the front ends that connect why the engine cannot start.

    This takes ``FAREWELL_S`` seconds, or less if no message arrives for a fifth of that time.
    """
    deadline = time.monotonic() + FAREWELL_S
    while time.monotonic() < deadline:
        messages = mailbox.receive(FAREWELL_S / 5)
        for sender, received in messages:
            if isinstance(received, wire.Hello):
                mailbox.send(sender, wire.EngineFailed(message))
        if not messages:
            break


def serve(config_json: str, run_dir: Path, server: ProcessId, number: int) -> int:
    """Load the model and serve it until the end; returns the exit status.

    Args:
        config_json: the options of all engines of the model.
        run_dir: private folder of this engine.
        server: the tritonserver process.
        number: number of this engine among those of the model, counted from 0.
    """
    page = StatusPage.create(run_dir)
    mailbox = Mailbox(run_dir, server)
    kv_events = loop = None
    try:
        config = EngineConfig.from_mapping(json.loads(config_json))
        log_to_stderr(config.log_level)
        config = take_share(config, number)
        if config.kv_events().is_on:
            kv_events = KVEventPublisher(config.kv_events(), number)
        engine, checkpoint = load(config)
        if config.max_request_lora_bytes:  # front ends write them beside the first engine's files
            engine.adapters.allow_folder(run_dir.parent)
        keep_loaded()
        LOG.info("the engine runs %s: %s", config.model, engine.executor.info.describe())
    except ConfigError as error:
        tell_failure(mailbox, str(error))
        return 1
    else:
        loop = EngineLoop(engine, mailbox, page, config, checkpoint, kv_events)
        signal.signal(signal.SIGTERM, lambda *_: loop.stop())
        try:
            loop.run()
        except EngineDead as error:
            LOG.error("%s", error)
            return 1
        return 0
    finally:
        if kv_events is not None:
            kv_events.close()
        mailbox.close()
        # The front ends that are left keep the names of adapters there.
        if (loop is not None and loop.is_deserted) or not (run_dir / FILE).exists():
            remove_runtime_folder(run_dir)
