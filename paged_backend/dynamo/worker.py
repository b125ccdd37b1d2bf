"""The engine as Dynamo sees it: its Python interface ``LLMEngine``, for a worker process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dynamo.common.backend import EngineConfig as Registration
from dynamo.common.backend import LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.publisher import ComponentSnapshot, ZmqSource
from dynamo.common.backend.run import run as run_worker
from dynamo.common.utils.namespace import get_worker_namespace
from dynamo.common.utils.token_ids import normalize_request_token_ids
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument, Unknown

from paged_backend.dynamo.options import WorkerOptions, check_tokenizer
from paged_backend.dynamo.requests import Chunk, RequestReader, is_slow, read_chunk
from paged_backend.dynamo.streams import TokenStream, TokenStreams
from paged_backend.grammar.client import GrammarChecker
from paged_backend.process import wire
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import (
    ConfigError,
    EngineDead,
    InvalidRequest,
    PagedError,
    RequestRefused,
)
from paged_backend.values.lora import numbered
from paged_backend.values.outputs import EngineStats
from paged_backend.values.request import Request

_ANY_HOST = ("tcp://*:", "tcp://0.0.0.0:")


class PagedEngine(LLMEngine):
    """Answers Dynamo's requests with the engine's process.

    Args:
        streams: the open requests, of an engine that has started.
        ready: what the engine has loaded.
        stats: the engine's first counts.
        config: options of the engine.
        served_model_name: what clients call the model.
    """

    def __init__(
        self,
        streams: TokenStreams,
        ready: wire.EngineReady,
        stats: EngineStats,
        config: EngineConfig,
        served_model_name: str,
    ) -> None:
        grammars = GrammarChecker(ready.tokenizer, ready.limits.vocab_size)
        self._reader = RequestReader(
            ready.limits, ready.sampling_defaults, grammars, numbered(config.lora_modules or {})
        )
        self._streams = streams
        self._ready = ready
        self._stats = stats
        self._config = config
        self._served_model_name = served_model_name
        self._by_context: dict[str, TokenStream] = {}

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[PagedEngine, WorkerConfig]:
        """Not used: ``paged-backend dynamo`` reads the options, and starts the engine first."""
        raise NotImplementedError("start this worker with: paged-backend dynamo MODEL")

    async def start(self, worker_id: int) -> Registration:
        """Return what Dynamo registers."""
        limits, stats = self._ready.limits, self._stats
        return Registration(
            model=self._ready.tokenizer,
            served_model_name=self._served_model_name,
            llm=LlmRegistration(
                context_length=limits.max_model_len,
                kv_cache_block_size=stats.block_size,
                total_kv_blocks=stats.num_blocks,
                max_num_seqs=limits.max_num_seqs,
                max_num_batched_tokens=self._config.max_num_batched_tokens,
            ),
        )

    async def generate(self, request: dict[str, Any], context: Any) -> AsyncGenerator[Chunk, None]:
        """Yield the tokens of one request.

        Raises:
            DynamoException: the request is not allowed, or it cannot be answered by this worker.
        """
        with _translated_errors():
            stream = self._streams.open(await self._read(request))
            self._by_context[context.id()] = stream
            try:
                async for output in stream.outputs():
                    num_tokens = stream.num_tokens[output.index]
                    yield read_chunk(output, len(stream.request.prompt_token_ids), num_tokens)
            finally:
                del self._by_context[context.id()]
                self._streams.close(stream)

    async def _read(self, request: dict[str, Any]) -> Request:
        normalize_request_token_ids(request)
        request_id = self._streams.new_id()
        if is_slow(request):
            return await asyncio.to_thread(self._reader.read, request_id, request)
        return self._reader.read(request_id, request)

    async def abort(self, context: Any) -> None:
        """End a request that its client has canceled."""
        if (stream := self._by_context.get(context.id())) is not None:
            self._streams.close(stream)

    async def cleanup(self) -> None:
        """Let open streams end, within ``drain_timeout_s``, and end the engine."""
        await self._streams.stop(self._config.drain_timeout_s)

    async def kv_event_sources(self) -> list[ZmqSource]:
        """Return where the engine publishes the events of its KV cache, if it does."""
        events = self._config.kv_events()
        if not events.is_on:
            return []
        endpoint = events.endpoint
        for prefix in _ANY_HOST:
            if endpoint.startswith(prefix):
                endpoint = f"tcp://127.0.0.1:{endpoint.removeprefix(prefix)}"
        return [ZmqSource(endpoint=endpoint, topic=events.topic)]

    def component_metrics_dp_ranks(self) -> list[int]:
        """Return the only data-parallel rank."""
        return [0]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        """Publish the use of the KV cache from now on, which routers compare."""

        def publish(stats: EngineStats) -> None:
            usage = ComponentSnapshot(stats.num_used_blocks, stats.num_blocks, stats.kv_usage, 0)
            publisher.publish(0, usage)

        publish(self._stats)
        self._streams.on_stats = publish

    async def health_check_payload(self) -> dict[str, Any]:
        """Return a request of one token, which any model can answer."""
        payload: dict[str, Any] = build_health_check_payload(bos_token_id=0)
        return payload


def run(config: EngineConfig, options: WorkerOptions) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        config: options of the engine.
        options: options of the worker.

    Raises:
        ConfigError: the engine cannot be started with these options, or Dynamo cannot serve it.
    """

    # The engine starts before Dynamo's runtime, which would wrap its errors.
    async def start(argv: list[str] | None) -> tuple[PagedEngine, WorkerConfig]:
        streams = TokenStreams(config, Path(config.model).name)
        ready, stats = await streams.start()
        _check(ready)
        given = options.given(os.environ)
        name = given.pop("served_model_name", config.model)
        engine = PagedEngine(streams, ready, stats, config, name)
        return engine, _worker_config(given, name, ready)

    run_worker(PagedEngine, engine_factory=start)


def _check(ready: wire.EngineReady) -> None:
    try:
        ready.limits.check_generates()
    except InvalidRequest as error:
        raise ConfigError(f"a Dynamo worker generates tokens: {error}") from None
    check_tokenizer(Path(ready.tokenizer))


def _worker_config(given: dict[str, str], name: str, ready: wire.EngineReady) -> WorkerConfig:
    given = {option.removeprefix("dyn_"): value for option, value in given.items()}
    namespace = get_worker_namespace(given.pop("namespace", None))
    return WorkerConfig(namespace, model_name=ready.tokenizer, served_model_name=name, **given)


@contextmanager
def _translated_errors() -> Iterator[None]:
    """Raise Dynamo's error for each of ours.

    Dynamo's frontend sends a request to another worker if its own shuts down, which is also what a
    worker with a full queue says.
    """
    try:
        yield
    except InvalidRequest as error:
        raise InvalidArgument(str(error)) from error
    except (RequestRefused, EngineDead) as error:
        raise EngineShutdown(str(error)) from error
    except PagedError as error:  # another worker might die of the request, too
        raise Unknown(str(error)) from error
