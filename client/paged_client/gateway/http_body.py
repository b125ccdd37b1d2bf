"""Takes the bodies of requests out of received bytes, with limits on the number of pieces.

A body of one-byte chunks costs an HTTP parser a hundred times the work of the same body in one
piece. So chunks are joined here, a limited number at a time, and a body of too many small pieces
is refused, whether they are chunks or TCP segments.
"""

from __future__ import annotations

import re
from typing import Protocol

from paged_client.gateway.errors import ApiError

FREE_PIECES = 1024  # pieces of a body that may have any size
MIN_MEAN_PIECE_BYTES = 64  # mean size of the pieces beyond the free ones
MAX_LINE_BYTES = 1024  # the size of a chunk with its extensions, or a line of the trailer

_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;[^\r\n]*)?")


class Body(Protocol):
    """A body while its bytes arrive."""

    is_complete: bool
    """True after the last byte was taken."""

    is_cut: bool
    """True if ``take`` stopped at its limit, so that it can go on without further bytes."""

    def count_segment(self) -> None:
        """Count a TCP segment. Raises ApiError."""

    def take(self, received: bytearray, max_pieces: int) -> bytes:
        """Remove a part of the body from the beginning of ``received``.

        Returns the part for the HTTP parser, in the framing that the head announced. Looks at
        ``max_pieces`` chunks at most. Raises ApiError.
        """


class _Pieces:
    """Counts the pieces of a body and their bytes."""

    def __init__(self) -> None:
        self._number = 0
        self._num_bytes = 0

    def add(self, num_bytes: int, number: int = 1) -> None:
        """Count pieces. Raises ApiError if there are too many small ones."""
        self._number += number
        self._num_bytes += num_bytes
        if self._number > FREE_PIECES + self._num_bytes // MIN_MEAN_PIECE_BYTES:
            raise ApiError(
                400,
                f"a body comes in at most {FREE_PIECES} pieces, and one more for each "
                f"{MIN_MEAN_PIECE_BYTES} bytes; send larger chunks",
                code="too_many_pieces",
            )


class LengthBody:
    """A body with a known length."""

    def __init__(self, length: int) -> None:
        self.is_complete = length == 0
        self.is_cut = False
        self._num_left = length
        self._pieces = _Pieces()

    def count_segment(self) -> None:
        """Count a TCP segment. Raises ApiError."""
        self._pieces.add(0)

    def take(self, received: bytearray, max_pieces: int) -> bytes:
        """Remove what there is of the body."""
        content = bytes(received[: self._num_left])
        del received[: len(content)]
        self._pieces.add(len(content), 0)
        self._num_left -= len(content)
        self.is_complete = self._num_left == 0
        return content


class ChunkedBody:
    """A body in chunks (RFC 9112, section 7.1); extensions and trailers are dropped."""

    def __init__(self) -> None:
        self.is_complete = False
        self.is_cut = False
        self._num_left = 0  # bytes of the current chunk
        self._ends_chunk = False  # a CR LF is due before the next size
        self._in_trailer = False
        self._pieces = _Pieces()

    def count_segment(self) -> None:
        """Count a TCP segment. Raises ApiError."""
        self._pieces.add(0)

    def take(self, received: bytearray, max_pieces: int) -> bytes:
        """Remove up to ``max_pieces`` chunks and return them as one. Raises ApiError."""
        parts: list[bytes] = []
        position = 0
        num_pieces = 0
        self.is_cut = False
        while not self.is_complete:
            if num_pieces == max_pieces:
                self.is_cut = True
                break
            if self._num_left:
                part = bytes(received[position : position + self._num_left])
                if not part:
                    break
                parts.append(part)
                position += len(part)
                self._num_left -= len(part)
                self._ends_chunk = not self._num_left
                continue
            end = received.find(b"\r\n", position, position + MAX_LINE_BYTES + 2)
            if end < 0:
                if len(received) - position > MAX_LINE_BYTES + 1:
                    raise _invalid(f"a line of a chunked body has at most {MAX_LINE_BYTES} bytes")
                break
            if self._ends_chunk:
                if end != position:
                    raise _invalid("a chunk is longer than its size")
                self._ends_chunk = False
            else:
                self._read_line(received[position:end])
                num_pieces += 1
            position = end + 2
        del received[:position]
        content = b"".join(parts)
        self._pieces.add(len(content), num_pieces)
        return _as_chunk(content, self.is_complete)

    def _read_line(self, line: bytearray) -> None:
        if self._in_trailer:
            self.is_complete = not line
            return
        found = _SIZE.fullmatch(line)
        if found is None:
            raise _invalid("the size of a chunk must be hexadecimal, with at most 8 digits")
        self._num_left = int(found[1], 16)
        self._in_trailer = not self._num_left


def _as_chunk(content: bytes, is_last: bool) -> bytes:
    chunk = b"%x\r\n%b\r\n" % (len(content), content) if content else b""
    return chunk + b"0\r\n\r\n" if is_last else chunk


def _invalid(problem: str) -> ApiError:
    return ApiError(400, f"invalid HTTP request: {problem}", code="invalid_http")
