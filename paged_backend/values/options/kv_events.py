"""The events of the KV cache: whether they are published, where and how many are kept."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from paged_backend.values.errors import ConfigError, option_error
from paged_backend.values.validation import Rule, check_fields, checked, from_mapping, shorten

OPTION = "kv_events_config"
_ENDPOINT = re.compile(r"tcp://[^\s/]{1,255}:\d{1,5}|ipc://[^\s]{1,90}")
_ENDPOINTS = ("endpoint", "replay_endpoint", "snapshot_endpoint")
_BOUND = re.compile(r"ipc://.*|tcp://(?:\*|0\.0\.0\.0|127\.[\d.]+|\[?::.*):\d+")


@dataclass(frozen=True, kw_only=True)
class KVEventsConfig:
    """The fields of ``kv_events_config``, which are vLLM's.

    Raises:
        ConfigError: a field has the wrong type or lies outside its range.
    """

    enable_kv_cache_events: bool = checked(False, Rule(bool))
    publisher: str | None = checked(None, Rule(str, choices=("null", "zmq"), optional=True))
    endpoint: str = checked("tcp://127.0.0.1:5557", Rule(str))
    replay_endpoint: str | None = checked(None, Rule(str, optional=True))
    snapshot_endpoint: str | None = checked(None, Rule(str, optional=True))
    buffer_steps: int = checked(10_000, Rule(int, 0, 2**20))
    # vLLM's are 100,000, with which a subscriber that never reads may take a gigabyte.
    hwm: int = checked(10_000, Rule(int, 1, 2**24))
    max_queue_size: int = checked(10_000, Rule(int, 1, 2**24))
    topic: str = checked("", Rule(str, max_length=1000))

    def __post_init__(self) -> None:
        check_fields(self, _refuse)
        for name, value in self._endpoints.items():
            if not _ENDPOINT.fullmatch(value):
                raise _refuse(name, f"must be tcp://HOST:PORT or ipc://PATH, got {shorten(value)}")

    @classmethod
    def read(cls, values: Mapping[str, Any] | None) -> KVEventsConfig:
        """Build from the value of the option; None stands for no events.

        Raises:
            ConfigError: a name is unknown or a value is not allowed.
        """
        return from_mapping(cls, values or {}, _refuse)

    def of_engine(self, number: int) -> KVEventsConfig:
        """Return the configuration of one of several engines of a model.

        As with vLLM, its number is added to each TCP port. It is appended to each other address.
        """
        moved = {name: _of_engine(value, number) for name, value in self._endpoints.items()}
        return self.read(asdict(self) | moved)

    def check_engines(self, num_engines: int) -> None:
        """Refuse addresses that several engines of a model would share.

        Raises:
            ConfigError: two of them would use the same address.
        """
        each = [
            address
            for number in range(num_engines)
            for address in self.of_engine(number)._endpoints.values()
        ]
        if len(set(each)) < len(each):
            raise option_error(
                OPTION,
                f"needs ports that are at least {num_engines} (data_parallel_size) apart, because "
                f"each engine adds its number to them",
            )

    @property
    def _endpoints(self) -> dict[str, str]:
        """The addresses that are set, by the names of their fields."""
        values = {name: getattr(self, name) for name in _ENDPOINTS}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def is_on(self) -> bool:
        """Whether events are published."""
        return self.enable_kv_cache_events and self.publisher != "null"


def is_bound(endpoint: str) -> bool:
    """Return True if the publisher binds to an endpoint, False if it connects to a collector.

    As with vLLM, it connects where the endpoint names a host. Unlike vLLM's, it binds to loopback
    addresses (``127.0.0.1``, ``[::1]``).
    """
    return _BOUND.fullmatch(endpoint) is not None


def _of_engine(address: str, number: int) -> str:
    if number == 0:
        return address
    if not address.startswith("tcp:"):
        return f"{address}_dp{number}"
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + number}"


def describe_fields() -> str:
    """Return the names of the fields with their defaults."""
    return ", ".join(
        spec.name if spec.default in (None, "") else f"{spec.name} ({spec.default})"
        for spec in fields(KVEventsConfig)
    )


def _refuse(name: str, problem: str) -> ConfigError:
    return option_error(f"{OPTION}.{name}", problem)
