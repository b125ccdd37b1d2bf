"""GPU specifications to plan with: the vendors' data-sheet figures, without sparsity."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass

from paged_backend.values.errors import ConfigError
from paged_backend.values.validation import shorten

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True, slots=True)
class Gpu:
    """The specification of one GPU."""

    name: str
    memory_mib: int  # as nvidia-smi reports it, which differs from the size in the name
    bandwidth_gb_s: float  # 10^9 bytes/s
    tflops: Mapping[str, float]  # dense, by dtype of the operands
    link_gb_s: float  # 10^9 bytes/s that it can send to the other GPUs of its node
    source: str

    @property
    def memory_bytes(self) -> int:
        """The GPU's total memory in bytes."""
        return self.memory_mib * MIB

    @property
    def bytes_per_s(self) -> float:
        """The memory bandwidth in bytes per second."""
        return self.bandwidth_gb_s * 1e9

    def flops_per_s(self, dtype: str) -> float:
        """The peak rate; a dtype that the GPU has no unit for is widened to bfloat16 first."""
        return self.tflops.get(dtype, self.tflops["bfloat16"]) * 1e12


# From Hopper on, data sheets give tensor-core rates with sparsity; this table has half of those.
# float32 is the rate without TF32, which torch does not use by default. Links are NVLink or else
# PCIe in one direction, which is half of the data sheets' figures.
_TABLE: tuple[tuple[str, int, float, float, float, float, float | None, float, str], ...] = (
    # name, MiB, GB/s, TFLOP/s of float32, bfloat16, int8 and fp8, GB/s of links, source
    ("a100-40gb", 40960, 1555, 19.5, 312, 624, None, 300, "NVIDIA A100 data sheet, SXM 40 GB"),
    ("a100-80gb", 81920, 2039, 19.5, 312, 624, None, 300, "NVIDIA A100 data sheet, SXM 80 GB"),
    ("h100-sxm", 81559, 3350, 67, 989.5, 1979, 1979, 450, "NVIDIA H100 data sheet, SXM"),
    ("h100-pcie", 81559, 2000, 51, 756.5, 1513, 1513, 64, "NVIDIA H100 data sheet of 2022, PCIe"),
    ("h100-nvl", 95830, 3900, 60, 835.5, 1670.5, 1670.5, 300, "NVIDIA H100 NVL data sheet"),
    ("h200", 143771, 4800, 67, 989.5, 1979, 1979, 450, "NVIDIA H200 data sheet, SXM"),
    (
        "b200",
        183359,
        8000,
        75,
        2250,
        4500,
        4500,
        900,
        "NVIDIA HGX and DGX B200 data sheets, an eighth",
    ),
    ("l40s", 46068, 864, 91.6, 362, 733, 733, 32, "NVIDIA L40S data sheet"),
    ("l4", 23034, 300, 30.3, 121, 242.5, 242.5, 32, "NVIDIA L4 data sheet"),
    ("a10", 23028, 600, 31.2, 125, 250, None, 32, "NVIDIA A10 data sheet"),
)


def _gpu(
    name: str,
    memory_mib: int,
    bandwidth_gb_s: float,
    float32: float,
    bfloat16: float,
    int8: float,
    fp8: float | None,
    link_gb_s: float,
    source: str,
) -> Gpu:
    rates = {"float32": float32, "bfloat16": bfloat16, "int8": int8, "fp8": fp8}
    tflops = {dtype: rate for dtype, rate in rates.items() if rate is not None}
    return Gpu(name, memory_mib, bandwidth_gb_s, tflops, link_gb_s, source)


GPUS = {row[0]: _gpu(*row) for row in _TABLE}
_PCIE_4_GB_S = 32
_ALIASES = {"a100": "a100-80gb", "h100": "h100-sxm"}


def find_gpu(text: str) -> Gpu:
    """Look up a GPU of the table by name, or parse one described as NAME=GIB:GB/S:TFLOPS.

    Raises:
        ConfigError: `text` is neither; for an unknown name, the message suggests the closest one.
    """
    if "=" in text:
        return _described(text)
    name = text.strip().lower().replace("_", "-").replace(" ", "-").removeprefix("nvidia-")
    gpu = GPUS.get(_ALIASES.get(name, name))
    if gpu is None:
        near = difflib.get_close_matches(name, [*GPUS, *_ALIASES], n=1)
        hint = f"did you mean {near[0]}? Known" if near else "known"
        raise ConfigError(
            f"--gpu: {shorten(text)} is not known; {hint}: {', '.join(GPUS)}, or describe one as "
            "NAME=GIB:GB/S:TFLOPS, such as mine=24:1008:165"
        )
    return gpu


def _described(text: str) -> Gpu:
    name, _, figures = text.partition("=")
    try:
        memory, bandwidth, tflops = (float(figure) for figure in figures.split(":"))
    except ValueError:
        memory = bandwidth = tflops = math.nan
    if not name or not all(0 < figure < math.inf for figure in (memory, bandwidth, tflops)):
        raise ConfigError(
            "--gpu: must be NAME=GIB:GB/S:TFLOPS with three numbers above 0, such as "
            f"mine=24:1008:165; got {shorten(text)}"
        )
    rates = dict.fromkeys(("float32", "bfloat16", "fp8", "int8"), tflops)
    source = "given on the command line, with the links of PCIe 4"
    return Gpu(name, round(memory * GIB / MIB), bandwidth, rates, _PCIE_4_GB_S, source)
