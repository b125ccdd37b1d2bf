"""Heads and bodies are taken out of received bytes as h11 reads them, in whatever pieces."""

from __future__ import annotations

import asyncio

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paged_client.gateway.errors import ApiError
from paged_client.gateway.http_body import (
    FREE_PIECES,
    MAX_LINE_BYTES,
    MIN_MEAN_PIECE_BYTES,
    ChunkedBody,
    LengthBody,
)
from paged_client.gateway.http_head import MAX_HEADER_BYTES, MAX_HEADERS, HeadReader
from paged_client.gateway.turns import Turns

NEXT = b"GET / HTTP/1.1\r\n"
EXTENSIONS = st.sampled_from([b"", b";a=b", b" "])
CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


def read(body, pieces, max_pieces=3):
    """All of a body that arrives in pieces, and what is left."""
    received, parts = bytearray(), []
    for piece in pieces:
        received += piece
        while True:
            parts.append(body.take(received, max_pieces))
            if not body.is_cut:
                break
    return b"".join(parts), bytes(received)


def split(content, cuts):
    places = sorted({cut % (len(content) + 1) for cut in cuts} | {0, len(content)})
    return [content[a:b] for a, b in zip(places, places[1:], strict=False)]


def text_of(request):
    """The body of a request, as h11 reads it."""
    parser = h11.Connection(h11.SERVER)
    parser.receive_data(request)
    text = b""
    while not isinstance(event := parser.next_event(), h11.EndOfMessage):
        assert event is not h11.NEED_DATA
        if isinstance(event, h11.Data):
            text += event.data
    return text


@given(
    st.lists(st.tuples(st.binary(min_size=1, max_size=40), st.sampled_from([b"", b";a=b", b" "]))),
    st.lists(st.sampled_from([b"X: y", b"Y: z"]), max_size=2),
    st.lists(st.integers(min_value=0)),
)
def test_chunks_are_read_as_h11_reads_them(chunks, trailers, cuts):
    wire = b"".join(b"%x%b\r\n%b\r\n" % (len(text), more, text) for text, more in chunks)
    wire += b"0\r\n" + b"".join(line + b"\r\n" for line in trailers) + b"\r\n"
    body = ChunkedBody()
    joined, rest = read(body, split(wire + NEXT, cuts))
    assert body.is_complete and rest == NEXT
    assert text_of(CHUNKED + joined) == text_of(CHUNKED + wire) == b"".join(t for t, _ in chunks)


@given(st.binary(min_size=1), st.lists(st.integers(min_value=0)))
def test_a_body_with_a_length_ends_there(text, cuts):
    body = LengthBody(len(text))
    found, rest = read(body, split(text + NEXT, cuts))
    assert body.is_complete and (found, rest) == (text, NEXT)


@pytest.mark.parametrize(
    ("wire", "problem"),
    [
        (b"zz\r\n", "hexadecimal"),
        (b"-1\r\n", "hexadecimal"),
        (b"0x1\r\n", "hexadecimal"),
        (b"\r\n", "hexadecimal"),
        (b"1\nx\r\n", "hexadecimal"),
        (b"1;a\nb\r\n", "hexadecimal"),
        (b"fffffffff\r\n", "8 digits"),
        (b"1\r\nxy\r\n", "longer than its size"),
        (b"1\r\nx\n1\r\n", "longer than its size"),
        (b"1;" + b"a" * MAX_LINE_BYTES, "1024 bytes"),
        (b"0\r\n" + b"a" * (MAX_LINE_BYTES + 2), "1024 bytes"),
    ],
)
def test_chunks_that_are_not_valid_are_refused(wire, problem):
    with pytest.raises(ApiError, match=problem):
        read(ChunkedBody(), [wire])


@pytest.mark.parametrize("piece", [b"1\r\nx\r\n", b"0;a=b\r\nx: y\r\n", b"1;extension\r\nx\r\n"])
def test_the_number_of_small_chunks_and_trailers_is_limited(piece):
    first, _, rest = piece.partition(b"\r\n")
    is_trailer = first.startswith(b"0")
    few = first + b"\r\n" + rest * 1000 if is_trailer else piece * 1000
    read(ChunkedBody(), [few])
    with pytest.raises(ApiError, match=f"at most {FREE_PIECES} pieces"):
        read(ChunkedBody(), [few, (rest if is_trailer else piece) * 100])


