"""Other callers hardly notice a client that sends requests of more work than their size shows.

Each abuse lasts 20 s. The gaps within four streams, and the times of new requests to their first
token, are measured again during an honest load of as many requests and tokens, and compared. A
single shape is chosen with ``UNBOUNDED_WORK="ambiguous grammars, n 16"``; several by semicolons.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from bystanders import Latencies, doors_of, watch
from callers import quantile
from gateway.gateways import Gateway, running_gateway
from servers import MODEL, metrics
from tool_models import write_tool_model
from unbounded_work import HONEST, HOSTILE, SHAPES

from paged_backend.launch.repository import write_model_repository
from paged_backend.launch.server_process import RunningServer, start_server

pytestmark = [pytest.mark.server, pytest.mark.soak]

SECONDS = 20.0
MAX_ITL_RATIO = 1.5  # ratio of the 99th percentiles
MAX_TTFT_S = 0.5  # later
MAX_GAP_S = 1.0  # longer; holds on a machine with other work, too
NAMES = list(filter(None, os.environ.get("UNBOUNDED_WORK", "").split(";"))) or list(SHAPES)
FEW_FILES = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))"
KEYS = "good good-key, abuser abuser-key"
ANSWER_FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {}}}
CLIENT = Path(__file__).with_name("unbounded_work.py")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, Gateway]]:
    """A server whose model calls tools as Llama 3 does, and a gateway with keys and few files."""
    folder = tmp_path_factory.mktemp("unbounded")
    options = {
        "model": str(write_tool_model(folder / "model")),
        "tool_call_parser": "llama3_json",
        "enable_auto_tool_choice": True,
    }
    write_model_repository(folder / "repository", MODEL, options, instances=1)
    with (
        start_server(folder / "repository") as server,
        running_gateway("--triton", server.grpc_url, keys=KEYS, before=FEW_FILES) as gateway,
    ):
        asyncio.run(watch(doors_of(server, gateway, "good-key"), _pause))
        yield server, gateway


async def _pause() -> None:
    await asyncio.sleep(3)  # what is made once is there afterwards


class Load:
    """The requests of one shape, sent by a separate process."""

    def __init__(self, name: str, server: RunningServer, gateway: Gateway) -> None:
        self.statuses: dict[str, int] = {}
        self._name = name
        self._addresses = [server.http_url.removeprefix("http://"), gateway.address, "abuser-key"]

    def run(self, kind: str, requests: int = 0, tokens: int = 0) -> Callable[[], Awaitable[None]]:
        """Return a function that sends them."""

        async def send() -> None:
            arguments = [self._name, kind, str(SECONDS), str(requests), str(tokens)]
            process = await asyncio.create_subprocess_exec(
                *("nice", "-n", "19", sys.executable, str(CLIENT), *arguments, *self._addresses),
                stdout=asyncio.subprocess.PIPE,
            )
            out, _ = await process.communicate()
            assert process.returncode == 0
            self.statuses = json.loads(out)

        return send


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NAMES)
def test_other_callers_hardly_notice_requests_of_hidden_work(
    name: str, served: tuple[RunningServer, Gateway]
) -> None:
    server, gateway = served
    plain = doors_of(server, gateway, "good-key")
    constrained = replace(plain[-1], fields=plain[-1].fields | {"response_format": ANSWER_FORMAT})
    doors = [*plain, constrained]
    load = Load(name, server, gateway)

    generated = metrics(server)["generation_tokens_total"]
    beside_abuse = asyncio.run(watch(doors, load.run(HOSTILE)))
    hostile = load.statuses
    generated = metrics(server)["generation_tokens_total"] - generated
    tokens = int(generated) - len(beside_abuse.gaps) - 2 * len(beside_abuse.first)
    requests = max(SHAPES[name].num_open, sum(hostile.values()))
    beside_honest = asyncio.run(watch(doors, load.run(HONEST, requests, max(0, tokens))))

    ratio = quantile(beside_abuse.gaps, 0.99) / quantile(beside_honest.gaps, 0.99)
    print(f"\n{name}: {requests} requests, {tokens} tokens")
    print(f"  hostile {hostile}: {beside_abuse}\n  honest {load.statuses}: {beside_honest}")
    print(f"  ITL p99 {ratio:.2f} times, TTFT {_later(beside_abuse, beside_honest):+.2f} s")
    assert max(beside_abuse.gaps) <= max(beside_honest.gaps) + MAX_GAP_S
    assert ratio <= MAX_ITL_RATIO
    assert _later(beside_abuse, beside_honest) <= MAX_TTFT_S


def _later(one: Latencies, other: Latencies) -> float:
    """Seconds by which new requests got their first tokens later, in the median or at most."""
    median = statistics.median(one.first) - statistics.median(other.first)
    return max(median, max(one.first) - max(other.first))
