"""Requests that the official clients have sent, as they are, to a real server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.server
RECORDED = json.loads((Path(__file__).parent / "recorded_requests.json").read_text())


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda recorded: recorded["name"])
def test_recorded_requests_are_answered(tools_gateway, recorded):
    limit = "max_output_tokens" if recorded["path"] == "/v1/responses" else "max_tokens"
    body = recorded["body"]
    if recorded["path"] != "/v1/messages/count_tokens":
        body = {**body, limit: 40}
    response = tools_gateway.post(recorded["path"], body)
    assert response.status == 200, response.body
    if body.get("stream"):
        last = "message_stop" if recorded["path"] == "/v1/messages" else "response."
        assert f"\nevent: {last}" in response.body.decode()
        assert b'"type":"error"' not in response.body
