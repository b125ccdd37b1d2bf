"""The header of a GGUF file: its metadata, and where its tensors are.

Every count, length and offset in the file is checked against the file's size before it is used, so
a damaged or hostile file costs neither memory nor time beyond `MAX_HEADER_BYTES`. The reader of the
library `gguf` makes no such checks.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.gguf.block_type import BlockType, block_type, can_dequantize
from paged_backend.values.errors import ConfigError
from paged_backend.values.regular_file import open_regular
from paged_backend.values.validation import shorten

MAX_HEADER_BYTES = 2**25  # a vocabulary of 200,000 tokens with its merges takes a third of it

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_ENTRIES = 2**16  # tensors, and keys; the largest models have some thousands
_MAX_DIMENSIONS = 4
_ALIGNMENT = "general.alignment"
_DEFAULT_ALIGNMENT = 32
_SPLIT = "split.count"
_STRING, _ARRAY = 8, 9
# The other types of values, by their numbers, as codes of `struct`.
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """The position, shape and type of a tensor in a GGUF file."""

    name: str
    kind: BlockType
    shape: tuple[int, ...]  # rows first, columns last; a row consists of whole blocks
    offset: int  # place of its first byte in the file
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The checked header of a file."""

    path: Path
    metadata: ConfigFile
    tensors: dict[str, GgufTensor]  # in the order of their offsets


def read_header(path: Path) -> GgufFile:
    """Read the header of a GGUF file.

    Raises:
        ConfigError: the file cannot be read, is damaged, or is of a kind that is not supported.
    """
    with open_regular(path) as stream:
        try:
            return _Header(path, stream).read()
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error


