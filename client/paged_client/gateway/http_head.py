"""Takes the heads of requests out of received bytes, before an HTTP parser sees them.

The parser, h11, is lenient where two servers in a row could see different requests in the same
bytes, and limits only the bytes that it has not parsed yet. So limits and framing are checked here
(RFC 9112, sections 2.2, 5 and 6); names, values and the request line are left to the parser.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from paged_client.gateway.errors import ApiError
from paged_client.gateway.http_body import Body, ChunkedBody, LengthBody

MAX_HEADERS = 100
MAX_HEADER_BYTES = 32 * 1024  # size of a request line and all headers together

_END = b"\r\n\r\n"
_BARE_LINE_FEED = re.compile(rb"(?<!\r)\n")
_LENGTH = re.compile(rb"[0-9]{1,15}")


class RequestHead(NamedTuple):
    """A request's line and headers as received, and how its body is framed."""

    content: bytes
    body: Body | None


class HeadReader:
    """Finds the end of a head that may arrive in any number of pieces."""

    def __init__(self) -> None:
        self._num_searched = 0

    def take(self, received: bytearray) -> RequestHead | None:
        """Remove a head from the beginning of ``received``; None if it is not complete.

        Looks at each byte once, however often it is called. Raises ApiError; then the bytes stay.
        """
        start = max(0, self._num_searched - len(_END) + 1)
        end = received.find(_END, start, MAX_HEADER_BYTES + len(_END))
        stop = len(received) if end < 0 else end
        if stop > MAX_HEADER_BYTES:
            raise ApiError(431, f"all headers together have at most {MAX_HEADER_BYTES} bytes")
        if received and received[0] <= 0x20:
            raise _invalid("a request begins with its method")
        if _BARE_LINE_FEED.search(received, start, stop):
            raise _invalid("lines must end with CR LF")
        if end < 0:
            self._num_searched = len(received)
            return None
        self._num_searched = 0
        content = bytes(received[: end + len(_END)])
        head = RequestHead(content, _body(content))
        del received[: end + len(_END)]
        return head


def _body(head: bytes) -> Body | None:
    """Return the body that a head announces, or None. Raises ApiError."""
    lines = head[: -len(_END)].split(b"\r\n")
    if len(lines) - 1 > MAX_HEADERS:
        raise ApiError(431, f"a request has at most {MAX_HEADERS} headers")
    lengths: list[bytes] = []
    codings: list[bytes] = []
    for line in lines[1:]:
        if line.startswith((b" ", b"\t")):
            raise _invalid("a header must be on one line")
        name, _, value = line.partition(b":")
        match name.strip().lower():
            case b"content-length":
                lengths.append(value.strip(b" \t"))
            case b"transfer-encoding":
                codings.append(value.strip(b" \t"))
    if len(lengths) + len(codings) > 1:
        raise _invalid("Content-Length or Transfer-Encoding must be given once, and only one")
    if codings:
        if codings[0].lower() != b"chunked" or lines[0].endswith(b"HTTP/1.0"):
            raise _invalid("Transfer-Encoding must be chunked, in HTTP/1.1")
        return ChunkedBody()
    if not lengths:
        return None
    if not _LENGTH.fullmatch(lengths[0]):
        raise _invalid("Content-Length must be a number of at most 15 digits")
    length = int(lengths[0])
    return LengthBody(length) if length else None


def _invalid(problem: str) -> ApiError:
    return ApiError(400, f"invalid HTTP request: {problem}", code="invalid_http")
