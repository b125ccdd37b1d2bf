"""Measures what LoRA adapters cost: requests with adapters, and without, in turn."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from paged_backend.checkpoint.hub import resolve_checkpoint
from paged_backend.checkpoint.peft import CONFIG, WEIGHTS, ModuleSizes
from paged_backend.engine.engine import Engine
from paged_backend.engine.executors import open_executor
from paged_backend.tools.bench.comparison import Comparison, Pair
from paged_backend.tools.bench.in_turn import (
    REQUESTS_PER_SEQUENCE,
    rates_and_ratio,
    run_requests,
)
from paged_backend.values.config import EngineConfig
from paged_backend.values.lora import LoRARequest
from paged_backend.values.request import Request
from paged_backend.values.sampling_params import SamplingParams

_PROMPT_TOKENS, _ANSWER_TOKENS = 64, 128
_FIRST_TOKEN = 16  # ids below it may be special tokens
_STD = 0.02  # standard deviation of the weights of the adapters


@dataclass(frozen=True, slots=True)
class AdaptersFigures:
    """Tokens per second with LoRA enabled (`engine`) and without it (`peer`), over all rounds."""

    comparison: Comparison
    at_once: int

    def as_dict(self) -> dict[str, Any]:
        """Return the values to save, rounds included."""
        return {**self.comparison.as_dict(), "at_once": self.at_once}

    def line(self) -> str:
        """Return a row for people."""
        return f"{self.comparison.name:8} {self.at_once:7}  {rates_and_ratio(self.comparison)}"


HEADER = "requests at once  disabled   enabled  ratio"


class AdaptersBench:
    """Two engines of a model in memory: one without LoRA, and one that holds adapters.

    The adapters have random weights in all layers that adapters can change.

    Args:
        config: the engine's options.
        ranks: the rank of each adapter.

    Raises:
        ConfigError: an option is wrong, or the platform has no adapters.
    """

    def __init__(self, config: EngineConfig, ranks: Sequence[int]) -> None:
        self._plain = _open(replace(config, enable_lora=False))
        count, rank = len(ranks), max(ranks)
        self._engine = _open(replace(config, enable_lora=True, max_loras=count, max_lora_rank=rank))
        self._adapters: list[LoRARequest] = []
        slots: Any = self._engine.executor.adapters
        with tempfile.TemporaryDirectory() as folder:
            for number, rank in enumerate(ranks, 1):
                adapter = LoRARequest(f"adapter-{number}", number, str(Path(folder, str(number))))
                write_adapter(Path(adapter.lora_path), slots.sizes, rank)
                self._engine.adapters.load(adapter)
                self._adapters.append(adapter)
        self._num_requests = 0

    def measure(self, numbers: Sequence[int], rounds: int) -> Iterator[AdaptersFigures]:
        """Yield the figures of base requests and of the adapters' for each number at once."""
        kinds: dict[str, Sequence[LoRARequest | None]]
        kinds = {"base": [None], "adapters": self._adapters}
        for at_once in numbers:
            comparisons = [
                Comparison(kind, f"{kind}, {at_once} at once (tokens/s)", is_rate=True)
                for kind in kinds
            ]
            for number in range(rounds + 1):
                sides: list[tuple[Engine, Sequence[LoRARequest | None]]] = [(self._plain, [None])]
                sides += [(self._engine, adapters) for adapters in kinds.values()]
                first = number % len(sides)  # each side is the first one in turn
                rates: dict[int, float] = {}
                for index in [*range(first, len(sides)), *range(first)]:
                    engine, adapters = sides[index]
                    rates[index] = self._run(engine, adapters, at_once)
                if number:  # the first round captures graphs
                    for index, comparison in enumerate(comparisons, 1):
                        comparison.rounds.append(Pair(rates[index], rates[0]))
            for comparison in comparisons:
                yield AdaptersFigures(comparison, at_once)

    def _run(self, engine: Engine, adapters: Sequence[LoRARequest | None], at_once: int) -> float:
        """Run requests that name adapters in turns; returns tokens per second."""
        number = REQUESTS_PER_SEQUENCE * at_once
        requests = [self._request(engine, adapters[i % len(adapters)]) for i in range(number)]
        return run_requests(engine, requests, at_once)

    def _request(self, engine: Engine, lora: LoRARequest | None) -> Request:
        self._num_requests += 1
        rng, vocab_size = random.Random(self._num_requests), engine.limits.vocab_size
        prompt = [rng.randrange(_FIRST_TOKEN, vocab_size) for _ in range(_PROMPT_TOKENS)]
        params = SamplingParams(temperature=0, max_tokens=_ANSWER_TOKENS, ignore_eos=True)
        return Request(str(self._num_requests), prompt, params, lora=lora)


def write_adapter(folder: Path, sizes: Mapping[str, ModuleSizes], rank: int) -> None:
    """Write an adapter with random weights for all modules, as PEFT saves it."""
    tensors = {}
    for name, (inputs, outputs) in sizes.items():
        for letter, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            tensors[f"base_model.model.{name}.lora_{letter}.weight"] = torch.randn(shape) * _STD
    folder.mkdir()
    save_file(tensors, folder / WEIGHTS)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (folder / CONFIG).write_text(json.dumps(config))


def _open(config: EngineConfig) -> Engine:
    return Engine(config, open_executor(config, resolve_checkpoint(config).model))
