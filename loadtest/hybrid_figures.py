"""Figures of a small hybrid on a CPU: decodes beside transformers, and prefix hits.

Makes checkpoints of Qwen3-Next and Qwen 3.5 with random weights. Decodes 16 sequences with the
engine and with transformers' cached generation, in turn, and prints tokens per second. Then prints
the time to the first token of a prompt of 8,100 tokens, without and with its first 8,000 cached.

    python loadtest/hybrid_figures.py --rounds 4
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from paged_backend.engine.engine import Engine
from paged_backend.tools.bench.in_turn import open_engine
from paged_backend.tools.bench.requests import greedy
from paged_backend.values.config import EngineConfig

NUM_SEQS, NUM_TOKENS, PREFIX = 16, 64, 8000
LAYERS = [*["linear_attention"] * 3, "full_attention"]
HEADS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "eos_token_id": None,
    "vocab_size": 8192,
}
NEXT = {
    "model_type": "qwen3_next",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "layer_types": LAYERS * 2,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "max_position_embeddings": 2048,
}
DENSE = {
    "model_type": "qwen3_5_text",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "layer_types": LAYERS,
    "max_position_embeddings": 16_384,
}


def make_model(folder: Path, sizes: dict[str, Any]) -> Any:
    """Save a checkpoint with random weights, and return transformers' model."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**HEADS, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    return model.eval()


def make_engine(folder: Path, dtype: str) -> Engine:
    """Return an engine over a pool of 512 MiB."""
    options = {"model": str(folder), "dtype": dtype, "max_num_seqs": NUM_SEQS}
    return open_engine(EngineConfig.from_mapping({**options, "kv_cache_memory_bytes": 2**29}))


def make_prompt(length: int, rng: random.Random) -> list[int]:
    """Return random tokens."""
    return [rng.randrange(3, 8000) for _ in range(length)]


def decode(engine: Engine, prompts: list[list[int]], name: str) -> float:
    """Return the tokens per second of the steps after all prompts."""
    for number, prompt in enumerate(prompts):
        engine.add_request(greedy(f"{name}-{number}", prompt, NUM_TOKENS))
    counts = dict.fromkeys(range(len(prompts)), 0)
    started, before = 0.0, 0
    while engine.has_unfinished:
        for output in engine.step():
            counts[int(output.request_id.rpartition("-")[2])] += len(output.new_token_ids)
        if not started and all(counts.values()):
            started, before = time.perf_counter(), sum(counts.values())
    return (sum(counts.values()) - before) / (time.perf_counter() - started)


@torch.inference_mode()
def generate(model: Any, prompts: list[list[int]]) -> float:
    """Return the tokens per second of transformers' generation, without the first tokens."""
    ids = torch.tensor(prompts)
    seconds = []
    for number in (1, NUM_TOKENS):
        started = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=number,
            min_new_tokens=number,
            pad_token_id=0,
        )
        seconds.append(time.perf_counter() - started)
    return len(prompts) * (NUM_TOKENS - 1) / (seconds[1] - seconds[0])


def first_token(engine: Engine, prompt: list[int], name: str) -> tuple[float, int]:
    """Return the seconds to the first token of a prompt, and its cached tokens."""
    started = time.perf_counter()
    engine.add_request(greedy(name, prompt, 1))
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    return time.perf_counter() - started, outputs[0].num_cached_tokens


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    options = parser.parse_args()
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        model = make_model(Path(name) / "next", NEXT).to(getattr(torch, options.dtype))
        engine = make_engine(Path(name) / "next", options.dtype)
        for turn in range(options.rounds + 1):  # the first one compiles kernels
            prompts = [make_prompt(64, rng) for _ in range(NUM_SEQS)]
            ours, theirs = decode(engine, prompts, str(turn)), generate(model, prompts)
            if turn:
                print(
                    f"decode: {ours:.0f} tokens/s, transformers {theirs:.0f}: {ours / theirs:.2f}"
                )
        make_model(Path(name) / "dense", DENSE)
        engine = make_engine(Path(name) / "dense", options.dtype)
        for turn in range(options.rounds + 1):
            shared = make_prompt(PREFIX, rng)
            cold, _ = first_token(engine, shared + make_prompt(100, rng), f"cold-{turn}")
            warm, cached = first_token(engine, shared + make_prompt(100, rng), f"warm-{turn}")
            if turn:
                share = f"{cached} of {PREFIX} tokens cached"
                print(f"first token: {cold:.3f} s, then {warm:.3f} s ({share}): {warm / cold:.3f}")


if __name__ == "__main__":
    main()
