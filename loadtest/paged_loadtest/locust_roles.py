"""What each process of a run does when it begins and when it ends.

At the end Locust would kill users in the middle of their calls, and a master waits half a second
for what its workers still have to tell. So calls are finished before Locust begins to stop, and a
master first has its workers do so and report.
"""

from __future__ import annotations

import logging
import signal
import sys
from abc import ABC, abstractmethod
from time import monotonic
from typing import Any

import gevent
from locust import stats
from locust.env import Environment
from locust.event import Events
from locust.rpc import Message
from locust.runners import STATE_RUNNING, STATE_SPAWNING, MasterRunner, WorkerRunner

from paged_backend.errors import ConfigError
from paged_loadtest.locust_setup import Setup, add_arguments, prepare, reachable, tagged
from paged_loadtest.locust_shapes import make_shape
from paged_loadtest.locust_statistics import summary
from paged_loadtest.locust_traffic import Traffic
from paged_loadtest.locust_users import StreamingUser

# Messages between master and workers.
_SHARE = "paged_share"  # to a worker: what of the run is its own
_FINISH = "paged_finish"  # to a worker: end your calls and report
_FINISHED = "paged_finished"  # to the master, after the report
_PROBLEM = "paged_problem"  # to the master: the run cannot go on

_REPORT_TIMEOUT_S = 10.0  # of a worker, beyond the time that its calls may take
_LOG = logging.getLogger(__name__)


def install(events: Events) -> None:
    """Hook into Locust; for a locustfile."""
    events.init_command_line_parser.add_listener(add_arguments)
    events.init.add_listener(take_role)


def take_role(environment: Environment, **_: Any) -> None:
    """Refuse what cannot run, before the first user begins."""
    # Python would raise KeyboardInterrupt in whichever greenlet runs, where it can be lost.
    gevent.signal_handler(signal.SIGINT, _interrupt_main)
    runner = environment.runner
    try:
        if isinstance(runner, WorkerRunner):
            Worker(environment, runner)
        elif isinstance(runner, MasterRunner):
            Master(environment, runner)
        else:
            Alone(environment)
    except ConfigError as error:
        _complain(str(error))
        sys.exit(2)


class Role(ABC):
    """Listens to the events of one process."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.common: Any = environment.parsed_options  # Locust's options and ours
        environment.stop_timeout = 0.0  # of users: their calls go on without them
        environment.events.test_start.add_listener(self.on_test_start)
        environment.events.test_stopping.add_listener(self.on_test_stopping)
        environment.events.quit.add_listener(self.on_quit)

    @abstractmethod
    def on_test_start(self, **_: Any) -> None:
        """Begin a run."""

    @abstractmethod
    def on_test_stopping(self, **_: Any) -> None:
        """Finish the calls under way."""

    @abstractmethod
    def on_quit(self, **_: Any) -> None:
        """Leave nothing behind."""


class Reporter(Role):
    """Of a process whose statistics are those of the whole run."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        users = tagged(environment.user_classes, self.common)
        environment.user_classes[:] = reachable(users, self.common)
        self.setup = prepare(environment.user_classes, self.common)
        environment.shape_class = make_shape(self.setup.options, self.setup.requests)
        if environment.shape_class is not None:
            environment.shape_class.runner = environment.runner
        environment.events.test_stop.add_listener(self.on_test_stop)
        self._problem: str | None = None

    @property
    def user_rate(self) -> float | None:
        """Requests a second of each user, in an open loop."""
        rate = self.setup.options.request_rate
        return None if rate is None else rate / (self.common.num_users or 1)

    def on_test_start(self, **_: Any) -> None:
        """Forget the run before."""
        self._problem = self.environment.process_exit_code = None

    def on_test_stop(self, **_: Any) -> None:
        """Tell the log how a run of the web page was."""
        if self.environment.web_ui is not None:
            _LOG.info(summary(self.environment.stats))

    def on_quit(self, **_: Any) -> None:
        """Tell how the run was."""
        self.setup.close()
        if self.common.csv_prefix:
            # Locust writes the files once a second, and not once more at its end.
            gevent.sleep(stats.CSV_STATS_INTERVAL_SEC + 0.2)
        print(summary(self.environment.stats), flush=True)
        if self._problem is not None:
            _complain(self._problem)

    def give_up(self, problem: str) -> None:
        """End the run early; what there is so far is reported."""
        if self._problem is not None:
            return
        _LOG.error(problem)
        self._problem = problem
        self.environment.process_exit_code = 2
        assert self.environment.runner is not None
        if self.common.headless:
            self.environment.runner.quit()
        else:
            self.environment.runner.stop()


