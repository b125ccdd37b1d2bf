"""What the processes of a server hold of the machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from servers import processes_of, stubs_of

from paged_backend.launch.server_process import RunningServer

_REGION = "triton_python_backend_shm_region"


@dataclass(frozen=True)
class Footprint:
    """Server and front-ends; the engine is another one after each of its ends."""

    server_mib: float
    front_ends_mib: float
    shared_mib: float
    server_threads: int
    front_end_threads: int
    files: int
    shared_regions: int
    processes: int

    @classmethod
    def of(cls, server: RunningServer) -> Footprint:
        """As it is now."""
        process, stubs = psutil.Process(server.pid), stubs_of(server)
        regions = {region for stub in stubs for region in _regions(stub)}
        return cls(
            server_mib=_mib(process.memory_info().rss),
            front_ends_mib=_mib(sum(stub.memory_info().rss for stub in stubs)),
            shared_mib=_mib(sum(region.stat().st_blocks * 512 for region in regions)),
            server_threads=process.num_threads(),
            front_end_threads=sum(stub.num_threads() for stub in stubs),
            files=sum(p.num_fds() for p in (process, *stubs)),
            shared_regions=len(regions),
            processes=len(processes_of(server)),
        )

    def growth_over(self, before: Footprint, *, memory: float) -> dict[str, tuple[float, float]]:
        """What is more than before; of memory, what is more than this part more."""
        was, now = asdict(before), asdict(self)
        allowed = {name: 1 + memory if name.endswith("_mib") else 1 for name in was}
        return {n: (was[n], now[n]) for n in was if now[n] > was[n] * allowed[n]}


def _regions(stub: psutil.Process) -> set[Path]:
    maps = Path(f"/proc/{stub.pid}/maps").read_text().splitlines()
    return {Path(line.split()[-1]) for line in maps if _REGION in line and "deleted" not in line}


def _mib(num_bytes: int) -> float:
    return round(num_bytes / 2**20, 1)
