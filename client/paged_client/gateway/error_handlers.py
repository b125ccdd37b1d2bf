"""Converts exceptions of routes to error responses."""

from __future__ import annotations

import difflib

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import Route

from paged_client import ClientError
from paged_client.gateway.errors import ApiError
from paged_client.gateway.responses import ClientGone
from paged_client.gateway.schema.body import MAX_NAME_LENGTH, short

_CLIENT_CLOSED_REQUEST = 499  # appears only in the metrics


def add_error_handlers(app: FastAPI) -> None:
    """Give an application the handlers of all exceptions that its routes raise."""

    async def api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error.response(request.scope)

    async def client_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ClientError)
        return ApiError.from_client(error).response(request.scope)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = str(error.detail)
        if error.status_code == 404:
            message = _no_route(app, request.scope["path"])
        elif error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "other methods")
            path = short(request.scope["path"])
            message = f"{path} takes {allowed}, not {short(request.method)}"
        refusal = ApiError(error.status_code, message, headers=error.headers)
        return refusal.response(request.scope)

    async def client_gone(request: Request, error: Exception) -> Response:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)

    async def fault(request: Request, error: Exception) -> Response:
        refusal = ApiError(500, "internal error; the gateway's log has more")
        return refusal.response(request.scope)

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(ClientError, client_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(ClientGone, client_gone)
    app.add_exception_handler(Exception, fault)


def _no_route(app: FastAPI, path: str) -> str:
    """Return an error that names the route, and one that may be meant."""
    hint = "the page /docs lists the routes"
    if len(path) <= MAX_NAME_LENGTH:
        paths = [route.path for route in app.routes if isinstance(route, Route)]
        near = difflib.get_close_matches(path, paths, n=1)
        hint = f"did you mean {near[0]}?" if near else hint
    return f"there is no route {short(path)}; {hint}"