class Alone(Reporter):
    """There is only this process."""

    _traffic: Traffic | None = None

    def on_test_start(self, **_: Any) -> None:
        """Let users begin."""
        super().on_test_start()
        self._traffic = StreamingUser.traffic = Traffic(
            self.environment,
            self.setup.requests,
            self.setup.wires,
            self.give_up,
            user_rate=self.user_rate,
        )

    def on_test_stopping(self, **_: Any) -> None:
        """Finish the calls under way."""
        if self._traffic is not None:
            self._traffic.finish(self.common.stop_timeout)


class Master(Reporter):
    """Has no users itself."""

    def __init__(self, environment: Environment, runner: MasterRunner) -> None:
        super().__init__(environment)
        self._runner = runner
        self._unfinished: set[str] = set()
        runner.register_message(_FINISHED, self._note_finished)
        runner.register_message(_PROBLEM, self._take_problem, concurrent=True)
        environment.events.worker_connect.add_listener(self.on_worker_connect)

    def on_test_start(self, **_: Any) -> None:
        """Divide the requests among the workers."""
        super().on_test_start()
        workers = self._workers()
        for index, worker in enumerate(workers):
            self._give_share(worker, index, len(workers))

    def on_worker_connect(self, client_id: str, **_: Any) -> None:
        """Have a worker that comes in the middle of a run send what others send, too."""
        if self._runner.state in (STATE_SPAWNING, STATE_RUNNING):
            self._give_share(client_id, self._runner.get_worker_index(client_id), 1)

    def on_test_stopping(self, **_: Any) -> None:
        """Wait until each worker has finished its calls and reported them."""
        self._unfinished = set(self._workers())
        for worker in self._unfinished:
            self._runner.send_message(_FINISH, {"timeout_s": self.common.stop_timeout}, worker)
        deadline = monotonic() + self.common.stop_timeout + _REPORT_TIMEOUT_S
        while self._unfinished.intersection(self._workers()) and monotonic() < deadline:
            gevent.sleep(0.05)
        if self._unfinished:
            _LOG.error("calls are missing: no last report of %s", ", ".join(self._unfinished))

    def _workers(self) -> list[str]:
        clients = self._runner.clients
        return [worker.id for worker in clients.ready + clients.spawning + clients.running]

    def _give_share(self, worker: str, index: int, count: int) -> None:
        share = {
            "index": index,
            "count": count,
            "user_rate": self.user_rate,
            "users": [user.__name__ for user in self.environment.user_classes],
        }
        self._runner.send_message(_SHARE, share, worker)

    def _note_finished(self, msg: Message, **_: Any) -> None:
        self._unfinished.discard(msg.node_id)

    def _take_problem(self, msg: Message, **_: Any) -> None:
        self.give_up(msg.data["problem"])


class Worker(Role):
    """Has the users that its master gives it; servers and workload are the master's, too."""

    def __init__(self, environment: Environment, runner: WorkerRunner) -> None:
        super().__init__(environment)
        self._runner = runner
        self._setup: Setup | None = None
        self._traffic: Traffic | None = None
        self._share: dict[str, Any] = {}
        runner.register_message(_SHARE, self._take_share)
        runner.register_message(_FINISH, self._finish, concurrent=True)

    def on_test_start(self, **_: Any) -> None:
        """Prepare as the master did, and let users begin."""
        self.on_quit()
        names = self._share.pop("users")
        users = [user for user in self.environment.user_classes if user.__name__ in names]
        try:
            self._setup = prepare(users, self.common)
            requests, wires = self._setup.requests, self._setup.wires
        except ConfigError as error:
            self._give_up(str(error))
            requests, wires = (), {}
        self._traffic = StreamingUser.traffic = Traffic(
            self.environment, requests, wires, self._give_up, **self._share
        )

    def on_test_stopping(self, **_: Any) -> None:
        """Finish nothing: the master has asked for that, or is not there to hear of it."""

    def on_quit(self, **_: Any) -> None:
        """Let go of the connections."""
        if self._setup is not None:
            self._setup.close()

    def _take_share(self, msg: Message, **_: Any) -> None:
        self._share = msg.data

    def _finish(self, msg: Message, **_: Any) -> None:
        if self._traffic is not None:
            self._traffic.finish(msg.data["timeout_s"])
        report: dict[str, Any] = {}
        self.environment.events.report_to_master.fire(client_id=self._runner.client_id, data=report)
        self._runner.send_message("stats", report)
        self._runner.send_message(_FINISHED)

    def _give_up(self, problem: str) -> None:
        self._runner.send_message(_PROBLEM, {"problem": f"{problem} (said by a worker)"})


def _interrupt_main() -> None:
    gevent.get_hub().handle_system_error(KeyboardInterrupt, KeyboardInterrupt())


def _complain(problem: str) -> None:
    print(f"locust: error: {problem}", file=sys.stderr)
