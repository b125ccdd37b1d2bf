"""The routes ``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request, Response
from fastapi.responses import JSONResponse

from paged_client import InvalidRequest
from paged_client.gateway.auth import tenant_of
from paged_client.gateway.backend_pool import BackendRequest
from paged_client.gateway.bodies import body_of
from paged_client.gateway.dependencies import Servers, engine_params
from paged_client.gateway.errors import ApiError
from paged_client.gateway.messages_api.format import MessagesFormat, message_field
from paged_client.gateway.messages_api.schema import CountTokensRequest, MessagesRequest
from paged_client.gateway.responses import GatewayResponse, respond
from paged_client.gateway.routing_headers import routing_hints

MessagesBody = Annotated[MessagesRequest, Depends(body_of(MessagesRequest))]
CountTokensBody = Annotated[CountTokensRequest, Depends(body_of(CountTokensRequest))]


async def create_message(request: Request, body: MessagesBody, servers: Servers) -> Response:
    """Create a message."""
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
    response = GatewayResponse(MessagesFormat(model.shown), [servers.stream(backend_request)])
    return await respond(request, response, stream=body.stream)


async def count_tokens(request: Request, body: CountTokensBody, servers: Servers) -> Response:
    """Count the tokens of a prompt with its tools."""
    model = await servers.resolve(body.model)
    prompt, options = body.routed(), body.tool_options
    try:
        tokens = await servers.ask(
            model,
            lambda client: client.tokenize(
                prompt,
                tenant=tenant_of(request),
                tools=options.get("tools"),
                tool_choice=options.get("tool_choice"),
            ),
        )
    except InvalidRequest as error:
        raise ApiError.from_client(error, message_field) from None
    return JSONResponse({"input_tokens": len(tokens)})
