"""Adapters are loaded and unloaded while a server runs, over gRPC and at the gateway."""

from __future__ import annotations

import re
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import pytest
from adapter_folders import make_adapter
from callers import QUESTIONS, Ask, Crowd, ask_all, greedy
from gateway.gateways import Gateway, running_gateway
from paged_client import Client
from paged_client.errors import InvalidRequest
from servers import (
    LOAD_TIMEOUT_S,
    MODEL,
    kill_engine,
    metrics,
    restarts,
    serve_demo,
    wait_for,
    wait_loaded,
)

from paged_backend import LLM, BeamSearchParams, LoRARequest, SamplingParams
from paged_backend.launch.server_process import RunningServer

pytestmark = pytest.mark.server

NUM_TOKENS = 60
KEY = {"Authorization": "Bearer admin"}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@dataclass
class World:
    """A server that has the adapter ``fixed`` from its start, and a gateway in front of it."""

    server: RunningServer
    gateway: Gateway
    root: Path
    fixed: Path

    def load(self, name: str, path: str, **fields: object) -> tuple[int, str]:
        body = {"lora_name": name, "lora_path": path, **fields}
        response = self.gateway.post(LOAD, body, **KEY)
        return response.status, response.body.decode()

    def unload(self, name: str) -> tuple[int, str]:
        response = self.gateway.post(UNLOAD, {"lora_name": name}, **KEY)
        return response.status, response.body.decode()

    def complete(self, model: str, prompt: str = QUESTIONS[0]) -> str:
        body = {"model": model, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0}
        response = self.gateway.post("/v1/completions", {**body, "ignore_eos": True})
        assert response.status == 200, response.body
        assert response.json["model"] == model
        return response.json["choices"][0]["text"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("adapters")
    root = folder / "root"
    root.mkdir()
    for number, name in enumerate("abc"):
        make_adapter(root / name, number)
    options = {
        "enable_lora": True,
        "max_cpu_loras": 8,
        "lora_modules": {"fixed": make_adapter(folder / "fixed", 9)},
        "runtime_lora_folder": str(root),
    }
    keys = folder / "keys"
    keys.write_text("operator admin\n")
    with (
        serve_demo(folder, 2, **options) as server,
        running_gateway("--triton", server.grpc_url, "--runtime-lora-keys", str(keys)) as gateway,
    ):
        yield World(server, gateway, root, folder / "fixed")


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", enable_lora=True)


@pytest.fixture(scope="module")
def expected(world: World, llm: LLM) -> Callable[[str], str]:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)

    def answer(name: str) -> str:
        lora = LoRARequest(name, 1, str(world.root / name))
        return llm.generate(QUESTIONS[0], params, lora)[0].outputs[0].text

    return answer


def test_adapters_are_models_of_the_gateway(world: World, expected: Callable[[str], str]) -> None:
    base = world.complete(MODEL)
    assert world.load("a", "a") == (200, "Success: LoRA adapter 'a' added successfully.")
    for _ in range(8):  # both front ends know it
        assert world.complete("a") == expected("a") != base
    shown = {card["id"]: card for card in world.gateway.get("/v1/models").json["data"]}
    assert list(shown) == [MODEL, "a", "fixed"]
    assert shown[MODEL]["parent"] is None and shown[MODEL]["root"] == MODEL
    assert shown["a"]["parent"] == MODEL and shown["a"]["root"] == "a"
    assert world.gateway.get("/v1/models/a").json == shown["a"]
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "model": "a"}
    paths = {
        "/v1/chat/completions": chat,
        "/v1/messages": chat,
        "/v1/responses": {"model": "a", "input": "Hello", "max_output_tokens": 4},
        "/v1/completions/render": {"model": "a", "prompt": "Hello"},
    }
    for path, body in paths.items():
        response = world.gateway.post(path, body)
        assert response.status == 200, response.body
        found = response.json[0] if isinstance(response.json, list) else response.json
        assert found["model"] == "a"
    response = world.gateway.post("/v1/completions", {"model": "x", "prompt": "Hello"})
    assert (response.status, response.error["code"]) == (404, "model_not_found")
    assert world.load("a", "b")[0] == 400
    assert world.load("a", "b", load_inplace=True)[0] == 200
    assert world.complete("a") == expected("b")
    assert world.unload("a") == (200, "Success: LoRA adapter 'a' removed successfully.")
    assert world.gateway.post("/v1/completions", {"model": "a", "prompt": "H"}).status == 404
    assert world.unload("a")[0] == 404