class _Header:
    """Reads a header from its file's beginning to its end."""

    def __init__(self, path: Path, stream: BinaryIO) -> None:
        self._path = path
        self._stream = stream
        self._size = os.fstat(stream.fileno()).st_size
        self._left = min(self._size, MAX_HEADER_BYTES)

    def read(self) -> GgufFile:
        self._check_format()
        num_tensors = self._number_up_to(_MAX_ENTRIES, "tensors")
        num_keys = self._number_up_to(_MAX_ENTRIES, "keys")
        values: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string("key")
            if key in values:
                raise self._error(f"key {_quoted(key)} is there twice")
            values[key] = self._value(key)
        metadata = ConfigFile(values, str(self._path))
        if metadata.integer(_SPLIT, 1, low=0) > 1:
            raise metadata.error(_SPLIT, "is not supported unless it is 1; merge the parts first")
        return GgufFile(self._path, metadata, self._tensors(num_tensors, metadata))

    def _check_format(self) -> None:
        if self._size < len(_MAGIC) or self._take(len(_MAGIC), "its name") != _MAGIC:
            raise self._error("is not a GGUF file")
        version = self._number("I", "its version")
        if version and version & 0xFFFF == 0:
            raise self._error("is in big-endian byte order, which is not supported")
        if version not in _VERSIONS:
            known = " and ".join(map(str, _VERSIONS))
            raise self._error(f"has version {version} of GGUF; versions {known} are supported")

    def _tensors(self, count: int, metadata: ConfigFile) -> dict[str, GgufTensor]:
        alignment = metadata.integer(_ALIGNMENT, _DEFAULT_ALIGNMENT)
        if alignment.bit_count() != 1:
            raise metadata.error(_ALIGNMENT, f"must be a power of two, got {alignment}")
        infos: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(count):
            name = self._string("the name of a tensor")
            if name in infos:
                raise self._tensor_error(name, "is there twice")
            infos[name] = self._tensor_info(name)
        start = -(-self._stream.tell() // alignment) * alignment
        tensors = []
        for name, (shape, number, offset) in infos.items():
            if offset % alignment:
                raise self._tensor_error(name, f"is at {offset}, which {alignment} does not divide")
            tensors.append(self._tensor(name, shape, number, start + offset))
        tensors.sort(key=lambda tensor: tensor.offset)
        for one, other in pairwise(tensors):
            if one.offset + one.num_bytes > other.offset:
                raise self._tensor_error(other.name, f"overlaps {_quoted(one.name)}")
        return {tensor.name: tensor for tensor in tensors}

    def _tensor_info(self, name: str) -> tuple[tuple[int, ...], int, int]:
        """The shape, the number of the type, and the offset among the tensors."""
        num_dimensions = self._number("I", f"tensor {_quoted(name)}")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise self._tensor_error(name, f"has {num_dimensions} dimensions, not 1 to 4")
        columns_first = self._numbers("Q", num_dimensions, f"tensor {_quoted(name)}")
        kind = self._number("I", f"tensor {_quoted(name)}")
        offset = self._number("Q", f"tensor {_quoted(name)}")
        return tuple(reversed(columns_first)), kind, offset

    def _tensor(self, name: str, shape: tuple[int, ...], number: int, offset: int) -> GgufTensor:
        kind = block_type(number)
        if kind is None or not can_dequantize(kind):
            known = f"number {number}" if kind is None else kind.name
            raise self._tensor_error(name, f"has the type {known}, which is not supported")
        if min(shape) < 1 or shape[-1] % kind.size:
            raise self._tensor_error(
                name, f"has shape {list(shape)}, which {kind.name} in blocks of {kind.size} is not"
            )
        num_bytes = math.prod(shape) // kind.size * kind.num_bytes
        if offset + num_bytes > self._size:
            raise self._tensor_error(name, "ends beyond the file, which is truncated or damaged")
        return GgufTensor(name, kind, shape, offset, num_bytes)

    def _value(self, key: str) -> Any:
        what = f"key {_quoted(key)}"
        number = self._number("I", what)
        if number == _STRING:
            return self._string(what)
        if number != _ARRAY:
            return self._numbers(self._code(number, what), 1, what)[0]
        number = self._number("I", what)
        if number == _STRING:
            return [self._string(what) for _ in range(self._count(what, 8))]
        code = self._code(number, what)
        return list(self._numbers(code, self._count(what, struct.calcsize(code)), what))

    def _code(self, number: int, what: str) -> str:
        if number not in _CODES:
            raise self._error(f"{what} has a value of type {number}, which is not supported")
        return _CODES[number]

    def _count(self, what: str, least: int) -> int:
        """Read the number of entries that follow; each takes at least `least` bytes."""
        count = self._number("Q", f"the number of entries of {what}")
        if count * least > self._left:
            raise self._beyond(f"{what} has {count} entries, which")
        return count

    def _number_up_to(self, limit: int, what: str) -> int:
        number = self._number("Q", f"the number of {what}")
        if number > limit:
            raise self._error(f"has {number} {what}, at most {limit} are supported")
        return number

    def _string(self, what: str) -> str:
        data = self._take(self._number("Q", what), what)
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise self._error(f"{what} is not UTF-8: {shorten(data, 40)}") from error

    def _number(self, code: str, what: str) -> int:
        number: int = self._numbers(code, 1, what)[0]
        return number

    def _numbers(self, code: str, count: int, what: str) -> tuple[Any, ...]:
        layout = f"<{count}{code}"
        return struct.unpack(layout, self._take(struct.calcsize(layout), what))

    def _take(self, num_bytes: int, what: str) -> bytes:
        if num_bytes > self._left:
            raise self._beyond(what)
        self._left -= num_bytes
        return self._stream.read(num_bytes)

    def _beyond(self, what: str) -> ConfigError:
        if self._size > MAX_HEADER_BYTES:
            return self._error(f"{what} ends beyond the {MAX_HEADER_BYTES} bytes of a header")
        return self._error(f"{what} ends beyond the file, which is truncated or damaged")

    def _tensor_error(self, name: str, problem: str) -> ConfigError:
        return self._error(f"tensor {_quoted(name)} {problem}")

    def _error(self, problem: str) -> ConfigError:
        return ConfigError(f"{self._path}: {problem}")


def _quoted(name: str) -> str:
    return shorten(name, 100, quote=False)
