"""Shared implementation of the endpoints over HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Any

import aiohttp

from paged_loadtest.destination import PROBE_TIMEOUT_S
from paged_loadtest.endpoints.endpoint import Endpoint
from paged_loadtest.options import TargetOptions
from paged_loadtest.protocols.decoding import EventDecoder, describe_refusal
from paged_loadtest.timeline import Timeline

_KEEP_ALIVE_S = 4.0  # below the 5 s after which uvicorn closes an idle connection
_JSON = {"Content-Type": "application/json"}


class HttpEndpoint(Endpoint):
    """Streams each response over its own connection, without a limit on connections."""

    def __init__(self, target: TargetOptions, headers: Mapping[str, str]) -> None:
        super().__init__(target)
        self._session = aiohttp.ClientSession(
            target.address,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=target.request_timeout),
            headers={**_JSON, **headers},
        )

    async def aclose(self) -> None:
        await self._session.close()

    async def _stream(self, path: str, body: bytes, decoder_type: type[EventDecoder]) -> Timeline:
        """Post a body and decode the events of the response."""
        timeline = Timeline(perf_counter())
        decoder = decoder_type(timeline)
        try:
            async with self._session.post(path, data=body) as response:
                if response.status != 200:
                    decoder.fail(describe_refusal(response.status, await response.read()))
                async for data in response.content.iter_any():
                    decoder.feed(data, perf_counter())
        except TimeoutError:
            decoder.fail(f"no answer in {self._target.request_timeout:g} s")
        except (aiohttp.ClientError, OSError) as error:
            decoder.fail(_reason(error))
        decoder.finish()
        return timeline

    async def _ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Return the status and the JSON of a short response (None if the body is not JSON).

        Raises:
            ConfigError: the server does not answer.
        """
        timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
        try:
            async with self._session.request(method, path, json=body, timeout=timeout) as reply:
                try:
                    return reply.status, await reply.json(content_type=None)
                except ValueError:
                    return reply.status, None
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise self._destination.unreachable(_reason(error)) from error


def _reason(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return str(error.os_error)  # the text of `error` itself starts with TLS details
    if isinstance(error, aiohttp.ClientResponseError):
        return "what answers is not HTTP"
    return str(error) or "no answer"
