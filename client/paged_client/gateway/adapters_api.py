"""The routes ``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``, with vLLM's fields."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from fastapi import Depends, Request, Response
from fastapi.responses import PlainTextResponse
from pydantic import Field

from paged_client import InvalidRequest, UnknownModel
from paged_client.gateway.bodies import body_of
from paged_client.gateway.dependencies import Servers
from paged_client.gateway.errors import ApiError
from paged_client.gateway.responses import while_connected
from paged_client.gateway.schema.body import RequestBody
from paged_client.gateway.served_names import MAX_NAME_LENGTH

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
_MISSING = "No such file or directory"  # the system's text at the end of an engine's message


class UnloadAdapterRequest(RequestBody):
    """The body of ``/v1/unload_lora_adapter``."""

    ignored: ClassVar[frozenset[str]] = frozenset(["lora_int_id"])

    lora_name: str = Field(min_length=1, max_length=MAX_NAME_LENGTH)


class LoadAdapterRequest(RequestBody):
    """The body of ``/v1/load_lora_adapter``; ``model`` is the base model, if there are several."""

    ignored: ClassVar[frozenset[str]] = frozenset()
    not_supported: ClassVar[dict[str, Any]] = {"is_3d_lora_weight": False}

    lora_name: str = Field(min_length=1, max_length=MAX_NAME_LENGTH)
    lora_path: str = Field(min_length=1, max_length=4096)
    load_inplace: bool = False
    model: str | None = Field(None, max_length=MAX_NAME_LENGTH)


LoadBody = Annotated[LoadAdapterRequest, Depends(body_of(LoadAdapterRequest))]
UnloadBody = Annotated[UnloadAdapterRequest, Depends(body_of(UnloadAdapterRequest))]


async def load_lora_adapter(request: Request, body: LoadBody, servers: Servers) -> Response:
    """Load a LoRA adapter, which requests can then name as their model."""
    base = await servers.resolve(body.model)
    if base.adapter:
        raise ApiError.field("model", "must be a base model, not an adapter")
    name = body.lora_name
    if any(name == known.shown and not known.adapter for known in await servers.models()):
        raise ApiError.field("lora_name", f"{name} is the name of a model")
    loading = servers.load_adapter(base, name, body.lora_path, in_place=body.load_inplace)
    try:
        await while_connected(request, loading)
    except UnknownModel:
        raise
    except InvalidRequest as error:
        status = 404 if str(error).endswith(_MISSING) else 400
        raise ApiError(status, str(error)) from None
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


async def unload_lora_adapter(request: Request, body: UnloadBody, servers: Servers) -> Response:
    """Unload a LoRA adapter: no request can name it, and its requests have ended."""
    name = body.lora_name
    missing = ApiError(404, f"The lora adapter '{name}' cannot be found.", param="lora_name")
    try:
        adapter = await servers.resolve(name)
    except UnknownModel:
        raise missing from None
    if not adapter.adapter:
        raise missing
    try:
        await while_connected(request, servers.unload_adapter(adapter))
    except InvalidRequest as error:
        raise ApiError(404 if str(error) == str(missing) else 400, str(error)) from None
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")
