"""What the OpenAI gateway adds to the time to the first token and between tokens.

Starts the demo model on a real server and a gateway in front of it, asks in turn directly over gRPC
and through the gateway, and prints medians.
"""

from __future__ import annotations

import argparse
import http.client
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from paged_client import Client

from paged_backend.launch.gateway_process import GatewayProcess
from paged_backend.launch.ports import bind
from paged_backend.launch.repository import write_model_repository
from paged_backend.launch.server_process import start_server

MODEL = "paged_llm"
OPTIONS = {"temperature": 0, "ignore_eos": True}


def direct(address: str, prompt: str, max_tokens: int) -> Iterator[None]:
    """Yield once when connected, then once per response chunk over gRPC."""
    with Client(address, MODEL) as client:
        client.is_ready()  # connects before the clock starts, as through_gateway does
        yield None
        for _ in client.stream(prompt, max_tokens=max_tokens, **OPTIONS):
            yield None


def through_gateway(address: str, prompt: str, max_tokens: int) -> Iterator[None]:
    """Yield once when connected, then once per server-sent event with data."""
    connection = http.client.HTTPConnection(address)
    connection.connect()
    yield None
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "stream": True, **OPTIONS}
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    assert response.status == 200, response.read()
    for line in response:
        if line.startswith(b"data: {"):
            yield None
    connection.close()


def measure(arrivals: Iterator[None]) -> tuple[float, list[float]]:
    """Return the TTFT and the list of gaps after it, in seconds."""
    times = [time.perf_counter() for _ in arrivals]
    gaps = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
    return gaps[0], gaps[1:]


def main() -> None:
    """Measure both paths and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=40, help="each way (default: 40)")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    ways = {"direct": direct, "gateway": through_gateway}
    ttft: dict[str, list[float]] = {name: [] for name in ways}
    itl: dict[str, list[float]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory() as folder:
        write_model_repository(Path(folder), MODEL, {"model": "demo"}, instances=1)
        with (
            start_server(Path(folder)) as server,
            GatewayProcess(bind("127.0.0.1", 0, "port"), server.grpc_url) as gateway,
        ):
            addresses = {"direct": server.grpc_url, "gateway": gateway.address}
            for number in range(-2, args.requests):  # negative numbers are warm-up requests
                for name, way in ways.items():
                    prompt = f"{number}, {name}: what does os.path.join do?"
                    first, gaps = measure(way(addresses[name], prompt, args.max_tokens))
                    if number >= 0:
                        ttft[name].append(first)
                        itl[name] += gaps
    for label, values in (("TTFT", ttft), ("ITL", itl)):
        direct_ms, gateway_ms = (1e3 * median(values[name]) for name in ways)
        print(
            f"{label}: direct {direct_ms:.2f} ms, through the gateway {gateway_ms:.2f} ms, "
            f"added {gateway_ms - direct_ms:+.2f} ms (medians, {args.requests} requests each way)"
        )


if __name__ == "__main__":
    main()
