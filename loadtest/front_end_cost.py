"""The processor time that a streamed response takes in each process of a server.

Starts a real server with an engine that has no model: its steps take a simulated device a given
time, whatever the batch. Sends it streams over gRPC, and prints the processor time of the engine,
the front ends, tritonserver and the client for each response and for each token, and the gaps
between the responses that the client saw. If any process cannot follow, the tokens of several steps
arrive in one response, so that there are fewer responses than tokens.

    python loadtest/front_end_cost.py --streams 256 --step-ms 16
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from paged_backend.launch.repository import write_model_repository
from paged_backend.launch.server_process import start_server

STEP_MS = "PAGED_SIMULATED_STEP_MS"  # environment variable of the engine
MAX_MODEL_LEN = 1024
MODEL = f"""\
from paged_backend.process import engine_client

engine_client.ENGINE = ({__file__!r},)

from paged_backend.serving.model import TritonPythonModel
"""


def run_engine() -> int:
    """Be the engine's process."""
    from paged_backend.checkpoint.hub import resolve_checkpoint
    from paged_backend.checkpoint.model_config import load_model_config
    from paged_backend.engine.engine import Engine
    from paged_backend.platforms.simulated.model_runner import SimulatedStep
    from paged_backend.process import engine_loop, engine_process
    from paged_backend.tools.bench.simulated_device import SimulatedExecutor

    drawn = random.Random(0)

    class Executor(SimulatedExecutor):
        def launch(self, output: Any, guide: Any = None) -> SimulatedStep:
            """Launch a step that returns tokens of which few are frequent, as in a text."""
            step = super().launch(output, guide)
            token_ids = [[3 + int(1500 * drawn.random() ** 3)] for _ in step.token_ids]
            return replace(step, token_ids=token_ids)

    def load(config: Any) -> tuple[Engine, Any]:
        checkpoint = resolve_checkpoint(config)
        vocab_size = load_model_config(checkpoint.model).vocab_size
        executor = Executor(config, vocab_size, MAX_MODEL_LEN)
        executor.device.reset(float(os.environ[STEP_MS]) / 1e3)
        return Engine(config, executor), checkpoint

    engine_loop.load = load
    return engine_process.main()


@dataclass(frozen=True)
class Load:
    """The requests of a run."""

    streams: int  # requests at once
    requests: int
    output_len: int  # tokens of each
    processes: int  # processes of the client

    def send(self, address: str, report: Path) -> dict[str, Any]:
        """Send them, and return what the load tester has saved."""
        command = [
            *(sys.executable, "-m", "paged_backend.cli", "bench", "serve"),
            *("--base-url", address, "--max-concurrency", str(self.streams)),
            *("--num-prompts", str(self.requests), "--input-len", "64", "--prompt-format", "ids"),
            *("--output-len", str(self.output_len), "--ignore-eos", "--save", str(report)),
            *("--processes", str(self.processes)),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (run,) = json.loads(report.read_text())["runs"]
        found: dict[str, Any] = run
        return found


def role(process: psutil.Process) -> str:
    """Return what a process of the server does."""
    command = " ".join(process.cmdline())
    if "triton_python_backend_stub" in command:
        return "front ends"
    if __file__ in command:
        return "engine"
    return "tritonserver" if process.name() == "tritonserver" else "others"


def seconds_of(processes: list[psutil.Process]) -> Counter[str]:
    """Return the processor time of the server's processes by what they do, and of our children."""
    seconds: Counter[str] = Counter()
    for process in processes:
        times = process.cpu_times()
        seconds[role(process)] += times.user + times.system
    own = os.times()
    seconds["client"] = own.children_user + own.children_system
    return seconds


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-ms", type=float, default=16, help="a step's time (default: 16)")
    parser.add_argument("--streams", type=int, default=256, help="at once (default: 256)")
    parser.add_argument("--rounds", type=int, default=3, help="requests of each (default: 3)")
    parser.add_argument("--output-len", type=int, default=128, help="tokens of each (default: 128)")
    parser.add_argument("--instances", type=int, default=1, help="front ends (default: 1)")
    parser.add_argument("--processes", type=int, default=1, help="of the client (default: 1)")
    args = parser.parse_args()
    os.environ[STEP_MS] = str(args.step_ms)
    options = {"model": "demo", "max_num_seqs": args.streams, "max_model_len": MAX_MODEL_LEN}
    with tempfile.TemporaryDirectory() as folder:
        repository, report = Path(folder, "models"), Path(folder, "report.json")
        model = write_model_repository(repository, "paged_llm", options, args.instances)
        (model / "1" / "model.py").write_text(MODEL)
        with start_server(repository) as server:
            Load(args.streams, args.streams, 16, args.processes).send(server.grpc_url, report)
            root = psutil.Process(server.pid)
            processes = [root, *root.children(recursive=True)]
            before = seconds_of(processes)
            num_requests = args.streams * args.rounds
            load = Load(args.streams, num_requests, args.output_len, args.processes)
            run = load.send(server.grpc_url, report)
            used = seconds_of(processes) - before
    num_tokens = run["num_output_tokens"]
    num_responses = len(run["samples"]["itl_ms"]) + len(run["samples"]["ttft_ms"])
    gap_ms = run["latencies"]["itl_ms"]["median"]
    print(
        f"{args.streams} streams, {args.instances} front ends, steps of {args.step_ms:g} ms: "
        f"{num_responses} responses, {num_tokens / num_responses:.2f} tokens in each; "
        f"{run['output_throughput']:.0f} tokens/s; ITL (median) {gap_ms:.1f} ms, "
        f"{gap_ms / args.step_ms:.2f} steps"
    )
    for name in ("engine", "front ends", "tritonserver", "client"):
        each, of_token = (1e6 * used[name] / count for count in (num_responses, num_tokens))
        print(f"{name:13} {each:6.1f} us for each response {of_token:6.1f} us for each token")


if __name__ == "__main__":
    if "--run-dir" in sys.argv:
        status = run_engine()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    main()
