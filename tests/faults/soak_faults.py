"""What is done to the server of the soak, one thing after the other, while callers ask."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import ExitStack

from servers import LOAD_TIMEOUT_S, engine_of, engines_of, is_alive, kill_engine, wait_for
from soak_calls import Known
from soak_load import MIXED, SLOW, VANISHING, Kinds, Load, Tally

from paged_backend.launch.server_process import RunningServer

BURST_FACTOR = 10
BURST_S = 3.0
NUM_VANISHING = 50


class Harm:
    """Does harm to a server that has callers; leaving it waits for what goes on by itself."""

    def __init__(self, server: RunningServer, known: Known, tally: Tally, num_callers: int) -> None:
        self._server = server
        self._known = known
        self._tally = tally
        self._num_callers = num_callers
        self._beside = ExitStack()
        self.done: list[str] = []
        self.engine_ends: list[float] = []  # by the monotonic clock

    def __enter__(self) -> Harm:
        return self

    def __exit__(self, *exception: object) -> None:
        self._beside.close()

    def do_next(self) -> None:
        """The next fault in turn."""
        name, act = FAULTS[len(self.done) % len(FAULTS)]
        act(self)
        self.done.append(name)

    def kill(self) -> None:
        self.engine_ends.append(kill_engine(self._server))

    def kill_twice(self) -> None:
        """The second time while it loads."""
        self.kill()
        self.kill()

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def burst(self) -> None:
        """Start a burst of calls; the last of them may still run during the next fault."""
        self._begin(BURST_FACTOR * self._num_callers, MIXED, for_s=BURST_S)

    def vanish(self) -> None:
        self._begin(NUM_VANISHING, VANISHING)

    def read_slowly(self) -> None:
        self._begin(1, SLOW)

    def _begin(self, num_callers: int, kinds: Kinds, for_s: float = 0.0) -> None:
        """Have callers ask for a while, and leave them to their last requests."""
        load = Load(self._server, self._known, self._tally, num_callers, kinds)
        self._beside.enter_context(load)
        time.sleep(for_s)
        load.end()

    def _signal(self, number: signal.Signals) -> None:
        wait_for(lambda: engines_of(self._server), LOAD_TIMEOUT_S, "there is no engine")
        engine = engine_of(self._server)
        engine.send_signal(number)
        self.engine_ends.append(time.monotonic())
        wait_for(lambda: not is_alive(engine), 30, "nobody ended the engine")


FAULTS: list[tuple[str, Callable[[Harm], None]]] = [
    ("SIGKILL of the engine", Harm.kill),
    ("10 times the load for 3 s", Harm.burst),
    ("SIGSTOP of the engine", Harm.stop),
    ("a reader of one message a second", Harm.read_slowly),
    ("SIGTERM of the engine", Harm.terminate),
    ("50 clients vanish at once", Harm.vanish),
    ("SIGKILL of the engine, and of the next", Harm.kill_twice),
]
