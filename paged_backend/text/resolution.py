"""What `transformers` makes of the tokenizer files of a folder, found out once and kept.

Every process of a server loads the tokenizer, and `transformers` takes a second to import. So the
first of them asks :mod:`paged_backend.text.resolve_process`, and the answer is kept in a private
cache folder under a name that depends on the contents of all files that can matter, and on the
versions of the libraries. Without a folder that only this user can write to, nothing is kept.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import stat
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from paged_backend.checkpoint.folder import MAX_TOKENIZER_BYTES, check_texts
from paged_backend.sandbox.client import NoAnswer, Sandbox
from paged_backend.text.resolve_process import TIME_LIMIT_S
from paged_backend.values.errors import ConfigError, RequestRefused
from paged_backend.values.log import LOG
from paged_backend.values.validation import shorten

_FORMAT = 2  # version of the entries, and of the checks that a kept tokenizer has passed
MAX_KEPT = 16  # tokenizers in the cache
ANSWER_LIMIT_S = 600.0  # wall-clock time, on a machine that is busy with other things
_WEIGHTS = {".safetensors", ".bin", ".gguf", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx"}
_LIBRARIES = ("paged-backend", "transformers", "tokenizers", "sentencepiece", "tiktoken")
_PIECE = 2**20


@dataclass(frozen=True, slots=True)
class ResolvedTokenizer:
    """A tokenizer as `transformers` loads it.

    Attributes:
        backend: the fast tokenizer, as the text of a ``tokenizer.json``.
        special_tokens: the texts of special tokens by names such as ``bos_token``; chat templates
            can refer to them.
        end_token_id: the token that ends a text; None if there is none.
        splits_special_tokens: special tokens in a text are encoded like other text.
        note: what the operator should know; empty for nothing.
    """

    backend: str
    special_tokens: dict[str, str]
    end_token_id: int | None
    splits_special_tokens: bool
    note: str


def resolve_tokenizer_files(folder: Path) -> ResolvedTokenizer:
    """Return what `transformers` makes of a folder's files.

    Raises:
        ConfigError: no tokenizer can be made of them, it is too large, or does too much work.
    """
    check_texts(folder)
    digest = _digest(folder)
    try:
        entry = _open_entry(digest)
    except OSError as error:
        LOG.debug("no cache of tokenizers: %s", error)
        return _ask(folder)
    with entry:
        fcntl.flock(entry, fcntl.LOCK_EX)  # the first process asks, and the others wait for it
        resolved = _read(entry)
        if resolved is None:
            resolved = _ask(folder)
            with contextlib.suppress(OSError):  # such as a full disk; then it is asked again
                _write(entry, resolved)
                _remove_old(_cache_folder())
    return resolved


def _ask(folder: Path) -> ResolvedTokenizer:
    sandbox = Sandbox(
        "paged_backend.text.resolve_process",
        subject="tokenizer",
        time_limit_s=TIME_LIMIT_S,
        answer_limit_s=ANSWER_LIMIT_S,
        max_processes=1,
    )
    try:
        answer = sandbox.ask(str(folder.absolute()))
    except (NoAnswer, RequestRefused) as error:
        answer = {"problem": str(error)}
    finally:
        sandbox.close()
    if "problem" in answer:
        reason = shorten(answer["problem"], 300, quote=False)
        raise ConfigError(f"no tokenizer can be made of the files in {folder}: {reason}")
    resolved = ResolvedTokenizer(**answer)
    if resolved.note:
        LOG.warning("%s: %s", folder, resolved.note)
    return resolved


def _digest(folder: Path) -> str:
    """Return a digest of all that the result depends on.

    Raises:
        ConfigError: a file cannot be read.
    """
    digest = hashlib.blake2b(f"{_FORMAT}\n".encode(), digest_size=24)
    for name in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            digest.update(f"{name} {importlib.metadata.version(name)}\n".encode())
    try:
        for path in sorted(folder.iterdir()):
            if path.is_file() and path.suffix not in _WEIGHTS:
                _add(digest, path)
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename}: {error.strerror}") from error
    return digest.hexdigest()


def _add(digest: hashlib.blake2b, path: Path) -> None:
    status = path.stat()
    digest.update(f"{path.name} {status.st_size}\n".encode())
    if status.st_size > MAX_TOKENIZER_BYTES:
        digest.update(f"{status.st_mtime_ns}\n".encode())  # weights of a format that is not known
        return
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)


def _cache_folder() -> Path:
    """Return the folder of the cache. Raises OSError if other users could write to it."""
    base = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    folder = Path(base) / "paged-backend" / "tokenizers"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError(f"{folder} must belong to this user, and to no other")
    return folder


def _open_entry(digest: str) -> BinaryIO:
    path = _cache_folder() / digest
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    return os.fdopen(descriptor, "r+b")


def _read(entry: BinaryIO) -> ResolvedTokenizer | None:
    """Return what an entry holds; None if it is new, or its writer was interrupted."""
    header = entry.readline()
    try:
        values = json.loads(header)
        length = values.pop("length")
        backend = entry.read(length + 1)
        if len(backend) != length:
            return None
        os.utime(entry.fileno())
        return ResolvedTokenizer(backend=backend.decode(), **values)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _write(entry: BinaryIO, resolved: ResolvedTokenizer) -> None:
    values = asdict(resolved)
    backend = values.pop("backend").encode()
    entry.seek(0)
    entry.truncate()
    entry.write(json.dumps({**values, "length": len(backend)}).encode() + b"\n")
    entry.write(backend)
    entry.flush()


def _remove_old(folder: Path) -> None:
    """Remove the entries that have not been used for longest."""
    entries = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in entries[MAX_KEPT:]:
        path.unlink(missing_ok=True)
