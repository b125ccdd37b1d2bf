"""A fast reader of a server's metrics, for tests that poll them."""

from __future__ import annotations

import re
import urllib.request

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the server is local
_SAMPLE = re.compile(r"^paged_(\w+)\{[^}]*\} (\S+)$", re.MULTILINE)


def read_metrics(url: str) -> dict[str, float]:
    """The current value of each `paged_` metric, by name without prefix, summed over labels."""
    with _OPENER.open(url, timeout=5) as response:
        text = response.read().decode()
    values: dict[str, float] = {}
    for name, value in _SAMPLE.findall(text):
        values[name] = values.get(name, 0.0) + float(value)
    return values