def test_an_unload_waits_for_requests_which_survive_an_engine(
    world: World, expected: Callable[[str], str]
) -> None:
    assert world.load("b", "b")[0] == 200
    before = restarts(world.server)
    ask = greedy(0, 1000)
    ask.params["lora_name"] = "b"
    with ThreadPoolExecutor() as pool:
        with Crowd(world.server, [ask] * 2) as crowd:
            wait_for(lambda: crowd.have_tokens(10), LOAD_TIMEOUT_S)
            unloading = pool.submit(world.unload, "b")
            wait_for(
                lambda: world.gateway.get("/v1/models/b").status == 404, 30, "it is still a model"
            )
            kill_engine(world.server)
            time.sleep(0.5)
            assert not unloading.done()
            assert all(not call.has_ended for call in crowd.calls)
        tokens = [call.token_ids[0] for call in crowd.calls]
        assert unloading.result(60)[0] == 200
    wait_loaded(world.server, before + 1)
    assert tokens[0] == tokens[1]
    assert world.load("b", "b")[0] == 200
    assert world.complete("b") == expected("b")
    assert world.unload("b")[0] == 200


def test_streams_of_adapters_and_beams_survive_their_engine(
    world: World, llm: LLM, expected: Callable[[str], str]
) -> None:
    """One adapter is there from the start, one is loaded, and one only the next engine uses."""
    assert world.load("a", "a")[0] == 200
    assert world.load("b", "b")[0] == 200
    folders = {"a": world.root / "a", "fixed": world.fixed}
    bases = [greedy(index, 100) for index in range(2)]
    beams = [
        Ask(QUESTIONS[2], {"beam_width": 4, "n": 3, "max_tokens": 100}),
        Ask(QUESTIONS[3], {"beam_width": 2, "max_tokens": 100, "lora_name": "fixed"}),
    ]
    asks = [*bases, *(with_adapter(base, name) for base in bases for name in folders), *beams]
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    loras = [LoRARequest(name, 2 + i, str(path)) for i, (name, path) in enumerate(folders.items())]
    outputs = llm.generate(
        [ask.prompt for ask in asks[:6]], params, lora_request=[None, None, *loras * 2]
    )
    wanted = [[tuple(output.outputs[0].token_ids)] for output in outputs]
    assert len({answer[0] for answer in wanted}) == 6  # each adapter changes each answer
    (searched,) = llm.beam_search([QUESTIONS[2]], BeamSearchParams(4, 100))
    answers = [call.token_ids for call in ask_all(world.server, asks)]
    assert answers[:6] == wanted
    found = [seq.tokens[-len(seq.logprobs) :] for seq in searched.sequences[:3]]
    assert answers[6] == [tuple(token_ids) for token_ids in found]
    before = restarts(world.server)
    with Crowd(world.server, asks) as crowd:
        wait_for(lambda: crowd.have_tokens(10), LOAD_TIMEOUT_S)
        kill_engine(world.server)
    assert [call.token_ids for call in crowd.calls] == answers
    wait_loaded(world.server, before + 1)
    assert world.complete("b") == expected("b")
    assert world.unload("b")[0] == 200
    wait_for(lambda: metrics(world.server)["kv_blocks_used"] == 0, LOAD_TIMEOUT_S)
    with Client(world.server.grpc_url, MODEL) as client:
        with pytest.raises(InvalidRequest, match=r"LoRA c is not supported.*\['fixed', 'a'\]"):
            client.generate("Hello", lora_name="c")
        with pytest.raises(InvalidRequest, match="beam_width"):
            client.generate("Hello", beam_width=9)
    assert world.unload("a")[0] == 200


def with_adapter(ask: Ask, name: str) -> Ask:
    return Ask(ask.prompt, {**ask.params, "lora_name": name})