def test_a_large_body_may_have_many_pieces():
    size = MIN_MEAN_PIECE_BYTES
    wire = (b"%x\r\n%b\r\n" % (size, b"x" * size)) * 10_000
    body = ChunkedBody()
    joined, rest = read(body, [wire], max_pieces=256)
    assert not rest and joined.count(b"x") == size * 10_000


def test_the_number_of_small_segments_is_limited():
    for body in (LengthBody(10**6), ChunkedBody()):
        for _ in range(FREE_PIECES):
            body.count_segment()
        with pytest.raises(ApiError, match="larger chunks"):
            body.count_segment()


def head(*lines):
    return "\r\n".join(["POST / HTTP/1.1", "Host: x", *lines, "", ""]).encode()


@given(st.lists(st.integers(min_value=0)))
def test_a_head_may_arrive_in_any_pieces(cuts):
    content = head("Content-Length: 3", "X: y")
    reader, received, found = HeadReader(), bytearray(), None
    for piece in split(content + b"abc", cuts):
        received += piece
        found = found or reader.take(received)
    assert found is not None and found.content == content
    assert isinstance(found.body, LengthBody) and received == b"abc"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (head("Content-Length: 3", "Transfer-Encoding: chunked"), "given once"),
        (head("Transfer-Encoding: chunked", "content-length: 3"), "given once"),
        (head("Content-Length : 3", "Transfer-Encoding: chunked"), "given once"),
        (head("Content-Length: 3", "Content-Length: 3"), "given once"),
        (head("Transfer-Encoding: chunked", "Transfer-Encoding: chunked"), "given once"),
        (head("Content-Length: 3, 3"), "a number"),
        (head("Content-Length: +3"), "a number"),
        (head("Content-Length: 3 3"), "a number"),
        (head("Content-Length:"), "a number"),
        (head(f"Content-Length: {'0' * 16}"), "15 digits"),
        (head("Transfer-Encoding: identity"), "must be chunked"),
        (head("Transfer-Encoding: gzip, chunked"), "must be chunked"),
        (head("Transfer-Encoding: \x0bchunked"), "must be chunked"),
        (head("Transfer-Encoding:"), "must be chunked"),
        (head("Transfer-Encoding: chunked").replace(b"1.1", b"1.0"), "in HTTP/1.1"),
        (head("X: a", " b"), "on one line"),
        (head("X: a", "\tTransfer-Encoding: chunked"), "on one line"),
        (head().replace(b"\r\n", b"\n"), "CR LF"),
        (head("X: a\nY: b"), "CR LF"),
        (b"GET / HTTP/1.1\nHost: x\n", "CR LF"),
        (b"\r\n" + head(), "begins with its method"),
        (b"\x16\x03\x01", "begins with its method"),
        (head(*["X: y"] * MAX_HEADERS), "at most 100 headers"),
        (head(f"X: {'y' * MAX_HEADER_BYTES}"), "32768 bytes"),
        (b"x" * (MAX_HEADER_BYTES + 1), "32768 bytes"),
        (head(*["a:"] * 2**16), "32768 bytes"),
    ],
)
def test_heads_that_could_be_read_in_two_ways_are_refused(content, problem):
    for pieces in ([content], split(content, range(min(len(content), 200)))):
        reader, received = HeadReader(), bytearray()
        with pytest.raises(ApiError, match=problem):
            for piece in pieces:
                received += piece
                reader.take(received)


class Reader:
    """A connection with a number of turns to take, of which one may fail."""

    def __init__(self, name, turns, order, number, fails=False):
        self.name, self.turns, self.order = name, turns, order
        self.number, self.fails = number, fails

    def take_turn(self):
        self.order.append(self.name)
        self.number -= 1
        if self.number:
            self.turns.join(self)
        if self.fails:
            raise ValueError


def test_one_connection_takes_a_turn_while_others_run():
    order: list[str] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        turns = Turns()
        readers = [
            Reader("a", turns, order, 3),
            Reader("b", turns, order, 1, fails=True),
            Reader("c", turns, order, 2),
            Reader("gone", turns, order, 9),
        ]
        for reader in readers:
            turns.join(reader)
            turns.join(reader)
        turns.leave(readers[-1])
        for _ in range(8):
            await asyncio.sleep(0)
            order.append("-")

    asyncio.run(run())
    assert "".join(order) == "a-b-c-a-c-a---"
