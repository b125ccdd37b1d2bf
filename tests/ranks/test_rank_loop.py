"""The messages of another rank than the first, with a worker that computes nothing."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest
import zmq

from paged_backend.core.scheduler_output import (
    ContinuedDecodes,
    LaunchedStep,
    ModelRunnerOutput,
    PendingOutput,
    SchedulerOutput,
    TokenMasks,
)
from paged_backend.engine.rank_loop import serve
from paged_backend.executor.messages import digest, encode

RESULT = ModelRunnerOutput([[5]])
STEP = encode(SchedulerOutput([], [], ContinuedDecodes([], [], []), [], 0, []))
NO_MASKS = encode(None)


@dataclass
class Pending:
    def result(self) -> ModelRunnerOutput:
        return RESULT


class Launched(LaunchedStep):
    def sample(self, masks: TokenMasks | None = None) -> PendingOutput:
        return Pending()


class Ended(Exception):
    """The worker has launched all steps."""


class Worker:
    adapters = None
    num_launched = 0

    def launch(self, output: SchedulerOutput) -> LaunchedStep:
        self.num_launched += 1
        if self.num_launched > 2:
            raise Ended
        return Launched()


def run(socket: zmq.Socket[bytes]) -> None:
    with pytest.raises(Ended):
        serve(socket, Worker())  # type: ignore[arg-type]
    socket.close(linger=0)


def test_a_step_is_answered_before_the_masks_of_the_next_one_are_known() -> None:
    """The first rank may need its tokens to compute them."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    first, other = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    first.bind("inproc://ranks")
    other.connect("inproc://ranks")
    for message in (STEP, NO_MASKS, STEP):
        first.send(message)
    thread = threading.Thread(target=run, args=[other], daemon=True)
    thread.start()
    for following in (NO_MASKS, STEP):
        assert first.poll(10_000), "the rank waits"
        assert first.recv() == digest(STEP, NO_MASKS, RESULT)
        first.send(following)
    thread.join(10)
    assert not thread.is_alive()
    first.close(linger=0)