def test_an_unload_under_load_gives_full_answers_or_clear_errors(
    world: World, expected: Callable[[str], str]
) -> None:
    """Two front ends get requests for an adapter that comes and goes, and leaves no folder."""
    body = {"model": "c", "prompt": QUESTIONS[0], "max_tokens": NUM_TOKENS, "temperature": 0}
    want, stop = expected("c"), Event()

    def ask() -> Counter[str]:
        seen: Counter[str] = Counter()
        while not stop.is_set():
            response = world.gateway.post("/v1/completions", {**body, "ignore_eos": True})
            if response.status == 200:
                assert response.json["choices"][0]["text"] == want
                seen["answers"] += 1
            else:
                assert response.status == 404, response.body
                seen["errors"] += 1
        return seen

    with ThreadPoolExecutor() as pool:
        asking = [pool.submit(ask) for _ in range(6)]
        for _ in range(4):
            assert world.load("c", "c")[0] == 200
            world.complete("c")
            assert world.unload("c")[0] == 200
            (world.root / "c").rename(world.root / "away")
            time.sleep(0.1)
            (world.root / "away").rename(world.root / "c")
        stop.set()
        seen = sum((future.result(60) for future in asking), Counter())
    assert seen["answers"] and seen["errors"]
    assert world.complete(MODEL)


def test_what_cannot_be_loaded_is_refused_alone(world: World, tmp_path: Path) -> None:
    root = world.root
    make_adapter(root / "rank", 1, rank=32)
    make_adapter(root / "shape", 1, r=3)
    make_adapter(root / "dora", 1, use_dora=True)
    make_adapter(root / "bias", 1, bias="all")
    make_adapter(root / "saved", 1, modules_to_save=["lm_head"])
    make_adapter(root / "other base", 1, target_modules=["c_attn"])
    make_adapter(root / "pickled", 1)
    (root / "pickled/adapter_model.safetensors").rename(root / "pickled/adapter_model.bin")
    (root / "link").symlink_to(make_adapter(tmp_path / "outside", 1))
    problems = {
        "rank": "r is 32 for .*at most max_lora_rank",
        "shape": "has the shape",
        "dora": "use_dora is not supported",
        "bias": "bias is not supported",
        "saved": "modules_to_save is not supported",
        "other base": "target_modules has .*c_attn",
        "pickled": "is pickled",
        "link": "is not inside of the folder of adapters",
        "../fixed": "is not inside of the folder of adapters",
        "/etc": "is not inside of the folder of adapters",
    }
    with Crowd(world.server, [greedy(1, 200)]) as crowd:
        for path, problem in problems.items():
            status, text = world.load("bad", path)
            assert status == 400 and re.search(problem, text), (path, text)
        assert world.load("bad", "missing")[0] == 404
        assert world.load("fixed", "a")[0] == 400
        assert world.unload("fixed")[0] == 400
        assert world.load(MODEL, "a")[0] == 400
        assert world.unload(MODEL)[0] == 404
        assert world.load("x" * 300, "a")[0] == 400
        assert world.load("x", "a", other=1)[0] == 400
        for path, body in ((LOAD, {"lora_name": "a", "lora_path": "a"}), (UNLOAD, {})):
            assert world.gateway.post(path, body).status == 401
    assert crowd.calls[0].error is None
    with Client(world.server.grpc_url, MODEL) as client:
        known = r"LoRA x is not supported, we currently support \['fixed'\]"
        with pytest.raises(InvalidRequest, match=known):
            client.generate("Hello", lora_name="x")
        with pytest.raises(InvalidRequest, match="lora_path: must be a string"):
            client.load_adapter("x", "")
        client.load_adapter("c", "c")
        assert dict(client.info().adapters)["c"] == "c"
        client.unload_adapter("c")


def test_the_gauge_names_the_adapters_in_use(world: World) -> None:
    name = r'paged_lora_requests_info\{.*max_lora="8".*running_lora_adapters="(.*?)"'

    def shown() -> list[str]:
        with urllib.request.urlopen(world.server.metrics_url) as page:
            return re.findall(name, page.read().decode())

    ask = greedy(0, 400)
    ask.params["lora_name"] = "fixed"
    with Crowd(world.server, [ask]) as crowd:
        wait_for(lambda: crowd.have_tokens(10), LOAD_TIMEOUT_S)
        wait_for(lambda: shown() == ["fixed"], 10, "the gauge does not name it")
    wait_for(lambda: shown() == [""], 10, "an old series is left")
