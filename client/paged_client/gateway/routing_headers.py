"""Headers of a router in front of the gateway, which are read only if the operator trusts it.

They say for whom a request is, how urgent it is, when it must be over, and which server has its
blocks. The Gateway API Inference Extension and llm-d have given them their names.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from paged_client.gateway.errors import ApiError
from paged_client.gateway.options import GatewayOptions
from paged_client.gateway.schema.body import INT32_MAX
from paged_client.routing import RoutingHints

FAIRNESS_ID = "x-gateway-inference-fairness-id"
OBJECTIVE = "x-gateway-inference-objective"
TTFT_MS = "x-llm-d-slo-ttft-ms"
TPOT_MS = "x-llm-d-slo-tpot-ms"
SESSION_ID = "x-session-id"
KV_SOURCE = "x-kv-cache-source-host-port"

MAX_TENANT_LENGTH = 256
MAX_TIMEOUT_S = 86400.0


def read_objectives(text: str) -> dict[str, int]:
    """Return the priorities of objectives from a JSON object.

    Raises:
        ValueError: the text is anything else, or a priority is out of range.
    """
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if not isinstance(values, dict) or not all(map(_is_priority, values.values())):
        raise ValueError(f"must be a JSON object of integers up to {INT32_MAX}, got {text[:64]!a}")
    return values


def _is_priority(value: object) -> bool:
    return type(value) is int and -INT32_MAX <= value <= INT32_MAX


def routed_fields(request: Request, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine's fields that the headers of a trusted router stand for.

    Args:
        request: the HTTP request.
        params: the engine's fields of its body.

    Returns:
        ``tenant``, ``priority`` and ``timeout_s``, each only if the headers say something about it.

    Raises:
        ApiError: a header cannot be read, or is given twice.
    """
    options: GatewayOptions = request.app.state.options
    if not options.trust_routing_headers:
        return {}
    fields: dict[str, Any] = {}
    tenant = _header(request, FAIRNESS_ID)
    if len(tenant) > MAX_TENANT_LENGTH:
        raise ApiError.field(FAIRNESS_ID, f"has at most {MAX_TENANT_LENGTH} characters")
    if tenant:
        fields["tenant"] = tenant
    objective = _header(request, OBJECTIVE)
    if objective in options.objective_priorities:
        fields["priority"] = options.objective_priorities[objective]
    timeout_s = _timeout_s(request, params.get("max_tokens"))
    if timeout_s is not None:
        fields["timeout_s"] = min(timeout_s, params.get("timeout_s") or MAX_TIMEOUT_S)
    return fields


def routing_hints(request: Request) -> RoutingHints:
    """Return what the headers of a trusted router say about the choice of a server.

    Raises:
        ApiError: a header is given twice.
    """
    options: GatewayOptions = request.app.state.options
    if not options.trust_routing_headers:
        return RoutingHints()
    return RoutingHints(_header(request, SESSION_ID), _header(request, KV_SOURCE))


def _timeout_s(request: Request, max_tokens: int | None) -> float | None:
    """Return the time in which an answer meets its objectives; None if they do not limit it.

    It is limited if both objectives and the number of tokens are known.
    """
    first_ms, other_ms = _milliseconds(request, TTFT_MS), _milliseconds(request, TPOT_MS)
    if first_ms is None or other_ms is None or max_tokens is None:
        return None
    return (first_ms + other_ms * (max_tokens - 1)) / 1000


def _milliseconds(request: Request, name: str) -> float | None:
    text = _header(request, name)
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ApiError.field(name, "must be a number of milliseconds above 0")
    return value


def _header(request: Request, name: str) -> str:
    """Return the only value of a header; empty without one."""
    values = request.headers.getlist(name)
    if len(values) > 1:
        raise ApiError.field(name, "is given twice")
    return values[0].strip() if values else ""
