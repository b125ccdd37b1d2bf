"""Roles of the processes of a Locust run: standalone, master and worker.

When a run ends, Locust kills users in the middle of their requests, and a master waits only half
a second for the last reports of its workers. Therefore requests are finished before Locust begins
to stop, and a master first makes its workers finish and report.
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

from paged_backend.values.errors import ConfigError
from paged_loadtest.locust_setup import Setup, add_arguments, prepare, reachable, tagged
from paged_loadtest.locust_shapes import make_shape
from paged_loadtest.locust_statistics import summary
from paged_loadtest.locust_traffic import Traffic
from paged_loadtest.locust_users import StreamingUser

# Messages between master and workers.
_SHARE = "paged_share"  # to a worker: its share of the run
_FINISH = "paged_finish"  # to a worker: finish requests and report
_FINISHED = "paged_finished"  # to the master, after the report
_PROBLEM = "paged_problem"  # to the master: the run cannot go on

_REPORT_TIMEOUT_S = 10.0  # for a worker's report, beyond the time for its requests
_LOG = logging.getLogger(__name__)


def install(events: Events) -> None:
    """Register the listeners with Locust; call this from a locustfile."""
    events.init_command_line_parser.add_listener(add_arguments)
    events.init.add_listener(take_role)


def take_role(environment: Environment, **_: Any) -> None:
    """Create this process's role; exit with status 2 if the run cannot be set up."""
    # Otherwise Python raises KeyboardInterrupt in the current greenlet, where it can be lost.
    gevent.signal_handler(signal.SIGINT, _interrupt_main)
    runner = environment.runner
    try:
        if isinstance(runner, WorkerRunner):
            LocustWorker(environment, runner)
        elif isinstance(runner, MasterRunner):
            Master(environment, runner)
        else:
            Alone(environment)
    except ConfigError as error:
        _complain(str(error))
        sys.exit(2)


class LocustRole(ABC):
    """Handles Locust's events in one process."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.common: Any = environment.parsed_options  # Locust's options and ours
        environment.stop_timeout = 0.0  # for users: their requests continue without them
        environment.events.test_start.add_listener(self.on_test_start)
        environment.events.test_stopping.add_listener(self.on_test_stopping)
        environment.events.quit.add_listener(self.on_quit)

    @abstractmethod
    def on_test_start(self, **_: Any) -> None:
        """Start a run."""

    @abstractmethod
    def on_test_stopping(self, **_: Any) -> None:
        """Finish the requests in flight."""

    @abstractmethod
    def on_quit(self, **_: Any) -> None:
        """Release resources."""


class Reporter(LocustRole):
    """Role of a process that holds the statistics of the whole run."""

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
        """Requests per second of each user in an open loop; None in a closed loop."""
        rate = self.setup.options.request_rate
        return None if rate is None else rate / (self.common.num_users or 1)

    def on_test_start(self, **_: Any) -> None:
        """Reset the state of the previous run."""
        self._problem = self.environment.process_exit_code = None

    def on_test_stop(self, **_: Any) -> None:
        """Log the summary of a run that was started from the web page."""
        if self.environment.web_ui is not None:
            _LOG.info(summary(self.environment.stats))

    def on_quit(self, **_: Any) -> None:
        """Close connections and print the summary."""
        self.setup.close()
        if self.common.csv_prefix:
            # Locust writes the CSV files once a second, but not at exit; wait for one more write.
            gevent.sleep(stats.CSV_STATS_INTERVAL_SEC + 0.2)
        print(summary(self.environment.stats), flush=True)
        if self._problem is not None:
            _complain(self._problem)

    def give_up(self, problem: str) -> None:
        """End the run early; the results so far are reported."""
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
    """Role of the only process of a run."""

    _traffic: Traffic | None = None

    def on_test_start(self, **_: Any) -> None:
        """Set up the traffic before users start."""
        super().on_test_start()
        self._traffic = StreamingUser.traffic = Traffic(
            self.environment,
            self.setup.requests,
            self.setup.wires,
            self.give_up,
            user_rate=self.user_rate,
        )

    def on_test_stopping(self, **_: Any) -> None:
        if self._traffic is not None:
            self._traffic.finish(self.common.stop_timeout)


class Master(Reporter):
    """Role of the master, which has no users."""

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
        """Give a worker that joins mid-run all requests from its index on; others send them too."""
        if self._runner.state in (STATE_SPAWNING, STATE_RUNNING):
            self._give_share(client_id, self._runner.get_worker_index(client_id), 1)

    def on_test_stopping(self, **_: Any) -> None:
        """Wait until each worker has finished its requests and reported them."""
        self._unfinished = set(self._workers())
        for worker in self._unfinished:
            self._runner.send_message(_FINISH, {"timeout_s": self.common.stop_timeout}, worker)
        deadline = monotonic() + self.common.stop_timeout + _REPORT_TIMEOUT_S
        while self._unfinished.intersection(self._workers()) and monotonic() < deadline:
            gevent.sleep(0.05)
        if self._unfinished:
            _LOG.error("requests are missing: no last report of %s", ", ".join(self._unfinished))

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


class LocustWorker(LocustRole):
    """Role of a worker: users, servers and workload are its master's."""

    def __init__(self, environment: Environment, runner: WorkerRunner) -> None:
        super().__init__(environment)
        self._runner = runner
        self._setup: Setup | None = None
        self._traffic: Traffic | None = None
        self._share: dict[str, Any] = {}
        runner.register_message(_SHARE, self._take_share)
        runner.register_message(_FINISH, self._finish, concurrent=True)

    def on_test_start(self, **_: Any) -> None:
        """Prepare as the master did, and set up the traffic before users start."""
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
        """Do nothing: the master has already asked to finish, or is gone."""

    def on_quit(self, **_: Any) -> None:
        """Close the connections."""
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
