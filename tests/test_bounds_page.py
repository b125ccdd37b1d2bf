"""The numbers in docs/security.md are those of the code, and each bound has a test."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from paged_backend.values.config import EngineConfig

ROOT = Path(__file__).parents[1]
_SECTION = re.compile(r"^## Threads and bounds\n(.*?)^## ", re.M | re.S)
_ROW = re.compile(r"^\|([^|]*)\|([^|]*)\| ([0-9.]+) ([^|]*)\| `([\w.]+)` \| `([\w./]+)` \|$", re.M)


def _rows() -> list[tuple[float, str, str]]:
    section = _SECTION.search((ROOT / "docs/security.md").read_text())
    assert section is not None
    lines = [line for line in section[1].splitlines() if line.startswith("|")][2:]
    found = [_ROW.match(line) for line in lines]
    assert all(found), [line for line, row in zip(lines, found, strict=True) if row is None]
    return [(float(row[3]), row[5], row[6]) for row in found if row is not None]


ROWS = _rows()


@pytest.mark.parametrize(("number", "where", "test"), ROWS, ids=[where for _, where, _ in ROWS])
def test_a_bound_is_what_the_page_says_and_has_a_test(number: float, where: str, test: str) -> None:
    assert _value(where) == number
    assert (ROOT / test).is_file()


def _value(where: str) -> float:
    owner, _, name = where.rpartition(".")
    if owner == EngineConfig.__name__:
        return float(getattr(EngineConfig, name))
    return float(getattr(importlib.import_module(owner), name))
