"""Queries a server for its metrics and its blocks."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Self

from paged_client import Client, ClientError, EngineView, InvalidRequest

from paged_backend.tools.scrape import Scrape, scrape
from paged_backend.tools.top.options import TopOptions

TIMEOUT_S = 2.0
INSPECT_IS_OFF = (
    "The server does not show its blocks: start it with --enable-inspect "
    '("enable_inspect": true in model.json).'
)


@dataclass(frozen=True, slots=True)
class Reading:
    """One reading of a server; if its blocks are missing, ``why_no_view`` says why."""

    at_s: float  # on the monotonic clock
    scrape: Scrape
    view: EngineView | None
    why_no_view: str = ""


class Source:
    """Reads the state of one model on one server."""

    def __init__(self, options: TopOptions) -> None:
        self._options = options
        self._client = Client(options.url, options.model, timeout=TIMEOUT_S)

    def read(self) -> Reading:
        """Query the server once; this takes a few seconds at most.

        Raises:
            ConfigError: the metrics cannot be read.
        """
        page = scrape(self._options.metrics_page, self._options.model, TIMEOUT_S)
        at_s = time.monotonic()
        try:
            return Reading(at_s, page, self._client.inspect())
        except InvalidRequest as error:
            is_off = str(error).startswith("task:")  # older servers do not know the task
            return Reading(at_s, page, None, INSPECT_IS_OFF if is_off else str(error))
        except ClientError as error:
            where = self._options.url
            return Reading(at_s, page, None, f"Cannot ask for the blocks at {where}: {error}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._client.close()
