"""The gateway's knowledge of adapters, with servers that only exist here."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from paged_client import InvalidRequest, ModelInfo, Unavailable, UnknownModel
from paged_client.gateway import backend_pool
from paged_client.gateway.auth import ApiKey, RequireApiKey
from paged_client.gateway.backend_pool import Backend, BackendPool, BackendRequest
from paged_client.gateway.drain import GatewayDrain
from paged_client.gateway.errors import ApiError
from paged_client.gateway.metrics import GatewayMetrics
from paged_client.gateway.served_names import ServedModel, ServedNames


class Client:
    """A server with one model, which may refuse an adapter."""

    adapters: dict[str, dict[str, str]] = {}  # noqa: RUF012  # address -> adapters
    refused: set[str] = set()  # noqa: RUF012

    def __init__(self, address: str, model: str, timeout: float | None) -> None:
        self._address = address

    async def models(self) -> tuple[str, ...]:
        return ("llm",)

    async def info(self) -> ModelInfo:
        adapters = dict(self.adapters[self._address])
        return ModelInfo(64, 32, has_chat_template=False, max_loras=4, adapters=adapters)

    async def load_adapter(self, name: str, path: str, *, in_place: bool) -> None:
        if self._address in self.refused:
            raise InvalidRequest("lora_path: no")
        self.adapters[self._address][name] = path

    async def unload_adapter(self, name: str) -> None:
        del self.adapters[self._address][name]

    async def aclose(self) -> None:
        pass


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> BackendPool:
    monkeypatch.setattr(backend_pool, "AsyncClient", Client)
    monkeypatch.setattr(backend_pool, "MIN_REFRESH_S", 0.0)
    monkeypatch.setattr(
        Client, "adapters", {"a:1": {"both": "/x", "one": "/y"}, "b:1": {"both": "/x"}}
    )
    monkeypatch.setattr(Client, "refused", set())
    names = ServedNames({"org/llm": "llm"})
    return BackendPool(["a:1", "b:1"], GatewayMetrics(), GatewayDrain(), names=names)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def chosen(pool: BackendPool, model: ServedModel) -> set[str]:
    return {found.address for found in pool._attempts(model, ())}


def test_a_request_goes_to_a_server_with_its_adapter(pool: BackendPool) -> None:
    one = run(pool.resolve("one"))
    assert one == ServedModel("llm", "one", "one") and one.params == {"lora_name": "one"}
    assert chosen(pool, one) == {"a:1"}
    assert chosen(pool, run(pool.resolve("both"))) == {"a:1", "b:1"}
    assert chosen(pool, run(pool.resolve(None))) == {"a:1", "b:1"}
    assert [m.shown for m in run(pool.models())] == ["org/llm", "both", "one"]
    with pytest.raises(UnknownModel, match="'other' is not known"):
        run(pool.resolve("other"))


def test_a_load_that_one_server_refuses_changes_none(pool: BackendPool) -> None:
    base = run(pool.resolve("llm"))
    Client.refused.add("b:1")
    with pytest.raises(InvalidRequest, match="lora_path: no"):
        run(pool.load_adapter(base, "new", "/z", in_place=False))
    assert "new" not in Client.adapters["a:1"]
    Client.refused.clear()
    run(pool.load_adapter(base, "new", "/z", in_place=False))
    new = run(pool.resolve("new"))
    assert chosen(pool, new) == {"a:1", "b:1"} and pool.folder(new) == "/z"
    run(pool.unload_adapter(new))
    assert not any("new" in adapters for adapters in Client.adapters.values())
    with pytest.raises(UnknownModel):
        run(pool.resolve("new"))


def test_a_model_counts_more_than_an_adapter_of_its_name(pool: BackendPool) -> None:
    Client.adapters["a:1"]["llm"] = "/z"
    run(pool.models())
    assert run(pool.resolve("llm")) == ServedModel("llm", "org/llm")
    assert [m.shown for m in run(pool.models())] == ["org/llm", "both", "llm", "one"]


def test_models_without_adapters_are_not_asked_again(pool: BackendPool) -> None:
    backend: Backend = next(iter(pool._backends.values()))

    async def info(self: Client) -> ModelInfo:
        nonlocal asked
        asked += 1
        return ModelInfo(64, 32, has_chat_template=False)

    asked = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Client, "info", info)
        for _ in range(3):
            run(backend.refresh())
    assert asked == 1


def test_a_request_that_an_unload_overtakes_is_for_an_unknown_model(pool: BackendPool) -> None:
    """It has found the adapter, and waits until its prompt is there."""
    one, base = run(pool.resolve("one")), run(pool.resolve("llm"))
    run(pool.unload_adapter(one))

    async def send(model: ServedModel) -> None:
        async for _ in pool.stream(BackendRequest(model, "a prompt")):
            pass

    with pytest.raises(UnknownModel, match="model: 'one' is not known: it was unloaded"):
        run(send(one))
    for backend in pool._backends.values():
        backend.models = frozenset()
    for model in (one, base):
        with pytest.raises(Unavailable, match="no server has"):
            run(send(model))


@pytest.mark.parametrize(
    "problem", [", we currently support ['a']", ": it was unloaded before the request began"]
)
def test_an_adapter_that_has_gone_is_an_unknown_model(problem: str) -> None:
    found = ApiError.from_client(InvalidRequest(f"LoRA x is not supported{problem}"))
    assert (found.status, found.body["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("path", "key", "passes"),
    [
        ("/v1/load", "admin", True),
        ("/v1/load", "user", False),
        ("/v1/load", None, False),
        ("/v1/completions", "user", True),
        ("/v1/completions", "admin", False),
    ],
)
def test_a_path_can_have_keys_of_its_own(path: str, key: str | None, passes: bool) -> None:
    reached = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["path"])

    async def send(message: Any) -> None:
        pass

    admins = {"/v1/load": [ApiKey("admin", "operator")]}
    keyed = RequireApiKey(app, [ApiKey("user", "tenant")], admins)
    headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
    scope = {"type": "http", "path": path, "raw_path": path.encode(), "headers": headers}
    asyncio.run(keyed(scope, send, send))  # type: ignore[arg-type]
    assert bool(reached) == passes
    open_app = RequireApiKey(app, (), admins)
    asyncio.run(open_app({**scope, "path": "/v1/models", "headers": []}, send, send))  # type: ignore[arg-type]
    assert reached[-1] == "/v1/models"
