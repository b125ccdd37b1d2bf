"""The metrics of the servers behind the gateway, joined to one page."""

from __future__ import annotations

import asyncio
import http.client
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

_TIMEOUT_S = 2.0
_MAX_BYTES = 2**24
_SAMPLE = re.compile(r"([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})?( .*)")


async def fetch_pages(addresses: Iterable[str]) -> dict[str, str]:
    """Return the metrics page of each server that answers, by the server's address."""
    addresses = list(addresses)
    pages = await asyncio.gather(*(asyncio.to_thread(_fetch, address) for address in addresses))
    return {
        address: page for address, page in zip(addresses, pages, strict=True) if page is not None
    }


def join_pages(pages: Mapping[str, str]) -> str:
    """Return one page in Prometheus' text format.

    A single page stays as it is. The samples of several pages get a label ``server``, and each
    family appears once.
    """
    if len(pages) < 2:
        return "".join(pages.values())
    heads: dict[str, list[str]] = {}
    samples: defaultdict[str, list[str]] = defaultdict(list)
    for address, page in pages.items():
        family = ""
        for line in page.splitlines():
            if line.startswith("# HELP "):
                family = line.split(" ", 3)[2]
                heads.setdefault(family, [])
            if line.startswith("#"):
                if line not in heads.setdefault(family, []):
                    heads[family].append(line)
            elif line:
                samples[family].append(_labeled(line, address))
    lines = (line for family, head in heads.items() for line in (*head, *samples[family]))
    return "".join(f"{line}\n" for line in lines)


def _labeled(line: str, server: str) -> str:
    sample = _SAMPLE.fullmatch(line)
    if sample is None:
        return f"# {line}"  # a line of no known form
    name, labels, value = sample.groups()
    both = ",".join(filter(None, [f'server="{server}"', labels]))
    return f"{name}{{{both}}}{value}"


def _fetch(address: str) -> str | None:
    connection = http.client.HTTPConnection(address, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        body = response.read(_MAX_BYTES + 1)
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    if response.status != 200 or len(body) > _MAX_BYTES:
        return None
    return body.decode(errors="replace")
