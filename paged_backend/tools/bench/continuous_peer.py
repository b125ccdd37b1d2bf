"""Measures transformers' continuous batching in its own process.

A peer that fails, hangs or exhausts memory then costs one line of the report, not all of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from paged_backend.checkpoint.model_config import DTYPES
from paged_backend.platforms.select import is_gpu
from paged_backend.tools.bench.peers.transformers_peer import load_peer

NEW_TOKENS = 128  # the first request must last until the last one has begun
CPU_BATCH_TOKENS = 512
CPU_BLOCK = 32  # tokens; no release of transformers has smaller blocks


@dataclass(frozen=True, slots=True)
class PeerCase:
    """`batch_size` requests at once, each with a prompt of `context` random tokens."""

    folder: str
    load_format: str
    device: str
    dtype: str
    context: int
    batch_size: int
    seed: int


@dataclass(frozen=True, slots=True)
class PeerResult:
    """The result of a case: tokens per second while all requests decode, or the problem."""

    context: int
    batch_size: int
    tokens_per_s: float | None = None
    attention: str | None = None  # transformers' name of the attention that it used
    problem: str | None = None


def run_peer(case: PeerCase, max_seconds: float) -> PeerResult:
    """Measure in a new process, which is stopped after `max_seconds`."""
    command = [sys.executable, "-P", "-m", __name__, json.dumps(asdict(case))]
    offline = os.environ | {"HF_HUB_OFFLINE": "1"}  # otherwise it tries to download kernels
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=max_seconds, env=offline
        )
    except subprocess.TimeoutExpired:
        return _failure(case, f"took more than {max_seconds:g} s")
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return _failure(case, lines[-1])
    return PeerResult(**json.loads(done.stdout.splitlines()[-1]))


def measure(case: PeerCase) -> PeerResult:
    """Measure in this process.

    Raises:
        RuntimeError: requests failed, or never all decoded at the same time.
    """
    from transformers import AutoConfig, ContinuousBatchingConfig, GenerationConfig

    device = torch.device(case.device)
    model = load_peer(Path(case.folder), case.load_format, DTYPES[case.dtype], device)
    vocab_size = AutoConfig.from_pretrained(case.folder).vocab_size
    prompts = np.random.default_rng(case.seed).integers(
        vocab_size, size=(case.batch_size, case.context)
    )
    settings = GenerationConfig(  # type: ignore[no-untyped-call]  # untyped in its library
        max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    limits = ContinuousBatchingConfig()
    if not is_gpu(device):  # otherwise it allocates most of the machine's memory
        limits.max_batch_tokens = CPU_BATCH_TOKENS
        limits.num_blocks = case.batch_size * (-(-(case.context + NEW_TOKENS) // CPU_BLOCK) + 1)
    results = model.generate_batch(
        prompts.tolist(),
        generation_config=settings,
        continuous_batching_config=limits,
        record_timestamps=True,
    )
    errors = [result.error for result in results.values() if result.error is not None]
    if errors or len(results) < case.batch_size:
        raise RuntimeError(errors[0] if errors else f"only {len(results)} requests have ended")
    return PeerResult(
        case.context,
        case.batch_size,
        tokens_per_s=steady_rate([result.timestamps for result in results.values()]),
        attention=model.config._attn_implementation,
    )


def steady_rate(timestamps: list[list[float]]) -> float:
    """Tokens per second from the last request's first token to the first request's last.

    Args:
        timestamps: times in seconds at which each request's tokens arrived.

    Raises:
        RuntimeError: there is no such interval.
    """
    begin, end = max(times[0] for times in timestamps), min(times[-1] for times in timestamps)
    if end <= begin:
        raise RuntimeError(f"the first request had its {NEW_TOKENS} tokens before the last began")
    return sum(begin < time <= end for times in timestamps for time in times) / (end - begin)


def _failure(case: PeerCase, problem: str) -> PeerResult:
    return PeerResult(case.context, case.batch_size, problem=problem)


if __name__ == "__main__":
    print(json.dumps(asdict(measure(PeerCase(**json.loads(sys.argv[1]))))))
