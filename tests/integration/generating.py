"""Requests to Triton's generate endpoints, for any model of a server."""

from __future__ import annotations

import json
from typing import Any

from demo_server import Server


def post(server: Server, model: str, verb: str, fields: dict[str, Any]) -> tuple[int, str]:
    """The status and the body of a response."""
    with server.connection() as connection:
        connection.request("POST", f"/v2/models/{model}/{verb}", json.dumps(fields).encode())
        response = connection.getresponse()
        return response.status, response.read().decode()


def generate(server: Server, model: str, **fields: Any) -> dict[str, Any]:
    """The outputs of a response."""
    status, body = post(server, model, "generate", fields)
    assert status == 200, body
    answer: dict[str, Any] = json.loads(body)
    return answer


def generate_stream(server: Server, model: str, **fields: Any) -> list[dict[str, Any]]:
    """The outputs of each response of a stream."""
    status, body = post(server, model, "generate_stream", {"stream": True, **fields})
    assert status == 200, body
    return [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: ")]
