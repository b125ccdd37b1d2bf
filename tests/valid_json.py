"""Validation of documents by jsonschema, imported where it is used, which takes a second."""

from __future__ import annotations

from typing import Any


def validate(document: Any, schema: dict[str, Any]) -> None:
    """Check a document.

    Raises:
        jsonschema.ValidationError: it is not what the schema describes.
    """
    import jsonschema

    jsonschema.validate(document, schema)
