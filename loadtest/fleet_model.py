"""A model of many engines behind gateways: real schedulers and real routing, simulated devices.

Each engine is the engine's own scheduler with its own pool of KV blocks; each gateway chooses
engines with the gateway's own router. Only devices, networks and clients are simulated, in
simulated time (SimPy). A step takes what an H200 takes for Llama-3-8B in bfloat16: a fit to
loadtest/results/decode-llama-3-8b-vllm-h200.json. Schedulers and routers take real processor time,
which is measured and printed; no simulated time passes meanwhile.

    python loadtest/fleet_model.py --engines 400 --rate 10000 --seconds 5
    python loadtest/fleet_model.py --engines 100 --rate 2000 --policy random
    python loadtest/fleet_model.py --engines 100 --rate 2000 --failures-per-minute 60

Clients send prompts of a shared prefix (a system prompt, a document) and a text of their own. The
prefixes are as popular as Zipf's law says. An engine that fails loses its KV cache and starts again
after a while; its requests wait for it and go on after the tokens that their clients have.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from array import array
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import simpy
from paged_client.routing import PrefixRouter, prefix_hashes

from paged_backend.core.scheduler import Scheduler
from paged_backend.core.scheduler_config import SchedulerConfig
from paged_backend.core.scheduler_output import SchedulerOutput
from paged_backend.tools.bench.host import any_tokens, new_scheduler, num_samples
from paged_backend.values.outputs import SequenceOutput
from paged_backend.values.request import Request
from paged_backend.values.sampling_params import SamplingParams

Process = Generator[simpy.Event, Any, None]

# Seconds of a step: the weights, each token to sample, each token of a prompt, and each token of
# keys and values that is read.
STEP_S, SAMPLE_S, PROMPT_TOKEN_S, KV_TOKEN_S = 4.36e-3, 16e-6, 25e-6, 30e-9
ZIPF = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Sizes of a run; lengths are in tokens."""

    engines: int = 100
    gateways: int = 1
    rate: float = 2000.0  # requests per second
    seconds: float = 10.0  # simulated time in which requests are sent
    prefixes: int = 1000
    prefix_len: int = 512
    input_len: int = 128  # a request's own text
    output_len: int = 64
    blocks: int = 20_000  # KV blocks of an engine
    max_num_seqs: int = 256
    failures_per_minute: float = 0.0  # in the whole fleet
    restart_s: float = 10.0
    policy: str = "prefix"
    seed: int = 0


POLICIES = ("prefix", "least", "random")


@dataclass(slots=True)
class Sent:
    """A request, and what its client has."""

    request: Request
    sent_s: float
    engine: str = ""
    first_s: float | None = None
    done_s: float | None = None
    num_cached: int = 0
    token_ids: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Costs:
    """Real processor time."""

    routing_s: float = 0.0
    scheduling_s: float = 0.0
    num_steps: int = 0
    device_s: float = 0.0  # simulated


