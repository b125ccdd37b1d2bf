"""JSON schemas that take more time than a constraint may have."""

from __future__ import annotations

from typing import Any


def hostile_schema(number: int) -> dict[str, Any]:
    """Return a schema whose patterns of names overlap, of 10 kB; it takes over 6 s.

    Args:
        number: makes it different from others.
    """
    patterns = {f"^{number}_{i:05}.*{i}$": {"pattern": f".*{i}.*"} for i in range(250)}
    return {"type": "object", "patternProperties": patterns}
