"""The Triton servers behind the gateway: their models and load, and which one gets a request."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

from paged_client import (
    AsyncClient,
    AsyncStream,
    Chunk,
    ClientError,
    Embedding,
    ModelInfo,
    Score,
    Unavailable,
    UnknownModel,
)
from paged_client.gateway.drain import GatewayDrain
from paged_client.gateway.metrics import GatewayMetrics
from paged_client.gateway.named_streams import Name, NamedStreams
from paged_client.gateway.served_names import ServedModel, ServedNames
from paged_client.routing import (
    PrefixRouter,
    RoutedPrompt,
    RoutingHints,
    prefix_hashes,
    session_hash,
)

REFRESH_S = 5.0  # between queries for each server's models
MIN_REFRESH_S = 1.0  # unknown model names do not cause more frequent queries
FIRST_BACKOFF_S = 0.5  # without requests to a server that was unavailable; doubles
MAX_BACKOFF_S = 5.0
PROBE_TIMEOUT_S = 5.0
ATTEMPTS = 2  # a request to an unavailable server is retried on one other
_REFUSALS = {"queue_full", "rate_limited", "process_lost"}  # from a healthy server

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BackendRequest:
    """A request to one of the servers: a prompt and its parameters."""

    model: ServedModel
    prompt: RoutedPrompt
    params: Mapping[str, Any] = field(default_factory=dict)
    add_special_tokens: bool = True
    whole: bool = False
    parsed: bool = False  # reasoning and tool calls apart from the text
    name: Name | None = None  # by which it can be aborted
    hints: RoutingHints = RoutingHints()


class Backend:
    """One server and its state as known to this gateway."""

    def __init__(self, address: str, timeout_s: float | None) -> None:
        self.address = address
        self.models: frozenset[str] = frozenset()
        self.adapters: dict[str, dict[str, str]] = {}  # model -> adapter -> its folder
        self._without_adapters: set[str] = set()
        self.num_open = 0
        self.is_up = True  # as of the last contact
        self._timeout_s = timeout_s
        self._clients: dict[str, AsyncClient] = {}
        self._backoff_s = FIRST_BACKOFF_S
        self._rests_until = 0.0

    def client(self, model: str) -> AsyncClient:
        """Return the client of one of the server's models; all clients share a connection."""
        if model not in self._clients:
            self._clients[model] = AsyncClient(self.address, model, self._timeout_s)
        return self._clients[model]

    @property
    def is_available(self) -> bool:
        """True unless the server is in its backoff period."""
        return time.monotonic() >= self._rests_until

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Count a request as open, and record whether the server was available."""
        self.num_open += 1
        try:
            yield
            self.is_up = True
            self._backoff_s = FIRST_BACKOFF_S
        except Unavailable as error:
            if error.reason not in _REFUSALS:
                self._rest()
            raise
        finally:
            self.num_open -= 1

    async def refresh(self) -> None:
        """Query the server's models; an unavailable server keeps its last known models."""
        try:
            self.models = frozenset(await self.client("").models())
            self.is_up = True
        except ClientError:
            self._rest()
        else:
            self._without_adapters &= self.models
            for model in self.models - self._without_adapters:
                await self.refresh_adapters(model)

    async def refresh_adapters(self, model: str) -> None:
        """Query the adapters of a model; they stay as they are if it does not answer."""
        with contextlib.suppress(ClientError, TimeoutError):
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                info = await self.client(model).info()
            self.adapters[model] = dict(info.adapters)
            if not info.max_loras:
                self._without_adapters.add(model)

    def serves(self, model: ServedModel) -> bool:
        """Return True if the server has the model, and its adapter if it has one."""
        adapters = self.adapters.get(model.name, {})
        return model.name in self.models and (not model.adapter or model.adapter in adapters)

    async def is_ready(self) -> bool:
        """Return True if any of the server's models answers.

        tritonserver's own readiness is not enough: it reports a model with a dead engine as ready.
        """
        for model in self.models:
            with contextlib.suppress(ClientError, TimeoutError):
                async with asyncio.timeout(PROBE_TIMEOUT_S):
                    await self.client(model).info()
                    return True
        return False

    async def aclose(self) -> None:
        """Cancel open requests and close the connection."""
        for client in self._clients.values():
            await client.aclose()

    def _rest(self) -> None:
        self.is_up = False
        self._rests_until = time.monotonic() + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)


