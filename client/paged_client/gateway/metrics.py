"""The gateway's own metrics; the engine's are at the servers' metrics endpoints."""

from __future__ import annotations

import time
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paged_client.routing import Choice

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class WatchedServer(Protocol):
    """A server with values to export."""

    address: str
    num_open: int
    is_up: bool


class GatewayMetrics:
    """Prometheus metrics, updated on the event loop."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = self._counter("requests", "Requests answered", "route", "status")
        self._routed = self._counter("routed", "Requests sent to a server", "server", "chosen_by")
        self._retries = self._counter("retries", "Requests sent to a second server")
        self._first_byte = Histogram(
            "paged_gateway_time_to_first_byte_seconds",
            "From a request to the beginning of its answer",
            ["route"],
            buckets=_BUCKETS,
            registry=self._registry,
        )
        self._open = self._gauge("open_requests", "Requests that a server has open")
        self._up = self._gauge("server_up", "1 unless the server was not there when last asked")

    def watch(self, server: WatchedServer) -> None:
        """Export a server's values from now on."""
        self._open.labels(server.address).set_function(lambda: server.num_open)
        self._up.labels(server.address).set_function(lambda: server.is_up)

    def routed(self, choice: Choice, is_retry: bool) -> None:
        """Count a request that is sent to a server."""
        self._routed.labels(choice.server, "prefix" if choice.by_prefix else "load").inc()
        if is_retry:
            self._retries.inc()

    def began(self, route: str, status: int, seconds: float) -> None:
        """Count a response that has begun ``seconds`` after its request."""
        self._requests.labels(route, status).inc()
        self._first_byte.labels(route).observe(seconds)

    def page(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"paged_gateway_{name}", help, labels, registry=self._registry)

    def _gauge(self, name: str, help: str) -> Gauge:
        return Gauge(f"paged_gateway_{name}", help, ["server"], registry=self._registry)


class RequestMetrics:
    """ASGI middleware that records metrics of each request."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward everything unchanged."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        started_at = time.perf_counter()

        async def observed(message: Message) -> None:
            if message["type"] == "http.response.start":
                # The route, not the path: clients could create any number of label values.
                route = getattr(scope.get("route"), "path", "none")
                self._metrics.began(route, message["status"], time.perf_counter() - started_at)
            await send(message)

        await self._app(scope, receive, observed)
