"""Reporting: the log, the metrics and the inspection."""

from __future__ import annotations

import re
from dataclasses import dataclass

from paged_backend.values.errors import option_error
from paged_backend.values.log import LEVELS
from paged_backend.values.validation import Rule, checked, shorten

_METRICS_PREFIX = re.compile(r"[A-Za-z_:][A-Za-z0-9_:]{0,63}")


@dataclass(frozen=True, kw_only=True)
class ReportingOptions:
    """See :class:`paged_backend.values.config.EngineConfig`."""

    enable_inspect: bool = checked(
        False,
        Rule(bool),
        "answer the task `inspect`, which shows the sequences and blocks of all clients, for "
        "`paged-backend top`; each answer takes time of the engine",
    )
    log_level: str = checked(
        "info",
        Rule(str, choices=LEVELS),
        "least important level that is logged; debug adds a line for each canceled request",
    )
    metrics_prefix: str = checked(
        "paged_", Rule(str), "prefix of the metrics' names; vLLM's is vllm:"
    )

    def check_reporting(self) -> None:
        """Check what a `Rule` cannot express.

        Raises:
            ConfigError: ``metrics_prefix`` cannot begin the name of a metric.
        """
        if not _METRICS_PREFIX.fullmatch(self.metrics_prefix):
            raise option_error(
                "metrics_prefix",
                "must have up to 64 letters, digits, '_' and ':', not a digit first, "
                f"got {shorten(self.metrics_prefix)}",
            )
