"""The plan of a model that is named by its Hugging Face id; a server here stands for the hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from paged_backend.checkpoint.bundled import MODEL_DIR

SHA = "0" * 40
FILES = {"config.json": (MODEL_DIR / "config.json").read_bytes(), "model.safetensors": b"weights"}


class Hub(BaseHTTPRequestHandler):
    """Serves the files of one model, as huggingface_hub asks for them."""

    asked: list[str] = []

    def do_HEAD(self) -> None:
        self.respond(with_body=False)

    def do_GET(self) -> None:
        self.respond(with_body=True)

    def respond(self, *, with_body: bool) -> None:
        self.asked.append(self.path)
        name = self.path.rpartition("/")[2]
        if not self.path.startswith("/org/small/resolve/") or name not in FILES:
            self.send_error(404)
            return
        body = FILES[name]
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{name}"')
        self.send_header("X-Repo-Commit", SHA)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Write nothing."""


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def plan(model: str, hub: str, home: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paged_backend.cli", "plan", model, "--json"]
    environment = os.environ | {"HF_ENDPOINT": hub, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def test_only_the_configuration_is_downloaded(hub: str, tmp_path: Path) -> None:
    done = plan("org/small", hub, tmp_path)
    assert done.returncode == 0, done.stderr
    local = plan(str(MODEL_DIR), hub, tmp_path)
    assert json.loads(done.stdout)["gpus"] == json.loads(local.stdout)["gpus"]
    assert any("config.json" in path for path in Hub.asked)
    assert not any("safetensors" in path for path in Hub.asked)


def test_an_unknown_model_is_named(hub: str, tmp_path: Path) -> None:
    done = plan("org/other", hub, tmp_path)
    assert done.returncode == 2
    assert "model org/other is neither a folder here nor" in done.stderr
