"""Options of ``paged-backend top``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from paged_backend.values.errors import option_error
from paged_backend.values.validation import Rule, check_fields, checked, shorten

METRICS_PORT = 8002  # Triton's
_ADDRESS = re.compile(r"[^/\s]+:\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class TopOptions:
    """Options of ``paged-backend top``.

    Raises:
        ConfigError: an option has the wrong type or lies outside its range.
    """

    url: str = checked("127.0.0.1:8001", Rule(str), "the server's gRPC address")
    metrics_url: str | None = checked(
        None,
        Rule(str, optional=True),
        f"the server's metrics page; default: http://HOST:{METRICS_PORT}/metrics of the same host",
    )
    model: str = checked("paged_llm", Rule(str), "served model name")
    interval: float = checked(1.0, Rule(float, 0.1, 60), "seconds from one look to the next")

    def __post_init__(self) -> None:
        check_fields(self, option_error)
        if not _ADDRESS.fullmatch(self.url):
            raise option_error(
                "url", f"must be host:port of a gRPC endpoint, got {shorten(self.url)}"
            )

    @property
    def metrics_page(self) -> str:
        """The URL of the metrics page."""
        if self.metrics_url is not None:
            return self.metrics_url
        return f"http://{self.url.rpartition(':')[0]}:{METRICS_PORT}/metrics"
