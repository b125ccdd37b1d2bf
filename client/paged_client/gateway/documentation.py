"""The OpenAPI document, which the page ``/docs`` shows."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

# Browsers load the page without a key; the user enters one there to send requests.
OPEN_PATHS = (
    *("/docs", "/openapi.json"),
    *(
        f"/static-offline-docs/{name}"
        for name in ("swagger-ui-bundle.js", "swagger-ui.css", "favicon.png")
    ),
)


def document(app: FastAPI, bodies: Mapping[str, type[BaseModel]], *, with_keys: bool) -> None:
    """Add to an application's document what FastAPI does not know.

    Args:
        app: the application, with all its routes.
        bodies: the bodies of POST requests by path; the application parses them itself.
        with_keys: whether requests need an API key.
    """
    content = app.openapi()  # FastAPI keeps it
    schemas, definitions = models_json_schema(
        [(model, "validation") for model in bodies.values()],
        ref_template="#/components/schemas/{model}",
    )
    for path, model in bodies.items():
        content["paths"][path]["post"]["requestBody"] = {
            "content": {"application/json": {"schema": schemas[model, "validation"]}},
            "required": True,
        }
    components = content.setdefault("components", {})
    components.setdefault("schemas", {}).update(definitions["$defs"])
    if with_keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        content["security"] = [{"key": []}]