class Engine:
    """A scheduler and its device, as a process in simulated time."""

    def __init__(
        self,
        env: simpy.Environment,
        fleet: Fleet,
        costs: Costs,
        on_end: Callable[[Sent], None],
    ) -> None:
        self._env, self._fleet, self._costs, self._on_end = env, fleet, costs, on_end
        self.open: dict[str, Sent] = {}
        self.num_failures = 0
        self._is_up = True
        self._scheduler = self._new_scheduler()
        self._work = env.event()
        self._process = env.process(self._run())

    def add(self, sent: Sent) -> None:
        """Take a request, and go on after the tokens that its client has."""
        self.open[sent.request.request_id] = sent
        if self._is_up:
            self._queue(sent)

    def fail(self) -> None:
        """End now, if it runs."""
        if self._is_up:
            self.num_failures += 1
            self._is_up = False
            self._process.interrupt()

    def _queue(self, sent: Sent) -> None:
        progress = (sent.token_ids,) if sent.token_ids else ()
        self._scheduler.add_request(sent.request, seed=0, progress=progress)
        if not self._work.triggered:
            self._work.succeed()

    def _new_scheduler(self) -> Scheduler:
        fleet = self._fleet
        max_model_len = fleet.prefix_len + fleet.input_len + fleet.output_len + 1
        limits = fleet.max_num_seqs, max(2048, fleet.max_num_seqs), max_model_len
        return new_scheduler(SchedulerConfig(*limits, True, frozenset()), fleet.blocks)

    def _run(self) -> Process:
        while True:
            try:
                yield from self._steps()
            except simpy.Interrupt:
                yield self._env.timeout(self._fleet.restart_s)
                self._scheduler, self._is_up = self._new_scheduler(), True
                for sent in self.open.values():
                    self._queue(sent)

    def _steps(self) -> Process:
        while True:
            if not self._scheduler.has_unfinished:
                self._work = self._env.event()
                yield self._work
            began = time.process_time()
            output = self._scheduler.schedule()
            self._costs.scheduling_s += time.process_time() - began
            step_s = self._step_s(output)
            self._costs.device_s += step_s
            self._costs.num_steps += 1
            yield self._env.timeout(step_s)
            began = time.process_time()
            outputs = self._scheduler.update_from_output(any_tokens(output))
            self._costs.scheduling_s += time.process_time() - began
            for part in outputs:
                self._deliver(part)

    def _step_s(self, output: SchedulerOutput) -> float:
        """The device's time for a step."""
        num_tokens = sum(item.num_tokens for item in output.slices)
        running = self._scheduler.sequences.running.values()
        num_kv = sum(seq.num_computed_tokens for seq in running)
        prompt = max(0, num_tokens - sum(len(item.sample_seq_ids) for item in output.slices))
        sampling_s = num_samples(output) * SAMPLE_S
        return STEP_S + sampling_s + prompt * PROMPT_TOKEN_S + num_kv * KV_TOKEN_S

    def _deliver(self, output: SequenceOutput) -> None:
        sent = self.open[output.request_id]
        if sent.first_s is None:
            sent.first_s, sent.num_cached = self._env.now, output.num_cached_tokens
        sent.token_ids += output.new_token_ids
        if output.finish_reason is not None:
            sent.done_s = self._env.now
            del self.open[output.request_id]
            self._on_end(sent)


class Gateway:
    """Chooses engines, with the open requests that it knows of: its own."""

    def __init__(self, fleet: Fleet, engines: dict[str, Engine], costs: Costs) -> None:
        self._policy, self._engines, self._costs = fleet.policy, engines, costs
        self._router = PrefixRouter()
        self._draw = random.Random(fleet.seed)
        self._loads = dict.fromkeys(engines, 0)

    def send(self, sent: Sent) -> None:
        """Send a request to an engine."""
        sent.engine = self._choose(sent.request.prompt_token_ids)
        self._loads[sent.engine] += 1
        self._engines[sent.engine].add(sent)

    def end(self, sent: Sent) -> None:
        """Note that a request of this gateway has ended."""
        self._loads[sent.engine] -= 1

    def _choose(self, prompt: list[int]) -> str:
        if self._policy == "random":
            return self._draw.choice(list(self._engines))
        began = time.process_time()
        ids = array("i", prompt)
        hashes = prefix_hashes("model", "", ids) if self._policy == "prefix" else []
        choice = self._router.choose(hashes, self._loads)
        self._costs.routing_s += time.process_time() - began
        return choice.server


