"""A server that speaks the part of the Hugging Face Hub's API that downloads need."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

WRONG_TOKEN = "hf_wrong"
_API = re.compile(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Repository:
    """Branches, the files of their commits, and what goes wrong."""

    refs: dict[str, str]  # commits of branches and tags, by name
    commits: dict[str, dict[str, bytes]]
    gated: bool = False
    down: bool = False  # all answers have status 503
    claimed: dict[str, int] = field(default_factory=dict)  # sizes that the listing has
    failing: set[str] = field(default_factory=set)  # files whose contents have status 503
    cut: dict[str, int] = field(default_factory=dict)  # bytes until the connection breaks, once

    @classmethod
    def of(cls, files: dict[str, bytes]) -> Repository:
        """One commit of some files, on the branch main."""
        repository = cls({}, {})
        repository.commit(files)
        return repository

    def commit(self, files: dict[str, bytes], ref: str = "main") -> str:
        """Move a branch to a new commit, and return its hash."""
        sha = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.refs[ref] = sha
        self.commits[sha] = files
        return sha


@dataclass
class Hub:
    """A running server."""

    url: str
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)  # methods and paths

    def fetched(self, name: str) -> list[str]:
        """Return the files of a repository whose contents were asked for, in alphabetical order."""
        matches = (_FILE.fullmatch(path) for method, path in self.requests if method == "GET")
        return sorted(match[3] for match in matches if match and match[1] == name)


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Serve repositories, which may be added at any time, on a free port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    hub = Hub(f"http://127.0.0.1:{server.server_port}")
    server.hub = hub  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield hub
    server.shutdown()
    server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._respond()

    def do_GET(self) -> None:
        self._respond()

    def log_message(self, *arguments: object) -> None:
        """Write nothing."""

    def _respond(self) -> None:
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        path = unquote(urlsplit(self.path).path)
        raw = urlsplit(self.path).path
        hub.requests.append((self.command, path))
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token == WRONG_TOKEN:
            return self._refuse(401, message="Invalid credentials in Authorization header")
        match = _API.fullmatch(raw) or _FILE.fullmatch(raw)
        repository = hub.repositories.get(match[1]) if match else None
        if match is None or repository is None:
            return self._refuse(404 if token else 401, "RepoNotFound")
        if repository.down:
            return self._refuse(503)
        revision = unquote(match[2] if match.re is _FILE else match[3] or "main")
        sha = repository.refs.get(revision, revision)
        if sha not in repository.commits:
            return self._refuse(404, "RevisionNotFound")
        files = repository.commits[sha]
        if match.re is _FILE:
            return self._file(repository, sha, unquote(match[3]), token)
        return self._json(
            _tree(files, repository.claimed) if match[2] == "tree" else {"id": match[1], "sha": sha}
        )

    def _file(self, repository: Repository, sha: str, name: str, token: str) -> None:
        body = repository.commits[sha].get(name)
        if repository.gated:
            return self._refuse(403 if token else 401, "GatedRepo")
        if name in repository.failing and self.command == "GET":
            return self._refuse(503)
        if body is None:
            return self._refuse(404, "EntryNotFound")
        begin = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").rstrip("-"))
        self.send_response(206 if begin else 200)
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(body) - 1}/{len(body)}")
        self.send_header("Content-Length", str(len(body) - begin))
        self.send_header("ETag", f'"{_oid(body)}"')
        self.send_header("X-Repo-Commit", sha)
        self.end_headers()
        if self.command == "GET":
            end = repository.cut.pop(name, len(body))
            self.wfile.write(body[begin:end])
            self.close_connection = end < len(body)

    def _json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: int, code: str = "", message: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        if code:
            self.send_header("X-Error-Code", code)
        if message:
            self.send_header("X-Error-Message", message)
        self.end_headers()


def _oid(body: bytes) -> str:
    return hashlib.sha1(body).hexdigest()


def _tree(files: dict[str, bytes], claimed: dict[str, int]) -> list[dict[str, Any]]:
    return [
        {"type": "file", "path": name, "size": claimed.get(name, len(body)), "oid": _oid(body)}
        for name, body in files.items()
    ]
