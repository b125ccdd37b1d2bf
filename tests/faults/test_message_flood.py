"""Messages that arrive faster than steps are made leave time for steps."""

from __future__ import annotations

import os
import time
from pathlib import Path

import zmq

from paged_backend.process import wire
from paged_backend.process.lifetime import ProcessId
from paged_backend.process.mailbox import MAX_MESSAGES, Mailbox


def test_a_turn_of_the_engine_handles_a_limited_number_of_messages(tmp_path: Path) -> None:
    number, batch = 0, 2 * MAX_MESSAGES + 7
    mailbox = Mailbox(tmp_path, ProcessId.of(os.getpid()))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sender = context.socket(zmq.PUSH)
    sender.set_hwm(0)
    sender.connect(wire.address(tmp_path, wire.REQUESTS_SOCKET))
    try:
        received, turns = [], [0]
        while max(turns) < MAX_MESSAGES and number < 10 * batch:  # ZeroMQ's thread may be slow
            for index in range(number, number + batch):
                message = wire.CancelRequests(str(index), "unknown")
                sender.send_multipart([b"front-end", wire.encode(message)])
            number += batch
            time.sleep(0.1)
            while len(received) < number:
                messages = mailbox.receive(5.0)
                assert messages
                turns.append(len(messages))
                received += [message.request_id for _, message in messages]
        assert max(turns) == MAX_MESSAGES
        assert received == list(map(str, range(number)))
    finally:
        sender.close(linger=0)
        context.term()
        mailbox.close()