class Model:
    """One run."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._env = simpy.Environment()
        self._draw = random.Random(fleet.seed)
        self._costs = Costs()
        self._engines = {
            f"engine-{number}": Engine(self._env, fleet, self._costs, self._end)
            for number in range(fleet.engines)
        }
        self._gateways = [Gateway(fleet, self._engines, self._costs) for _ in range(fleet.gateways)]
        numbers = np.random.default_rng(fleet.seed)
        self._prefixes = numbers.integers(3, 2**15, (fleet.prefixes, fleet.prefix_len)).tolist()
        weights = [1 / (rank + 1) ** ZIPF for rank in range(fleet.prefixes)]
        self._popularity = list(accumulate(weights))
        self._numbers = numbers
        self._requests: list[Sent] = []

    def run(self) -> dict[str, Any]:
        """Send all requests, wait for their answers, and return the figures."""
        fleet, env = self._fleet, self._env
        arrivals = env.process(self._arrive())
        if fleet.failures_per_minute:
            env.process(self._fail())
        env.run(until=arrivals)
        while any(engine.open for engine in self._engines.values()):
            env.run(until=env.now + 0.1)
        return self._figures()

    def _arrive(self) -> Process:
        fleet = self._fleet
        while self._env.now < fleet.seconds:
            yield self._env.timeout(self._draw.expovariate(fleet.rate))
            (prefix,) = self._draw.choices(self._prefixes, cum_weights=self._popularity)
            prompt = prefix + self._numbers.integers(3, 2**15, fleet.input_len).tolist()
            params = SamplingParams(temperature=0, max_tokens=fleet.output_len, ignore_eos=True)
            number = len(self._requests)
            sent = Sent(Request(str(number), prompt, params), self._env.now)
            self._requests.append(sent)
            self._gateway_of(sent).send(sent)

    def _end(self, sent: Sent) -> None:
        self._gateway_of(sent).end(sent)

    def _gateway_of(self, sent: Sent) -> Gateway:
        return self._gateways[int(sent.request.request_id) % len(self._gateways)]

    def _fail(self) -> Process:
        while True:
            yield self._env.timeout(self._draw.expovariate(self._fleet.failures_per_minute / 60))
            self._draw.choice(list(self._engines.values())).fail()

    def _figures(self) -> dict[str, Any]:
        fleet, costs, sent = self._fleet, self._costs, self._requests
        times = [(item.sent_s, item.first_s, item.done_s) for item in sent]
        assert all(first is not None and done is not None for _, first, done in times)
        first_ms = [1e3 * (first - start) for start, first, _ in times if first is not None]
        whole_ms = [1e3 * (done - start) for start, _, done in times if done is not None]
        prompt_len = fleet.prefix_len + fleet.input_len
        end_s = max(done for _, _, done in times if done is not None)
        return {
            "requests": len(sent),
            "lost_tokens": sum(fleet.output_len - len(item.token_ids) for item in sent),
            "requests_per_s": len(sent) / end_s,
            "output_tokens_per_s": len(sent) * fleet.output_len / end_s,
            "ttft_ms_p50": float(np.percentile(first_ms, 50)),
            "ttft_ms_p99": float(np.percentile(first_ms, 99)),
            "e2e_ms_p99": float(np.percentile(whole_ms, 99)),
            "hit_rate": sum(item.num_cached for item in sent) / (len(sent) * prompt_len),
            "device_busy": costs.device_s / (fleet.engines * end_s),
            "failures": sum(engine.num_failures for engine in self._engines.values()),
            "routing_us_per_request": 1e6 * costs.routing_s / len(sent),
            "scheduling_us_per_step": 1e6 * costs.scheduling_s / costs.num_steps,
            "device_us_per_step": 1e6 * costs.device_s / costs.num_steps,
        }


def main(argv: list[str] | None = None) -> int:
    """Run one fleet, and print its figures as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    defaults = Fleet()
    for name in Fleet.__slots__:
        default = getattr(defaults, name)
        choices = POLICIES if name == "policy" else None
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=type(default), default=default, choices=choices
        )
    args = parser.parse_args(argv)
    for name, value in vars(args).items():
        lowest = 0 if name in ("failures_per_minute", "seed", "restart_s") else 1e-9
        if name != "policy" and not lowest <= value < 1e9:
            parser.error(f"--{name.replace('_', '-')}: must be above 0, got {value}")
    print(json.dumps({"fleet": vars(args), "figures": Model(Fleet(**vars(args))).run()}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
