"""What the decoders make of the bytes of a reply, however the network cuts them."""

from __future__ import annotations

import json

import pytest
from paged_loadtest.protocols import openai, triton_http
from paged_loadtest.protocols.decoding import describe_refusal
from paged_loadtest.timeline import Timeline

from paged_backend.tools.workloads.request import WorkloadRequest
from paged_backend.values.errors import ConfigError

CHAT = ({"role": "user", "content": "Hi"},)


def events(*contents):
    return b"".join(
        b"data: " + (c if isinstance(c, bytes) else json.dumps(c).encode()) + b"\n\n"
        for c in contents
    )


def decode(decoder_type, *pieces):
    """The timeline of pieces that arrive at 1, 2, 3 ... seconds."""
    decoder = decoder_type(Timeline(0.0))
    for number, piece in enumerate(pieces, start=1):
        decoder.feed(piece, float(number))
    decoder.finish()
    return decoder.timeline


def tensors(text, count, reason="None", **more):
    return {
        "text_output": text,
        "num_output_tokens": count,
        "num_input_tokens": 5,
        "finish_reason": reason,
        **more,
    }


def piece(text, count=None, **more):
    choice = {"index": 0, "text": text, "finish_reason": None}
    return {"choices": [choice], "usage": None if count is None else usage(count), **more}


def usage(count, cached=None):
    details = None if cached is None else {"cached_tokens": cached}
    return {"prompt_tokens": 5, "completion_tokens": count, "prompt_tokens_details": details}


TRITON = events(tensors("a", 1, num_cached_tokens=3), tensors("", 0), tensors("bc", 2, "length"))
OPENAI = events(piece("a", 1), piece("", 1), piece("bc", 3), b"[DONE]")


@pytest.mark.parametrize(
    ("decoder_type", "body"),
    [(triton_http.TritonHttpDecoder, TRITON), (openai.OpenAIDecoder, OPENAI)],
)
def test_a_cut_anywhere_changes_nothing_but_the_times(decoder_type, body):
    for cut in range(len(body) + 1):
        timeline = decode(decoder_type, body[:cut], body[cut:])
        assert timeline.error is None
        assert (timeline.text, timeline.num_output_tokens, timeline.num_input_tokens) == (
            "abc",
            3,
            5,
        )
        assert len(timeline.arrivals_s) == 2


def test_an_event_counts_when_it_is_complete():
    first, rest = TRITON[:10], TRITON[10:]
    assert decode(triton_http.TritonHttpDecoder, first, rest).arrivals_s == [2.0, 2.0]


def test_lines_may_end_as_http_has_them():
    body = OPENAI.replace(b"\n", b"\r\n")
    assert decode(openai.OpenAIDecoder, body).text == "abc"


def test_triton_counts_tokens_and_says_what_was_cached():
    timeline = decode(triton_http.TritonHttpDecoder, TRITON)
    assert timeline.num_cached_tokens is None  # the last response did not say
    body = events(tensors("a", 1, "stop", num_cached_tokens=3))
    assert decode(triton_http.TritonHttpDecoder, body).num_cached_tokens == 3


def test_with_usage_beside_each_piece_tokens_without_text_are_arrivals():
    role = {"choices": [{"delta": {"role": "assistant", "content": ""}}], "usage": usage(0)}
    held_back = {"choices": [{"delta": {"content": ""}}], "usage": usage(1)}
    shown = {"choices": [{"delta": {"content": "ab"}}], "usage": usage(3, cached=2)}
    last = {"choices": [], "usage": usage(3, cached=2)}
    pieces = [events(role), events(held_back), events(shown), events(last, b"[DONE]")]
    timeline = decode(openai.OpenAIDecoder, *pieces)
    assert timeline.arrivals_s == [2.0, 3.0]
    assert (timeline.text, timeline.num_output_tokens, timeline.num_cached_tokens) == ("ab", 3, 2)
    assert timeline.is_success


def test_without_it_pieces_with_text_are_arrivals():
    pieces = [events(piece("")), events(piece("ab")), events(piece("c"))]
    last = events({"choices": [], "usage": usage(3)}, b"[DONE]")
    timeline = decode(openai.OpenAIDecoder, *pieces, last)
    assert timeline.arrivals_s == [2.0, 3.0] and timeline.num_output_tokens == 3


@pytest.mark.parametrize(
    ("decoder_type", "body", "error"),
    [
        (triton_http.TritonHttpDecoder, events(tensors("a", 1)), "ended before its answer did"),
        (triton_http.TritonHttpDecoder, b"", "ended before its answer did"),
        (triton_http.TritonHttpDecoder, events(tensors("a", 1), {"error": "gone"}), "gone"),
        (triton_http.TritonHttpDecoder, events(tensors("a", 1, "abort")), "aborted"),
        (triton_http.TritonHttpDecoder, events({"text_output": "a"}), "cannot read the event"),
        (triton_http.TritonHttpDecoder, events(b"{"), "cannot read the event"),
        (openai.OpenAIDecoder, events(piece("a", 1)), "ended before its answer did"),
        (openai.OpenAIDecoder, events(piece("a"), b"[DONE]"), "how many tokens"),
        (openai.OpenAIDecoder, events({"error": {"message": "gone"}}, b"[DONE]"), "gone"),
        (openai.OpenAIDecoder, events([1]), "cannot read the event"),
    ],
)
def test_what_is_not_an_answer_is_a_failure(decoder_type, body, error):
    timeline = decode(decoder_type, body)
    assert error in timeline.error and not timeline.is_success


def test_prompts_of_the_wrong_kind_are_refused():
    with pytest.raises(ConfigError, match="openai-chat, or triton"):
        openai.encode(WorkloadRequest(CHAT, 4), "m")
    with pytest.raises(ConfigError, match="--backend openai, or triton"):
        openai.encode(WorkloadRequest((1, 2), 4), "m", chat=True)


def test_bodies_ask_for_what_the_request_says():
    body = json.loads(openai.encode(WorkloadRequest((1, 2), 4), "m", cache_salt="s"))
    assert body["prompt"] == [1, 2] and body["ignore_eos"] is True and body["cache_salt"] == "s"
    body = json.loads(
        openai.encode(
            WorkloadRequest("Hi", 4, ignore_eos=False), "m", chat=True, continuous_usage=False
        )
    )
    assert body["messages"] == [{"role": "user", "content": "Hi"}]
    assert "ignore_eos" not in body and body["stream_options"] == {"include_usage": True}
    known = ["return_num_input_tokens", "return_num_output_tokens"]
    body = json.loads(triton_http.encode(WorkloadRequest("Hi", 4), "m", known))
    assert {name for name in body if name.startswith("return_")} == set(known)
    assert "return_finish_reason" in json.loads(triton_http.encode(WorkloadRequest("Hi", 4), "m"))


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error": "no such model"}', "HTTP 400: no such model"),
        (b'{"error": {"message": "too long"}}', "HTTP 400: too long"),
        (b"<html>", "HTTP 400: <html>"),
        (b'["x"]', 'HTTP 400: ["x"]'),
    ],
)
def test_refusals_are_told_in_their_own_words(body, text):
    assert describe_refusal(400, body) == text
