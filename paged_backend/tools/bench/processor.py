"""The processor under a measurement: its vector units, and the time that neighbors take."""

from __future__ import annotations

from paged_backend.tools.machine import cpu_property

FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")


def cpu_flags() -> str:
    """The flags in `FLAGS` that this processor has, separated by spaces."""
    present = cpu_property("flags").split()
    return " ".join(flag for flag in FLAGS if flag in present)


class StolenTime:
    """Measures the CPU time that the hypervisor has given to others, from now on."""

    def __init__(self) -> None:
        self._total, self._stolen = _cpu_ticks()

    def share(self) -> float:
        """The stolen part of all CPU time since the start."""
        total, stolen = _cpu_ticks()
        return (stolen - self._stolen) / max(total - self._total, 1)


def _cpu_ticks() -> tuple[int, int]:
    """Total and stolen ticks since boot; the columns after `steal` are contained in others."""
    with open("/proc/stat") as file:
        ticks = [int(column) for column in file.readline().split()[1:9]]
    return sum(ticks), ticks[7]
