"""The threads, the cores and the precision of float32 products of an engine on a CPU."""

from __future__ import annotations

import re
from dataclasses import dataclass

from paged_backend.values.errors import option_error
from paged_backend.values.validation import Rule, checked, shorten

HIGHEST, HIGH = "highest", "high"
_CORES = re.compile(r"\d{1,4}(?:-\d{1,4})?(?:,\d{1,4}(?:-\d{1,4})?)*", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class CpuOptions:
    """See :class:`paged_backend.values.config.EngineConfig`."""

    cpu_threads: int | None = checked(
        None,
        Rule(int, 1, 1024, optional=True),
        "threads that compute on a CPU; default: the number of cpu_cores, or of physical cores",
    )
    cpu_cores: str | None = checked(
        None,
        Rule(str, max_length=1000, optional=True),
        "cores that these threads may use, such as 0-7,16-23 (Linux only); default: all",
    )
    float32_matmul_precision: str = checked(
        HIGHEST,
        Rule(str, choices=(HIGHEST, HIGH)),
        "as in torch: high computes the linear layers of a float32 model on AMX units, with 16 of "
        "24 bits of each number; prompts and embeddings take two thirds of the time",
    )

    def check_cpu(self) -> None:
        """Check what a `Rule` cannot express.

        Raises:
            ConfigError: ``cpu_cores`` is not a list of cores.
        """
        if self.cpu_cores is not None and not (_CORES.fullmatch(self.cpu_cores) and self.cores):
            raise option_error(
                "cpu_cores", f"must be a list such as 0-7,16-23, got {shorten(self.cpu_cores)}"
            )

    @property
    def cores(self) -> set[int]:
        """The numbers of the cores; empty if the option is not set."""
        cores: set[int] = set()
        for part in (self.cpu_cores or "").split(","):
            first, _, last = part.partition("-")
            if first:
                cores.update(range(int(first), int(last or first) + 1))
        return cores
