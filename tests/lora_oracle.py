"""Adapters in PEFT's format, and transformers' models with them merged into the weights.

A device's machine has no peft.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from oracle import Oracle, mixed_work
from safetensors.torch import save_file

from paged_backend.engine.engine import Engine
from paged_backend.values.lora import numbered
from paged_backend.values.outputs import SequenceOutput
from paged_backend.values.request import Request
from paged_backend.values.sampling_params import SamplingParams

Outputs = Mapping[str, Sequence[SequenceOutput]]
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
ADAPTERS: tuple[tuple[int, tuple[str, ...]], ...] = (
    (4, (*ATTENTION, *MLP)),
    (1, ("q_proj", "v_proj")),
    (16, ("k_proj", "up_proj", "down_proj")),
)
"""Rank and modules of each adapter."""


class LoraOracle:
    """The float32 models of a checkpoint, without and with adapters of different ranks.

    Args:
        family: the family of the checkpoint.
        folder: where the checkpoint and the adapters are written.
        adapters: rank and modules of each adapter; None for `ADAPTERS`.
        sizes: sizes of the checkpoint.
    """

    def __init__(
        self,
        family: str,
        folder: Path,
        adapters: Sequence[tuple[int, tuple[str, ...]]] | None = None,
        **sizes: object,
    ) -> None:
        base = Oracle(family, folder / "model", **sizes)
        self.folder = base.folder
        self.models = {"": base}
        generator = torch.Generator().manual_seed(11)
        for index, (rank, targets) in enumerate(adapters or ADAPTERS):
            adapted, tensors = deepcopy(base), {}
            for name, module in adapted.model.named_modules():
                if name.rpartition(".")[2] not in targets:
                    continue
                outputs, inputs = module.weight.shape
                a, b = (
                    0.3 * torch.randn(shape, generator=generator)
                    for shape in ((rank, inputs), (outputs, rank))
                )
                module.weight.data += 2 * b @ a
                tensors[f"base_model.model.{name}.lora_A.weight"] = a
                tensors[f"base_model.model.{name}.lora_B.weight"] = b
            config = {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "r": rank,
                "lora_alpha": 2 * rank,
                "target_modules": list(targets),
            }
            path = folder / f"adapter-{index}"
            path.mkdir()
            (path / "adapter_config.json").write_text(json.dumps(config))
            save_file(tensors, path / "adapter_model.safetensors")
            self.models[path.name] = adapted
        self.modules = {name: str(folder / name) for name in self.models if name}

    def requests(self, count: int, length: int, max_tokens: int, seed: int = 0) -> list[Request]:
        """Greedy requests of the base model and of all adapters in turns."""
        names = list(self.models)
        requests = []
        for index, (prompt, limit) in enumerate(mixed_work(count, seed)):
            params = SamplingParams(temperature=0, max_tokens=min(limit, max_tokens))
            request = Request(str(index), prompt[:length], params)
            requests.append(self.with_adapter(request, names[index % len(names)]))
        return requests

    def with_adapter(self, request: Request, name: str) -> Request:
        """Return a request for another adapter, or for the base model if the name is empty."""
        return replace(request, lora=numbered(self.modules).get(name))

    def model_of(self, request: Request) -> Oracle:
        """Return the model with the request's adapter."""
        return self.models["" if request.lora is None else request.lora.lora_name]

    def confirm(self, requests: Sequence[Request], outputs: Outputs) -> None:
        """Check that each token is the likeliest of the model with the request's adapter."""
        for request in requests:
            answer = answer_of(outputs[request.request_id])
            work = [(request.prompt_token_ids, request.params.max_tokens)]
            self.model_of(request).confirm(work, [answer])


def run_requests(engine: Engine, requests: Sequence[Request]) -> dict[str, list[SequenceOutput]]:
    """All outputs of each request; all requests are submitted at once."""
    outputs: dict[str, list[SequenceOutput]] = {}
    for request in requests:
        engine.add_request(request)
    while engine.has_unfinished:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.scheduler.check_invariants()
    return outputs


def answer_of(outputs: Sequence[SequenceOutput]) -> list[int]:
    """The tokens of a request."""
    return [token for output in outputs for token in output.new_token_ids]


def lora_options(oracle: LoraOracle, **options: Any) -> dict[str, Any]:
    """Options of an engine with the adapters."""
    return {"enable_lora": True, "lora_modules": oracle.modules, "max_loras": 3, **options}