class BackendPool:
    """All servers. Must be created and used inside one event loop."""

    def __init__(
        self,
        addresses: Sequence[str],
        metrics: GatewayMetrics,
        drain: GatewayDrain,
        timeout_s: float | None = None,
        names: ServedNames | None = None,
    ) -> None:
        self._drain = drain
        self._names = names or ServedNames({})
        self._backends = {address: Backend(address, timeout_s) for address in addresses}
        self._metrics = metrics
        self._router = PrefixRouter()
        self._named = NamedStreams()
        self._refreshed_at = -MIN_REFRESH_S
        self._refreshing = asyncio.Lock()
        for backend in self._backends.values():
            metrics.watch(backend)

    async def __aenter__(self) -> Self:
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._watcher.cancel()
        for backend in self._backends.values():
            await backend.aclose()

    async def models(self) -> list[ServedModel]:
        """Return all models that are served now, each name that clients are shown, and adapters."""
        await self._refresh()
        named = self._names.shown(self._known_models())
        adapters = {
            name: ServedModel(model, name, name)
            for model in self._known_models()
            for name in sorted(self._adapters(model))
            if name not in named
        }
        return [ServedModel(model, name) for name, model in named.items()] + [*adapters.values()]

    def first_name(self, model: str) -> str:
        """Return the first name that clients are shown for a model of the servers."""
        return self._names.first(model, self._known_models())

    def folder(self, model: ServedModel) -> str:
        """Return the folder of an adapter."""
        return self._adapters(model.name).get(model.adapter, "")

    async def resolve(self, model: str | None) -> ServedModel:
        """Return the model or adapter that a client names, or the only model.

        Raises:
            UnknownModel: no server has it, or there is no name and not exactly one model.
            Unavailable: no model is known and no server is available.
        """
        if model is None or self._find(model) is None:
            await self._refresh()
        known = self._known_models()
        if not known and not any(backend.is_up for backend in self._backends.values()):
            raise Unavailable("no server is there")
        if model is None and len(known) == 1:
            return ServedModel(known[0], self.first_name(known[0]))
        shown = ", ".join(sorted(self._names.shown(known)))
        if model is None:
            raise UnknownModel(f"model: is missing; known: {shown}")
        found = self._find(model)
        if found is None:
            raise UnknownModel(f"model: {model[:64]!a} is not known; known: {shown}")
        return found

    async def load_adapter(
        self, model: ServedModel, name: str, path: str, *, in_place: bool
    ) -> None:
        """Load an adapter on all servers of a model.

        Raises:
            ClientError: a server cannot. The others unload it again, unless it was ``in_place``.
        """
        failed, done = await self._change_adapters(
            self._with_model(model.name),
            model.name,
            lambda client: client.load_adapter(name, path, in_place=in_place),
        )
        if failed:
            if not in_place:
                await self._change_adapters(done, model.name, lambda c: c.unload_adapter(name))
            raise failed[0]

    async def unload_adapter(self, model: ServedModel) -> None:
        """Unload an adapter on all servers that have it, when its requests have ended.

        Raises:
            ClientError: a server cannot; others may have unloaded it.
        """
        backends = [b for b in self._backends.values() if b.serves(model)]
        for backend in backends:
            del backend.adapters[model.name][model.adapter]  # no more requests are sent to it
        failed, _ = await self._change_adapters(
            backends, model.name, lambda client: client.unload_adapter(model.adapter)
        )
        if failed:
            raise failed[0]

    async def _change_adapters(
        self,
        backends: Sequence[Backend],
        model: str,
        change: Callable[[AsyncClient], Awaitable[None]],
    ) -> tuple[list[BaseException], list[Backend]]:
        """Change the adapters of a model; returns the errors, and the servers without any."""
        results = await asyncio.gather(
            *(change(backend.client(model)) for backend in backends), return_exceptions=True
        )
        for backend in backends:
            await backend.refresh_adapters(model)
        return (
            [result for result in results if result is not None],
            [b for b, result in zip(backends, results, strict=True) if result is None],
        )

    async def info(self, model: ServedModel) -> ModelInfo:
        """Return a model's properties."""
        return await self.ask(model, lambda client: client.info())

    async def is_ready(self) -> bool:
        """Return True if any model of any server answers."""
        ready = await asyncio.gather(*(backend.is_ready() for backend in self._backends.values()))
        return any(ready)

    async def ask(self, model: ServedModel, question: Callable[[AsyncClient], Awaitable[T]]) -> T:
        """Return the result of ``question`` from one of the model's servers."""
        error = self._nobody(model)
        for backend in self._attempts(replace(model, adapter=""), ()):
            try:
                with backend.in_use():
                    return await question(backend.client(model.name))
            except Unavailable as caught:
                error = caught
                if caught.reason == "rate_limited":
                    break
        raise error

    async def stream(self, request: BackendRequest) -> AsyncGenerator[Chunk, None]:
        """Yield a request's chunks; closing the generator cancels the request on the server."""
        error = self._nobody(request.model)
        for backend in self._attempts(request.model, _hashes(request), request.hints.source):
            has_begun = False
            try:
                with backend.in_use():
                    stream = backend.client(request.model.name).stream(
                        request.prompt,
                        add_special_tokens=request.add_special_tokens,
                        whole=request.whole,
                        parsed=request.parsed,
                        **request.params,
                        **request.model.params,
                    )
                    with self._drain.watching(stream), self._named.watching(request.name, stream):
                        async with stream:
                            async for chunk in stream:
                                has_begun = True
                                yield chunk
                return
            except Unavailable as caught:
                error = caught
                if has_begun or caught.reason == "rate_limited":
                    break
        raise error

    def abort(self, name: Name) -> None:
        """Begin to end the requests of a name; their streams end with the tokens so far."""
        self._named.abort(name)

    async def embed(self, request: BackendRequest) -> Embedding:
        """Return the embedding of a request's prompt."""
        return await self._only_response(
            request,
            lambda client: client.stream_embedding(
                request.prompt, add_special_tokens=request.add_special_tokens, **request.params
            ),
        )

    async def score(self, request: BackendRequest, text_pair: str) -> Score:
        """Return the score of a request's prompt, which is a text, and another text."""
        return await self._only_response(
            request,
            lambda client: client.stream_score(str(request.prompt), text_pair, **request.params),
        )

    async def _only_response(
        self, request: BackendRequest, send: Callable[[AsyncClient], AsyncStream[T]]
    ) -> T:
        error = self._nobody(request.model)
        for backend in self._attempts(request.model, _hashes(request), request.hints.source):
            try:
                with backend.in_use():
                    stream = send(backend.client(request.model.name))
                    with self._drain.watching(stream):
                        async with stream:
                            (response,) = [item async for item in stream]
                            return response
            except Unavailable as caught:
                error = caught
                if caught.reason == "rate_limited":
                    break
        raise error

    def _attempts(
        self, model: ServedModel, hashes: Sequence[bytes], source: str = ""
    ) -> Iterator[Backend]:
        """Yield the chosen server, then another one for callers that found it unavailable."""
        left = {b.address: b for b in self._backends.values() if b.serves(model)}
        for attempt in range(ATTEMPTS):
            # If all of them are in backoff, one must be tried anyway.
            awake = {name: b for name, b in left.items() if b.is_available} or left
            if not awake:
                return
            loads = {name: b.num_open for name, b in awake.items()}
            choice = self._router.choose(hashes, loads, _server_at(source, awake))
            self._metrics.routed(choice, is_retry=attempt > 0)
            yield left.pop(choice.server)

    def _nobody(self, model: ServedModel) -> ClientError:
        """Return the error of a request that no server can get."""
        if model.adapter and self._with_model(model.name):
            return UnknownModel(f"model: {model.shown!a} is not known: it was unloaded")
        return Unavailable(f"no server has {model.shown!a} now")

    def _with_model(self, model: str) -> list[Backend]:
        return [backend for backend in self._backends.values() if model in backend.models]

    def _known_models(self) -> list[str]:
        return sorted(frozenset().union(*(b.models for b in self._backends.values())))

    def _adapters(self, model: str) -> dict[str, str]:
        """Return the folders of the adapters that any server has of a model, by their names."""
        found: dict[str, str] = {}
        for backend in self._with_model(model):
            found |= backend.adapters.get(model, {})
        return found

    def _find(self, name: str) -> ServedModel | None:
        """Return the model, or else the adapter, of a name."""
        known = self._known_models()
        model = self._names.model(name, known)
        if model is not None:
            return ServedModel(model, self.first_name(model))
        owner = next((model for model in known if name in self._adapters(model)), None)
        return None if owner is None else ServedModel(owner, name, name)

    async def _refresh(self) -> None:
        async with self._refreshing:
            if time.monotonic() < self._refreshed_at + MIN_REFRESH_S:
                return
            await asyncio.gather(*(backend.refresh() for backend in self._backends.values()))
            self._refreshed_at = time.monotonic()

    async def _watch(self) -> None:
        while True:
            await self._refresh()
            await asyncio.sleep(REFRESH_S)


def _hashes(request: BackendRequest) -> list[bytes]:
    """Return the hashes of a prompt's pieces, and of the session, which counts most."""
    salt = request.params.get("cache_salt", "")
    name, session = request.model.adapter or request.model.name, request.hints.session
    hashes = prefix_hashes(name, salt, request.prompt)
    return [*hashes, session_hash(name, session)] if session else hashes


def _server_at(source: str, addresses: Collection[str]) -> str | None:
    """Return the server with an address, or the only one on the same host, if there is one."""
    if source in addresses:
        return source
    host = source.rpartition(":")[0]
    there = [address for address in addresses if host and address.rpartition(":")[0] == host]
    return there[0] if len(there) == 1 else None
