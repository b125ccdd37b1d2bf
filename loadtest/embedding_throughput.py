"""Texts per second of an encoder, and of sentence-transformers in another environment.

Both encode the same texts of 4 to 48 words in turn, in one call each, with a BERT of MiniLM's shape
(6 layers of 384) and random weights. Prints the medians of each and of the ratios of the rounds,
and how much our embeddings differ from those that transformers computes in float32::

    python3 -m venv /tmp/peer-st
    /tmp/peer-st/bin/pip install "torch==2.13.*" sentence-transformers
    python loadtest/embedding_throughput.py --peer-python /tmp/peer-st/bin/python
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertModel, BertTokenizerFast

from paged_backend import LLM

WORDS = [f"w{number}" for number in range(3000)]
PAUSE_S = 0.3  # in which threads of the other side stop to spin
PEER = """
import json, sys, time
import torch
from sentence_transformers import SentenceTransformer

folder, dtype, threads = sys.argv[1:]
torch.set_num_threads(int(threads))
model = SentenceTransformer(folder, device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})
print("ready", flush=True)
for line in sys.stdin:
    texts = json.loads(line)
    start = time.perf_counter()
    model.encode(texts, show_progress_bar=False)
    print(time.perf_counter() - start, flush=True)
"""


def make_texts(count: int, seed: int) -> list[str]:
    """Make random texts of 4 to 48 words, each of which is a token."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(4, 48))) for _ in range(count)]


def write_model(folder: Path) -> None:
    """Write a BERT of MiniLM's shape with random weights, and sentence-transformers' files."""
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizerFast(vocab_file=str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    shape = BertConfig(
        vocab_size=30522,
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
    )
    BertModel(shape).save_pretrained(folder)
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": path,
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, (path, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for path in filter(None, kinds):
        (folder / path).mkdir()
    pooling = {"word_embedding_dimension": 384, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


@torch.inference_mode()
def largest_difference(engine: LLM, folder: Path, texts: Sequence[str]) -> float:
    """Return the largest difference of a number of our embeddings from transformers'."""
    model = BertModel.from_pretrained(folder, dtype=torch.float32)
    tokenizer = BertTokenizerFast.from_pretrained(folder)
    largest = 0.0
    for text, found in zip(texts, engine.embed(texts), strict=True):
        hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        wanted = torch.nn.functional.normalize(hidden.mean(0), dim=0)
        difference = (torch.tensor(found.outputs.embedding) - wanted).abs().max()
        largest = max(largest, float(difference))
    return largest


class SentenceTransformersPeer:
    """The process of sentence-transformers."""

    def __init__(self, python: str, folder: Path, dtype: str, threads: int) -> None:
        self._process = subprocess.Popen(
            [python, "-c", PEER, str(folder), dtype, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)},
        )
        if self._read() != "ready":
            sys.exit("sentence-transformers did not load the model")

    def encode(self, texts: Sequence[str]) -> float:
        """Return the seconds for all texts."""
        assert self._process.stdin is not None
        print(json.dumps(texts), file=self._process.stdin, flush=True)
        return float(self._read())

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--peer-python", required=True, help="Python with sentence-transformers")
    parser.add_argument("--peer-dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--engine-options", default="{}", help="options of the engine as JSON")
    parser.add_argument("--texts", type=int, default=1000, help="texts in a call (default: 1000)")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    options: dict[str, Any] = json.loads(args.engine_options)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder)
        engine = LLM(name, **options)
        peer = SentenceTransformersPeer(
            args.peer_python, folder, args.peer_dtype, torch.get_num_threads()
        )
        rounds = []
        for seed in range(args.rounds + 1):
            texts = make_texts(args.texts, seed)
            start = time.perf_counter()
            engine.embed(texts)
            ours = time.perf_counter() - start
            time.sleep(PAUSE_S)
            rounds.append((ours, peer.encode(texts)))
            time.sleep(PAUSE_S)
        peer.close()
        difference = largest_difference(engine, folder, make_texts(100, args.rounds + 1))
    del rounds[0]  # both warm up
    ratios = sorted(theirs / ours for ours, theirs in rounds)
    for label, column in zip(
        ("engine", "sentence-transformers"), zip(*rounds, strict=True), strict=True
    ):
        print(f"{label}: {args.texts / statistics.median(column):.0f} texts/s")
    print(f"ratio: {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    print(f"largest difference from transformers in float32: {difference:.1e}")


if __name__ == "__main__":
    main()
