"""JSON texts and server-sent events."""

from __future__ import annotations

import json
from typing import Any, TypeAlias

Json: TypeAlias = dict[str, Any]

to_json = json.JSONEncoder(separators=(",", ":")).encode


def data_event(content: Json) -> bytes:
    """Return an event without a name."""
    return f"data: {to_json(content)}\n\n".encode()


def typed_event(content: Json) -> bytes:
    """Return an event named by the ``type`` of its content."""
    return f"event: {content['type']}\ndata: {to_json(content)}\n\n".encode()
