"""The exact events of a chat's stream."""

from __future__ import annotations

import re

from paged_client import Answer, Chunk, Completion, PredictionTokens
from paged_client.gateway.openai_format import ChoicesFormat, usage_json
from paged_client.gateway.response_formats import ChatCompletionFormat
from paged_client.gateway.schema.generation import StreamOptions
from paged_client.gateway.usage import Usage
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


def test_the_usage_counts_the_tokens_of_predictions():
    """A chunk counts from the start of its completion, so the last one of each counts."""
    streamed, whole = Usage(), Usage()
    for accepted, rejected in ((2, 1), (5, 3)):
        predicted = PredictionTokens(accepted, rejected)
        streamed.count(0, Chunk("", (1,), None, 3, 1, 0, prediction_tokens=predicted))
    streamed.count(0, Chunk("", (1,), None, 3, 1, 1, prediction_tokens=PredictionTokens(0, 4)))
    counts = (PredictionTokens(5, 3), PredictionTokens(0, 4))
    answers = tuple(Answer("", (1,), "stop", prediction_tokens=count) for count in counts)
    whole.count_all([Completion(answers, 3, 0.0, (), 0.0)])
    wanted = {"accepted_prediction_tokens": 5, "rejected_prediction_tokens": 7}
    for usage in (streamed, whole):
        assert usage_json(usage)["completion_tokens_details"] == wanted
    assert "completion_tokens_details" not in usage_json(Usage())
