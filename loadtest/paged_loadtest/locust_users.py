"""Locust users, one class per protocol."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import ClassVar

from locust import User, tag, task
from locust.exception import StopUser

from paged_backend.tools.workloads.request import WorkloadRequest
from paged_loadtest.locust_traffic import Traffic
from paged_loadtest.locust_wires import GenerateStreamWire, GrpcWire, OpenAIWire, Transport


class StreamingUser(User):
    """Sends requests one after another, or each at its own time, and reads the streamed responses.

    ``traffic`` is set before the first user starts.
    """

    abstract = True
    wire_type: ClassVar[type[Transport]]
    traffic: ClassVar[Traffic]

    def on_start(self) -> None:
        """Wait until the first request is due."""
        self._request: WorkloadRequest | None = None
        self._due_s = perf_counter()
        self.wait()

    def wait_time(self) -> float:
        """Fetch the next request and return the seconds until it is due."""
        traffic = self.traffic
        self._request = traffic.next_request()
        if self._request is None:
            return 0.0
        if self._request.arrival_s is not None:
            self._due_s = traffic.began_s + self._request.arrival_s
        elif traffic.user_rate is not None:
            self._due_s += traffic.random.expovariate(traffic.user_rate)
        return max(0.0, self._due_s - perf_counter())

    def send(self) -> None:
        """Send the request that is due; in a closed loop, wait for it and its follow-ups."""
        if self._request is None:
            raise StopUser
        greenlet = self.traffic.begin(self.wire_type, self._request)
        if not self.traffic.is_open_loop:
            greenlet.join()


def _tagged(name: str) -> Callable[[StreamingUser], None]:
    """Return a task with a tag; Locust reads tags from tasks, so each class has its own."""

    @tag(name)
    @task
    def ask(user: StreamingUser) -> None:
        user.send()

    return ask


class GrpcUser(StreamingUser):
    """Sends over Triton's gRPC."""

    wire_type = GrpcWire
    ask = _tagged("grpc")


class HttpUser(StreamingUser):
    """Sends over Triton's HTTP ``generate_stream``."""

    wire_type = GenerateStreamWire
    ask = _tagged("http")


class OpenAIUser(StreamingUser):
    """Sends to the OpenAI gateway."""

    wire_type = OpenAIWire
    ask = _tagged("openai")
