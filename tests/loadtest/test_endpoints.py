"""The four ways to ask a server, on real ones."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from demo_server import MODEL
from paged_loadtest.endpoints import open_endpoint
from paged_loadtest.options import BACKENDS, TargetOptions

from paged_backend.tools.workloads.request import WorkloadRequest
from paged_backend.values.errors import ConfigError

pytestmark = pytest.mark.server
QUESTION = "What does len do?"


def target(targets, backend, **more):
    *_, url = targets.flags(backend)
    return TargetOptions(backend=backend, base_url=url, **more)


async def ask(options, *requests):
    async with open_endpoint(options) as endpoint:
        facts = await endpoint.check()
        return facts, [await endpoint.send(request) for request in requests]


@pytest.mark.parametrize("backend", ["triton", "triton-http", "openai"])
def test_ids_and_text_get_the_same_answer_everywhere(targets, client, backend):
    ids = client.tokenize(QUESTION)
    requests = WorkloadRequest(QUESTION, 12), WorkloadRequest(ids, 12)
    facts, timelines = asyncio.run(ask(target(targets, backend), *requests))
    assert (facts.vocab_size, facts.max_model_len) == (2048, 2048)
    expected = client.generate(QUESTION, temperature=0, max_tokens=12, ignore_eos=True)
    for timeline in timelines:
        assert timeline.error is None
        assert timeline.text == expected.text
        assert timeline.num_output_tokens == 12
        assert timeline.num_input_tokens == len(ids)
        assert timeline.num_cached_tokens is not None
        assert timeline.arrivals_s == sorted(timeline.arrivals_s)
        assert 1 < len(timeline.arrivals_s) <= 12
        assert 0 < timeline.ttft_s < timeline.e2e_s


@pytest.mark.parametrize("backend", ["triton", "triton-http", "openai-chat"])
def test_chats_end_where_the_model_ends_them(targets, client, backend):
    chat = ({"role": "user", "content": QUESTION},)
    request = WorkloadRequest(chat, 64, ignore_eos=False)
    _, (timeline,) = asyncio.run(ask(target(targets, backend), request))
    expected = client.generate(chat, temperature=0, max_tokens=64)
    assert timeline.error is None
    assert (timeline.text, timeline.num_output_tokens) == (
        expected.text,
        expected.num_output_tokens,
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_failed_request_says_why_and_harms_no_other(targets, backend):
    too_long = WorkloadRequest("Hi", 10**6)
    _, (failed, after) = asyncio.run(
        ask(target(targets, backend), too_long, WorkloadRequest("Hi", 4))
    )
    assert "max_tokens" in failed.error and not failed.is_success
    assert after.error is None and after.num_output_tokens == 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_time_limit_is_a_failure(targets, backend):
    for limit_s in (0.3, 1.5, 6.0):  # a busy machine needs longer for its first token
        options = target(targets, backend, request_timeout=limit_s)
        _, (timeline,) = asyncio.run(ask(options, WorkloadRequest("Hi", 1500)))
        if timeline.num_output_tokens:
            break
    assert timeline.error is not None
    assert 0 < timeline.num_output_tokens < 1500


@pytest.mark.parametrize("backend", BACKENDS)
def test_salted_requests_find_nothing_of_those_before(targets, backend):
    request = WorkloadRequest("What does os.path.join do with absolute paths? " * 4, 2)

    async def cached():
        async with open_endpoint(target(targets, backend)) as endpoint:
            await endpoint.check()
            for _ in range(2):
                endpoint.forget_cache()
                for _ in range(2):
                    yield (await endpoint.send(request)).num_cached_tokens

    async def collect():
        return [count async for count in cached()]

    first, again, fresh, fresh_again = asyncio.run(collect())
    assert (first, fresh) == (0, 0)
    assert again == fresh_again > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_that_is_not_there(targets, backend):
    message = rf"--model: .* has no model 'a/b c' that is ready; ready there: {MODEL}"
    with pytest.raises(ConfigError, match=message):
        asyncio.run(ask(target(targets, backend, model="a/b c")))


WRONG = [
    (backend, other)
    for backend in BACKENDS
    for other in ("triton", "triton-http", "openai", None)
    if backend.removesuffix("-chat") != other
]


@pytest.mark.parametrize(("backend", "other"), WRONG)
def test_an_address_where_another_protocol_or_nothing_is(targets, backend, other):
    url = "127.0.0.1:1" if other is None else targets.flags(other)[-1]
    with pytest.raises(ConfigError, match=f"--base-url: nobody speaks {backend} at ") as raised:
        asyncio.run(ask(TargetOptions(backend=backend, base_url=url)))
    assert "\n" not in str(raised.value)


@asynccontextmanager
async def strict_server(gateway):
    """A server that knows OpenAI's own fields only, and has the gateway answer."""

    async def complete(request):
        body = await request.json()
        if "cache_salt" in body or "continuous_usage_stats" in body["stream_options"]:
            return web.json_response({"error": {"message": "unknown field"}}, status=400)
        async with aiohttp.ClientSession(gateway) as session:
            async with session.post(request.path, json=body) as reply:
                return web.Response(body=await reply.read(), status=reply.status)

    async def models(request):
        return web.json_response({"data": [{"id": MODEL}]})

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def test_a_peer_that_refuses_what_openai_does_not_have(targets):
    async def run():
        async with strict_server(f"http://{targets.gateway}") as url:
            return await ask(
                TargetOptions(backend="openai", base_url=url), WorkloadRequest(QUESTION, 6)
            )

    facts, (timeline,) = asyncio.run(run())
    assert facts.vocab_size is None
    assert timeline.error is None and timeline.num_output_tokens == 6


def test_a_gateway_that_wants_a_key(targets, monkeypatch, tmp_path):
    from paged_backend.launch.gateway_process import GatewayProcess
    from paged_backend.launch.ports import bind

    monkeypatch.setenv("PAGED_API_KEYS", "secret-key-of-the-test")
    listener = bind("127.0.0.1", 0, "port")
    with GatewayProcess(listener, targets.server.running.grpc_url) as gateway:
        options = TargetOptions(backend="openai", base_url=gateway.address)
        monkeypatch.delenv("OPENAI_API_KEY", raising=False)
        with pytest.raises(ConfigError, match="OPENAI_API_KEY: .* wants an API key"):
            asyncio.run(ask(options))
        monkeypatch.setenv("OPENAI_API_KEY", "secret-key-of-the-test")
        _, (timeline,) = asyncio.run(ask(options, WorkloadRequest(QUESTION, 3)))
        assert timeline.num_output_tokens == 3
