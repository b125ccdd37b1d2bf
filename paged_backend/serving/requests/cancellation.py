"""The error of a request that its client has canceled."""

from __future__ import annotations

CANCELLED = "Request was cancelled"


class Cancelled(Exception):
    """The client canceled the request; it is answered with Triton's CANCELLED."""

    def __init__(self) -> None:
        super().__init__(CANCELLED)
