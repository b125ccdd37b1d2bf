"""What every route that generates needs: the servers, and the parameters of the request."""

from __future__ import annotations

from hashlib import sha256
from typing import Annotated, Any, TypeAlias

from fastapi import Depends, Request

from paged_client.gateway.auth import tenant_of
from paged_client.gateway.backend_pool import BackendPool
from paged_client.gateway.errors import ApiError
from paged_client.gateway.options import GatewayOptions
from paged_client.gateway.routing_headers import routed_fields
from paged_client.gateway.schema.generation import EngineFields


async def _pool(request: Request) -> BackendPool:  # FastAPI would run a plain function in a thread
    request.app.state.drain.check()
    pool: BackendPool = request.app.state.pool
    return pool


Servers: TypeAlias = Annotated[BackendPool, Depends(_pool)]


def engine_params(request: Request, body: EngineFields) -> dict[str, Any]:
    """Return the engine's fields of a request. Raises ApiError.

    With API keys, a request can neither name a tenant nor overtake others by a negative priority.
    The headers of a trusted router count more than the body, and a key's tenant more than a header.
    """
    params, tenant = body.engine_fields(), tenant_of(request)
    routed = routed_fields(request, params)
    if tenant is None:
        return params | routed
    if body.tenant is not None:
        raise ApiError.field("tenant", "is that of the API key; leave it out")
    if body.priority is not None and body.priority < 0:
        raise ApiError.field("priority", "must be at least 0 with an API key")
    options: GatewayOptions = request.app.state.options
    if body.cache_salt is not None or not options.share_prefix_cache:
        # A client's salt is never empty, so the empty one is another separate salt of the tenant.
        salt = f"{tenant}\0{body.cache_salt or ''}"
        params["cache_salt"] = sha256(salt.encode()).hexdigest()
    return params | routed | {"tenant": tenant}
