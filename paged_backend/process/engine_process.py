"""The engine in a process of its own: ``python -m paged_backend.process.engine_process``.

It serves every front-end (stub process) of one model. The loop takes what has arrived, makes one
step, and hands the outputs to ZeroMQ's own thread, so that no front-end can hold it up. It ends
with its server, when its last front-end leaves, or on SIGTERM.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections import defaultdict
from pathlib import Path

import zmq

from paged_backend.config import EngineConfig
from paged_backend.engine import Engine
from paged_backend.errors import PagedError
from paged_backend.models.hub import resolve_model
from paged_backend.outputs import SequenceOutput
from paged_backend.process import wire
from paged_backend.process.lifetime import open_process

STATS_INTERVAL_S = 0.02
FAREWELL_S = 10.0  # for front-ends that have yet to connect to hear why the engine failed


class Mailbox:
    """Both sockets of the engine and the processes that it watches."""

    def __init__(self, run_dir: Path, server_pid: int) -> None:
        context = zmq.Context()
        self._requests = context.socket(zmq.PULL)
        self._outputs = context.socket(zmq.ROUTER)
        for socket, name in (
            (self._requests, wire.REQUESTS_SOCKET),
            (self._outputs, wire.OUTPUTS_SOCKET),
        ):
            socket.set_hwm(0)  # the step never waits; what is open at once bounds the queue
            socket.bind(wire.address(run_dir, name))
        self._poller = zmq.Poller()
        self._poller.register(self._requests, zmq.POLLIN)
        self._watched: dict[int, str] = {}  # pidfd -> front-end, "" for the server
        self.watch(server_pid, "")

    def watch(self, pid: int, owner: str) -> None:
        """Report the end of a process as the Goodbye of its front-end."""
        pidfd = open_process(pid)
        if pidfd is not None:
            self._watched[pidfd] = owner
            self._poller.register(pidfd, zmq.POLLIN)

    def receive(self, timeout_s: float) -> list[tuple[str, wire.ToEngine]]:
        """All messages that are there, each with its front-end; waits for the first."""
        messages: list[tuple[str, wire.ToEngine]] = []
        for ready, _ in self._poller.poll(timeout_s * 1000):
            if ready is self._requests:
                messages += self._drain()
            else:
                self._poller.unregister(ready)
                messages.append((self._watched.pop(ready), wire.Goodbye()))
        return messages

    def _drain(self) -> list[tuple[str, wire.ToEngine]]:
        messages = []
        while self._requests.poll(0):
            sender, payload = self._requests.recv_multipart()
            messages.append((sender.decode(), wire.decode_to_engine(payload)))
        return messages

    def send(self, front_end: str, message: wire.FromEngine) -> None:
        """Queue a message; one to a front-end that is gone is dropped."""
        self._outputs.send_multipart([front_end.encode(), wire.encode(message)])


class EngineLoop:
    """Steps while there is work and answers front-ends; everything on one thread."""

    def __init__(self, engine: Engine, mailbox: Mailbox, model_folder: Path) -> None:
        self._engine = engine
        self._mailbox = mailbox
        self._ready = wire.EngineReady(engine.limits, str(model_folder))
        self._owners: dict[str, str] = {}  # request_id -> front-end
        self._front_ends: list[str] = []  # the first of them reports the metrics
        self._running = True
        self._stats_due = 0.0
        self._reported: tuple[int, bool] | None = None

    def stop(self) -> None:
        """End after the present step."""
        self._running = False

    def run(self) -> None:
        """Serve until the server, all front-ends, or a signal ends it."""
        while self._running:
            idle = not self._engine.has_unfinished
            if idle:
                self._engine.scheduler.check_invariants()
            for sender, message in self._mailbox.receive(0.5 if idle else 0):
                self._handle(sender, message)
            if self._engine.has_unfinished:
                self._send(self._engine.step())
            self._report()

    def _handle(self, sender: str, message: wire.ToEngine) -> None:
        match message:
            case wire.Hello(pid):
                self._front_ends.append(sender)
                self._mailbox.watch(pid, sender)
                self._mailbox.send(sender, self._ready)
            case wire.AddRequest(request):
                self._add(sender, message)
            case wire.AbortRequest(request_id):
                self._abort(request_id)
            case wire.Goodbye():
                self._leave(sender)

    def _add(self, sender: str, message: wire.AddRequest) -> None:
        request_id = message.request.request_id
        try:
            self._engine.add_request(message.request)
        except (PagedError, ValueError) as error:
            self._mailbox.send(sender, wire.RequestRejected(request_id, str(error)))
        else:
            self._owners[request_id] = sender

    def _abort(self, request_id: str) -> None:
        self._owners.pop(request_id, None)
        self._engine.abort_request(request_id)

    def _leave(self, sender: str) -> None:
        """A front-end is gone (or the server, whose name is empty)."""
        for request_id in [r for r, owner in self._owners.items() if owner == sender]:
            self._abort(request_id)
        if sender in self._front_ends:
            self._front_ends.remove(sender)
        if not self._front_ends:
            self.stop()

    def _send(self, outputs: list[SequenceOutput]) -> None:
        by_front_end: defaultdict[str, list[SequenceOutput]] = defaultdict(list)
        for output in outputs:
            by_front_end[self._owners[output.request_id]].append(output)
        for front_end, part in by_front_end.items():
            self._mailbox.send(front_end, wire.StepOutputs(part))

    def _report(self) -> None:
        """Tell the reporting front-end the counts, now and then and whenever work ends."""
        if not self._front_ends:
            return
        stats = self._engine.stats()
        now, idle = time.monotonic(), not self._engine.has_unfinished
        state = (stats.num_steps, idle)
        if state != self._reported and (idle or now >= self._stats_due):
            self._mailbox.send(self._front_ends[0], wire.Stats(stats))
            self._stats_due = now + STATS_INTERVAL_S
            self._reported = state


def _fail(mailbox: Mailbox, message: str) -> None:
    """Tell the terminal once, and every front-end that asks within a while."""
    print(f"paged-backend: error: {message}", file=sys.stderr, flush=True)
    told, deadline = 0, time.monotonic() + FAREWELL_S
    while time.monotonic() < deadline and not (told and not mailbox.receive(0)):
        for sender, received in mailbox.receive(1.0):
            if isinstance(received, wire.Hello):
                mailbox.send(sender, wire.EngineFailed(message))
                told += 1
            elif not sender:
                return


def main() -> int:
    """Load the model, say so, and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--server-pid", type=int, required=True)
    parser.add_argument("--config", required=True, help="engine options as a JSON object")
    args = parser.parse_args()
    # Ctrl-C in a terminal reaches the whole process group; only the server is to act on it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    mailbox = Mailbox(args.run_dir, args.server_pid)
    ...
    return 0


if __name__ == "__main__":
    sys.exit(main())
