"""The operator's options for the gateway."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paged_client.gateway.auth import ApiKey
from paged_client.gateway.cors import Cors
from paged_client.gateway.limits import DEFAULT_BODY_BYTES
from paged_client.gateway.restrictions import Restrictions


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """The operator's options.

    ``api_keys``: without any, the gateway requires no key.
    ``request_timeout_s``: for a whole response.
    ``max_stream_backlog``: maximum number of a stream's tokens that wait for the client; a stream
    that exceeds it is ended.
    ``drain_timeout_s``: how long running requests may continue after a signal to stop.
    ``share_prefix_cache``: whether tenants with API keys share cached blocks of prompts that have
    no salt.
    ``triton_metrics``: addresses of servers with metrics that ``/metrics`` also has.
    ``restrictions``: routes that require a header.
    ``max_connections``: limit on open connections; lower if the process may open fewer files.
    ``max_connections_per_address``: limit on connections from one address; default: half of all,
    without a limit for loopback addresses.
    ``cors``: which web pages may call the gateway.
    ``trust_routing_headers``: whether a router in front of the gateway sets the headers of
    ``routing_headers.py``; clients must not be able to.
    ``objective_priorities``: the engine's priority of each objective that such a router names.
    ``served_names``: models by the names that clients know; None stands for the only model.
    ``runtime_lora_keys``: the keys of requests that load and unload LoRA adapters; without any, no
    request can.
    """

    triton: tuple[str, ...] = ("127.0.0.1:8001",)
    api_keys: tuple[ApiKey, ...] = ()
    request_timeout_s: float | None = None
    max_body_bytes: int = DEFAULT_BODY_BYTES
    max_stream_backlog: int = 4096
    drain_timeout_s: float = 20.0
    share_prefix_cache: bool = False
    triton_metrics: tuple[str, ...] = ()
    restrictions: Restrictions = field(default_factory=dict)
    max_connections: int = 8192
    max_connections_per_address: int | None = None
    cors: Cors = field(default_factory=Cors)
    trust_routing_headers: bool = False
    objective_priorities: Mapping[str, int] = field(default_factory=dict)
    served_names: Mapping[str, str | None] = field(default_factory=dict)
    runtime_lora_keys: tuple[ApiKey, ...] = ()
