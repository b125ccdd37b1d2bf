"""The exact events of a chat's stream."""

from __future__ import annotations

import re

from paged_client import Chunk
from paged_client.gateway.openai_format import ChoicesFormat
from paged_client.gateway.response_formats import ChatCompletionFormat
from paged_client.gateway.schema.generation import StreamOptions
from paged_client.gateway.version import VERSION

HEAD = '{"id":"chatcmpl-0","object":"chat.completion.chunk","created":0,"model":"m",'
HEAD += f'"system_fingerprint":"paged-backend-{VERSION}"'
REST = '"logprobs":null,"finish_reason":'


def test_the_fields_of_events_are_in_openai_s_order():
    choices = ChatCompletionFormat(num_top=None, with_prompt_logprobs=False, with_reasoning=True)
    chat = ChoicesFormat("m", choices, StreamOptions(include_usage=True))
    events = chat.events(0, Chunk("Hi", (1,), "stop", 3, 1)) + chat.end()
    shown = re.sub("chatcmpl-[0-9a-f]+", "chatcmpl-0", events.decode())
    shown = re.sub('"created":[0-9]+', '"created":0', shown)
    usage = '{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4,'
    usage += '"prompt_tokens_details":{"cached_tokens":0}}'
    role = '{"index":0,"delta":{"role":"assistant","content":""},' + REST + "null}"
    text = '{"index":0,"delta":{"content":"Hi"},' + REST + '"stop"}'
    assert shown.split("\n\n") == [
        f'data: {HEAD},"usage":null,"choices":[{role}]}}',
        f'data: {HEAD},"usage":null,"choices":[{text}]}}',
        f'data: {HEAD},"usage":{usage},"choices":[]}}',
        "data: [DONE]",
        "",
    ]
