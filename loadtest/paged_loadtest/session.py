"""Runs a bench and saves its report, even if the bench fails or is interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from paged_backend.tools.machine import circumstances
from paged_backend.values.errors import ConfigError, PagedError
from paged_loadtest.bench import ServerBench
from paged_loadtest.options import TargetOptions
from paged_loadtest.report import make_console
from paged_loadtest.results import Report, Run
from paged_loadtest.slo import Slo

INTERRUPTED = 130

_PACKAGES = ("numpy", "tritonclient", "grpcio", "aiohttp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Settings common to all benches of a server."""

    target: TargetOptions
    slos: Sequence[Slo] = ()
    metrics_url: str | None = None
    save: Path | None = None
    console: Console = field(default_factory=make_console)

    def run(
        self,
        kind: str,
        config: Mapping[str, Any],
        steps: Callable[[ServerBench], Awaitable[None]],
        show: Callable[[Sequence[Run]], None],
    ) -> int:
        """Run the steps, show and save their runs even if they end early; return the exit status.

        The report is saved after each run, so that a killed sweep keeps its completed levels.

        Raises:
            PagedError: the error that ended the steps, or the report cannot be saved.
        """
        self._check_file()

        def save() -> None:
            with contextlib.suppress(OSError):  # the final save reports the error
                self._save(kind, config, bench)

        bench = ServerBench(self.target, self.slos, self.metrics_url, on_run=save)
        failure: PagedError | None = None
        status = 0
        try:
            asyncio.run(_take(bench, steps))
        except KeyboardInterrupt:
            status = INTERRUPTED
        except PagedError as error:
            failure = error
        if bench.runs:
            show(bench.runs)
            self._finish(kind, config, bench)
        if failure is not None:
            raise failure
        return status

    def _check_file(self) -> None:
        """Fail before measuring if the report cannot be written, not after an hour of results."""
        if self.save is None:
            return
        folder = self.save.absolute().parent
        if not folder.is_dir():
            raise ConfigError(f"--save: there is no folder {folder}; make it")
        if self.save.is_dir() or not os.access(folder, os.W_OK):
            raise ConfigError(f"--save: cannot write {self.save}; name a file in a folder of yours")

    def _finish(self, kind: str, config: Mapping[str, Any], bench: ServerBench) -> None:
        try:
            self._save(kind, config, bench)
        except OSError as error:
            raise ConfigError(f"--save: cannot write {self.save}: {error.strerror}") from error
        if self.save is not None:
            self.console.print(f"Saved to {self.save}", soft_wrap=True, highlight=False)

    def _save(self, kind: str, config: Mapping[str, Any], bench: ServerBench) -> None:
        if self.save is None:
            return
        everything = {
            **asdict(self.target),
            "base_url": self.target.address,
            "slo": [f"{slo.name}:{slo.limit_ms:g}" for slo in self.slos],
            "metrics_url": self.metrics_url,
            **config,
        }
        environment = {"server": bench.facts.server, **circumstances(_PACKAGES)}
        Report(kind, everything, environment, bench.runs).save(self.save)


async def _take(bench: ServerBench, steps: Callable[[ServerBench], Awaitable[None]]) -> None:
    async with bench:
        await steps(bench)
