"""The route ``/v1/responses``."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request, Response

from paged_client.gateway.backend_pool import BackendRequest
from paged_client.gateway.bodies import body_of
from paged_client.gateway.dependencies import Servers, engine_params
from paged_client.gateway.responses import GatewayResponse, respond
from paged_client.gateway.responses_api.format import ResponsesFormat
from paged_client.gateway.responses_api.schema import ResponsesRequest
from paged_client.gateway.routing_headers import routing_hints

ResponsesBody = Annotated[ResponsesRequest, Depends(body_of(ResponsesRequest))]


async def create_response(request: Request, body: ResponsesBody, servers: Servers) -> Response:
    """Create a model response."""
    model = await servers.resolve(body.model)
    params = engine_params(request, body)
    backend_request = BackendRequest(
        model,
        body.routed(),
        params,
        whole=not body.stream,
        parsed=True,
        hints=routing_hints(request),
    )
    response_format = ResponsesFormat(model.shown, body)
    response = GatewayResponse(response_format, [servers.stream(backend_request)])
    return await respond(request, response, stream=body.stream)
