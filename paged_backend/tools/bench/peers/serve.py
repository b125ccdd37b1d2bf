"""Serves one engine to the benchmark: calls arrive on stdin as JSON lines, answers go to stdout.

It runs under the interpreter of the engine's environment, so it needs the standard library only:

    python serve.py PEER.py

PEER.py imports the engine and defines a class ``Peer``, which is a ``PeerEngine`` as described
below. The first call is ``{"load": settings}`` with the answer ``{"about": {...}}``. Later calls
are of four kinds:

- ``{"jobs": [[prompt, max_tokens], ...], "at_once": n}`` with the answer ``{"seconds": s}``
- ``{"decode": prompts, "warm_up": n, "steps": n}`` with the answer ``{"steps": seconds}``
- ``{"first_token": prompt}`` with the answer ``{"seconds": s}``
- ``{"steady": prompts}`` with the answer ``{"tokens_per_s": r, "attention": name}``

``decode`` and ``first_token`` need a ``DecodingEngine``, and ``steady`` a ``SteadyEngine``. After
``{"problem": text}`` the process ends, and so it does at the end of stdin. Between calls it waits
in a read.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections import deque
from itertools import pairwise
from typing import Any, Protocol, cast


class PeerEngine(Protocol):
    """An engine with its model loaded; it is made with the settings of the call ``load``."""

    about: dict[str, str]
    """Versions and number formats, for the report."""

    def add(self, index: int, prompt: list[int], max_tokens: int) -> None:
        """Accept a request for exactly ``max_tokens`` greedy tokens."""

    def step(self) -> list[tuple[int, int]]:
        """Compute; returns index and number of tokens of each request that has ended."""


class DecodingEngine(PeerEngine, Protocol):
    """An engine with requests that last until all are stopped."""

    def start(self, prompt: list[int]) -> None:
        """Accept a request without a last token."""

    def decode(self) -> list[str]:
        """Compute; returns the names of the requests that got a token.

        The list is empty where an engine launches a step before it has read the one before.
        """

    def stop(self) -> None:
        """End all requests."""


class SteadyEngine(PeerEngine, Protocol):
    """An engine that hides its steps and measures its own rate while all requests decode."""

    def steady(self, prompts: list[list[int]]) -> tuple[float, str]:
        """Run all prompts; returns tokens per second, and the name of the attention."""


def time_decode(
    peer: DecodingEngine, prompts: list[list[int]], warm_up: int, num_steps: int
) -> list[float]:
    """Return the seconds of steps in which all requests decode.

    Raises:
        RuntimeError: a step gave some requests no token.
    """
    for prompt in prompts:
        peer.start(prompt)
    begun: set[str] = set()
    while len(begun) < len(prompts):
        begun.update(peer.decode())
    for _ in range(warm_up):
        peer.decode()
    times = [time.perf_counter()]
    while len(times) <= num_steps:
        names = peer.decode()
        if names and len(names) < len(prompts):
            raise RuntimeError(f"a step decoded only {len(names)} of {len(prompts)}")
        if names:
            times.append(time.perf_counter())
    peer.stop()
    return [after - before for before, after in pairwise(times)]


def time_first_token(peer: DecodingEngine, prompt: list[int]) -> float:
    """Return the seconds from the request to its first token."""
    started = time.perf_counter()
    peer.start(prompt)
    while not peer.decode():
        pass
    seconds = time.perf_counter() - started
    peer.stop()
    return seconds


def run_jobs(peer: PeerEngine, jobs: list[tuple[list[int], int]], at_once: int) -> float:
    """Run all jobs, at most ``at_once`` of them at a time, and return the seconds.

    Raises:
        RuntimeError: a request ended with fewer or more tokens than it asked for.
    """
    started = time.perf_counter()
    waiting = deque(enumerate(jobs))
    wanted: dict[int, int] = {}
    while waiting or wanted:
        while waiting and len(wanted) < at_once:
            index, (prompt, max_tokens) = waiting.popleft()
            wanted[index] = max_tokens
            peer.add(index, prompt, max_tokens)
        for index, num_tokens in peer.step():
            if num_tokens != wanted.pop(index):
                raise RuntimeError(f"request {index} ended after {num_tokens} tokens")
    return time.perf_counter() - started


def load(path: str, settings: dict[str, Any]) -> PeerEngine:
    """Import a peer's file and make its engine."""
    spec = importlib.util.spec_from_file_location("paged_peer", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for their module
    spec.loader.exec_module(module)
    peer: PeerEngine = module.Peer(settings)
    return peer


def answered(peer: PeerEngine, call: dict[str, Any]) -> dict[str, Any]:
    """Carry out a call after the first one."""
    if "jobs" in call:
        return {"seconds": run_jobs(peer, call["jobs"], call["at_once"])}
    if "steady" in call:
        rate, attention = cast(SteadyEngine, peer).steady(call["steady"])
        return {"tokens_per_s": rate, "attention": attention}
    decoding = cast(DecodingEngine, peer)
    if "decode" in call:
        return {"steps": time_decode(decoding, call["decode"], call["warm_up"], call["steps"])}
    return {"seconds": time_first_token(decoding, call["first_token"])}


def main() -> int:
    """Answer calls until stdin ends or one of them fails."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not get between the answers
    peer: PeerEngine | None = None
    for line in sys.stdin:
        try:
            call = json.loads(line)
            if peer is None:
                peer = load(sys.argv[1], call["load"])
                answer: dict[str, Any] = {"about": peer.about}
            else:
                answer = answered(peer, call)
        except Exception as error:
            answer = {"problem": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
        if "problem" in answer:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
