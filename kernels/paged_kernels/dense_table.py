"""For which products of few rows `dense_matmul` is faster than torch's, as measured on a device.

The file `dense_table.json` has an entry for each device and shape that
`kernels/benchmarks/bench_dense_matmul.py` has timed. Any other product is torch's.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

_FILE = Path(__file__).with_suffix(".json")


@dataclass(frozen=True, slots=True)
class DenseEntry:
    """A shape of 16-bit weights, and the number of rows up to which our product is faster."""

    device: str  # torch's name of the GPU
    features: int  # N
    width: int  # K
    gated: bool  # the product is followed by SiLU and the product of its halves
    max_rows: int  # 0 if torch's is always faster


def max_rows(device: str, features: int, width: int, *, gated: bool) -> int:
    """Return the number of rows up to which our product is faster; 0 if it was not measured."""
    return _table().get((device, features, width, gated), 0)


def write_entries(entries: Iterable[DenseEntry], file: Path = _FILE) -> None:
    """Add entries to a file; those for the same devices and shapes are replaced."""
    found = {_key(entry): entry for entry in (*_read(file), *entries)}
    lines = ",\n".join(json.dumps(asdict(found[key])) for key in sorted(found))
    file.write_text(f"[\n{lines}\n]\n")
    _table.cache_clear()


def _read(file: Path) -> list[DenseEntry]:
    return [DenseEntry(**entry) for entry in json.loads(file.read_text())]


def _key(entry: DenseEntry) -> tuple[str, int, int, bool]:
    return entry.device, entry.features, entry.width, entry.gated


@functools.cache
def _table() -> dict[tuple[str, int, int, bool], int]:
    return {_key(entry): entry.max_rows for entry in _read(_FILE)}
