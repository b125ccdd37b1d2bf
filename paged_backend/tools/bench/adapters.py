"""Measures what LoRA adapters cost: requests with adapters, and without, in turn."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from paged_backend.checkpoint.peft import CONFIG, WEIGHTS, ModuleSizes
from paged_backend.engine.engine import Engine
from paged_backend.tools.bench.comparison import Comparison, Pair
from paged_backend.tools.bench.in_turn import (
    ANSWER_TOKENS,
    REQUESTS_PER_SEQUENCE,
    TurnFigures,
    open_engine,
    random_prompt,
    rates_in_turn,
    run_requests,
)
from paged_backend.values.config import EngineConfig
from paged_backend.values.lora import LoRARequest
from paged_backend.values.request import Request
from paged_backend.values.sampling_params import SamplingParams

HEADER = "requests at once  disabled   enabled  ratio"
_STD = 0.02  # standard deviation of the weights of the adapters


class AdaptersBench:
    """Two engines of a model in memory: one without LoRA, and one that holds adapters.

    The adapters have random weights in all layers that adapters can change.

    Args:
        config: the engine's options.
        ranks: the rank of each adapter.
        dtype: the name of the data type of the adapters' files.

    Raises:
        ConfigError: an option is wrong, or the platform has no adapters.
    """

    def __init__(self, config: EngineConfig, ranks: Sequence[int], dtype: str) -> None:
        self._plain = open_engine(replace(config, enable_lora=False))
        limits: dict[str, Any] = {"max_loras": len(ranks), "max_lora_rank": max(ranks)}
        self._engine = open_engine(replace(config, enable_lora=True, **limits))
        self._adapters: list[LoRARequest] = []
        slots: Any = self._engine.executor.adapters
        with tempfile.TemporaryDirectory() as folder:
            for number, rank in enumerate(ranks, 1):
                adapter = LoRARequest(f"adapter-{number}", number, str(Path(folder, str(number))))
                write_adapter(Path(adapter.lora_path), slots.sizes, rank, dtype)
                self._engine.adapters.load(adapter)
                self._adapters.append(adapter)
        self._num_requests = 0

    def measure(self, numbers: Sequence[int], rounds: int) -> Iterator[TurnFigures]:
        """Yield the figures of base requests and of the adapters' for each number at once.

        `engine` has LoRA enabled, and `peer` has not.
        """
        kinds: dict[str, Sequence[LoRARequest | None]]
        kinds = {"base": [None], "adapters": self._adapters}
        for at_once in numbers:
            sides = [partial(self._run, self._plain, [None], at_once)]
            sides += [partial(self._run, self._engine, kind, at_once) for kind in kinds.values()]
            plain, *others = zip(*rates_in_turn(sides, rounds), strict=True)
            for kind, rates in zip(kinds, others, strict=True):
                pairs = [Pair(*pair) for pair in zip(rates, plain, strict=True)]
                label = f"{kind}, {at_once} at once (tokens/s)"
                comparison = Comparison(kind, label, is_rate=True, rounds=pairs)
                yield TurnFigures(comparison, at_once)

    def _run(
        self, engine: Engine, adapters: Sequence[LoRARequest | None], at_once: int, _: int
    ) -> float:
        """Run requests that name adapters in turns; returns tokens per second."""
        number = REQUESTS_PER_SEQUENCE * at_once
        requests = [self._request(engine, adapters[i % len(adapters)]) for i in range(number)]
        return run_requests(engine, requests, at_once)

    def _request(self, engine: Engine, lora: LoRARequest | None) -> Request:
        self._num_requests += 1
        prompt = random_prompt(self._num_requests, engine.limits.vocab_size)
        params = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
        return Request(str(self._num_requests), prompt, params, lora=lora)


def write_adapter(folder: Path, sizes: Mapping[str, ModuleSizes], rank: int, dtype: str) -> None:
    """Write an adapter with random weights for all modules, as PEFT saves it."""
    tensors = {}
    for name, (inputs, outputs) in sizes.items():
        for letter, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            weights = (torch.randn(shape) * _STD).to(getattr(torch, dtype))
            tensors[f"base_model.model.{name}.lora_{letter}.weight"] = weights
    folder.mkdir()
    save_file(tensors, folder / WEIGHTS)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (folder / CONFIG).write_text(json.dumps(config))
