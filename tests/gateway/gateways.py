"""Starts gateways as users do, and talks to them below the level of the SDK."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
from gateway.nursery import Fork
from paged_client.gateway import KEYS_VARIABLE

MODEL = "paged_llm"


@dataclass(frozen=True)
class Response:
    """Status, headers and body."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]


@dataclass(frozen=True)
class Gateway:
    """A running gateway."""

    process: subprocess.Popen[str] | Fork
    address: str

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @contextmanager
    def connection(self) -> Iterator[http.client.HTTPConnection]:
        connection = http.client.HTTPConnection(self.address, timeout=120)
        try:
            yield connection
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Response:
        return self.request("GET", path, None, headers)

    def post(self, path: str, body: Any, **headers: str) -> Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.request("POST", path, content, {"Content-Type": "application/json"} | headers)

    def request(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> Response:
        with self.connection() as connection:
            connection.request(method, path, body, dict(headers))
            response = connection.getresponse()
            return Response(response.status, dict(response.getheaders()), response.read())

    def sdk(self, api_key: str = "none", **options: Any) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"http://{self.address}/v1",
            api_key=api_key,
            **{"max_retries": 0, "timeout": 60, **options},
        )

    def metrics(self, prefix: str = "paged_gateway_") -> dict[str, float]:
        """The gateway's numbers by name and labels."""
        text = self.get("/metrics").body.decode()
        found = re.findall(rf"^{prefix}(\S+(?:\{{.*\}})?) (\S+)$", text, re.M)
        return {name: float(value) for name, value in found}


@contextmanager
def running_gateway(
    *flags: str,
    keys: str | None = None,
    before: str = "",
    log: Path | None = None,
    fresh: bool = False,
) -> Iterator[Gateway]:
    """`paged-backend gateway` on a free port; ``before`` is what its process runs first.

    What it writes to its standard error goes to the file ``log``. Its process is a fork of one that
    has imported its modules; a ``fresh`` one begins with the interpreter, whose memory follows
    environment variables.
    """
    environment = {k: v for k, v in os.environ.items() if k != KEYS_VARIABLE}
    if keys is not None:
        environment[KEYS_VARIABLE] = keys
    code = f"{before}\nimport sys\nfrom paged_backend.cli import main\nsys.exit(main())"
    arguments = ["gateway", "--port", "0", *flags]
    with nullcontext() if log is None else log.open("w") as errors:
        descriptor = 2 if errors is None else errors.fileno()
        started = _fresh_process if fresh else Fork
        process = started(code, arguments, environment, descriptor)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("gateway listens on "), line
            yield Gateway(process, urllib.parse.urlsplit(line.split()[-1]).netloc)
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(40) == 0
            process.stdout.close()


def _fresh_process(
    code: str, arguments: list[str], environment: Mapping[str, str], errors: int
) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
    )
