"""Asks a server on this machine."""

from __future__ import annotations

import http.client


def http_get(url: str, timeout_s: float) -> bytes | None:
    """Return the body of a response with the status 200; None for any other, and without one.

    Proxies of the environment are not used.
    """
    address, _, path = url.removeprefix("http://").partition("/")
    connection = http.client.HTTPConnection(address, timeout=timeout_s)
    try:
        connection.request("GET", f"/{path}")
        response = connection.getresponse()
        return response.read() if response.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
