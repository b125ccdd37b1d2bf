"""Extensions that live in this file only: each serves the right tokens."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict
from itertools import count
from pathlib import Path

import msgspec
import pytest
import torch
import torch.nn.functional as F
from oracle import Oracle, make_engine, mixed_work, run, tokens_of
from safetensors.torch import save_file
from torch import Tensor

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.decoder_tensors import decoder_tensors
from paged_backend.checkpoint.model_config import ModelConfig, load_model_config
from paged_backend.checkpoint.registry import Architecture, register_architecture, tensors_of
from paged_backend.checkpoint.rope import read_rope
from paged_backend.checkpoint.shape import ModelShape
from paged_backend.checkpoint.tensors import Role, Tensors
from paged_backend.core.drafter import Draft, Drafter
from paged_backend.core.scheduler_output import (
    DraftGuide,
    LaunchedStep,
    ModelRunnerOutput,
    SchedulerOutput,
    TokenMasks,
)
from paged_backend.core.sequence import Sequence
from paged_backend.engine.engine import Engine
from paged_backend.engine.worker import Worker
from paged_backend.executor.base import WorkerInfo
from paged_backend.executor.messages import decode_model_runner_output, encode
from paged_backend.models.attention import AttentionBackend, AttentionMetadata
from paged_backend.models.blocks import Attention, GatedMLP, prefixed
from paged_backend.models.layers import Kernels, register_linear_method
from paged_backend.models.linear import LinearSpec
from paged_backend.models.states import StateLayer
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import ConfigError
from paged_backend.values.outputs import FinishReason
from paged_backend.values.request import Request
from paged_backend.values.sampling_params import SamplingParams

# --- a family: norms follow attention and MLP, every other layer has another rotary table ---------


class ToyLayer:
    """One layer: x + norm(attention(x)), then the same with the MLP."""

    def __init__(self, config: ModelConfig, index: int, table: Tensor, kernels: Kernels) -> None:
        self.attention = Attention(config, index, f"model.layers.{index}", table, kernels)
        self.mlp = GatedMLP(config, index, f"model.layers.{index}.mlp", kernels)
        self.attention_norm = torch.empty(config.hidden_size, dtype=kernels.dtype)
        self.mlp_norm = torch.empty(config.hidden_size, dtype=kernels.dtype)

    def parameters(self) -> dict[str, Tensor]:
        return {
            **prefixed("self_attn", self.attention.parameters()),
            "post_attention_layernorm.weight": self.attention_norm,
            **prefixed("mlp", self.mlp.parameters()),
            "post_feedforward_layernorm.weight": self.mlp_norm,
        }


class ToyModel:
    """See `paged_backend.models.base.Model`."""

    head = None

    def __init__(self, config: ModelConfig, max_model_len: int, kernels: Kernels) -> None:
        self.config = config
        self.max_model_len = max_model_len
        self._rms_norm = kernels.layers.rms_norm
        ropes = config.ropes[0], local_rope(config)
        tables = [rope.table(max_model_len, kernels.device) for rope in ropes]
        self._layers = [
            ToyLayer(config, index, tables[index % 2], kernels)
            for index in range(config.num_layers)
        ]
        self.attention_layers = [layer.attention.layer for layer in self._layers]
        self.state_layers: list[StateLayer] = []  # no layer keeps a state for each sequence
        shape = (config.vocab_size, config.hidden_size)
        self._embedding = torch.empty(shape, dtype=kernels.dtype, device=kernels.device)
        self._norm = torch.empty(config.hidden_size, dtype=kernels.dtype, device=kernels.device)
        self._lm_head = kernels.linear(
            LinearSpec(config.hidden_size, {"lm_head": config.vocab_size})
        )

    def parameters(self) -> dict[str, Tensor]:
        parameters = {"model.embed_tokens.weight": self._embedding, "model.norm.weight": self._norm}
        for index, layer in enumerate(self._layers):
            parameters |= prefixed(f"model.layers.{index}", layer.parameters())
        return parameters | self._lm_head.parameters()

    def pack(self) -> None:
        for part in (self._lm_head, *self._layers):
            for packed in (part.attention, part.mlp) if isinstance(part, ToyLayer) else (part,):
                packed.pack()

    def forward(
        self,
        input_ids: Tensor,
        attention: AttentionBackend,
        meta: AttentionMetadata,
        logits_indices: Tensor | None,
    ) -> Tensor:
        eps = self.config.rms_norm_eps
        hidden = F.embedding(input_ids, self._embedding)
        for layer in self._layers:
            attended = layer.attention.mix(hidden, attention, meta)
            attended = layer.attention.o_proj(attended)
            hidden = hidden + self._rms_norm(attended, layer.attention_norm, eps)
            mixed = layer.mlp.down_proj(layer.mlp.activate(hidden))
            hidden = hidden + self._rms_norm(mixed, layer.mlp_norm, eps)
        if logits_indices is not None:
            hidden = hidden[logits_indices]
        return self._rms_norm(hidden, self._norm, eps)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._lm_head(hidden)


def local_rope(config: ModelConfig):
    theta = config.file.number("local_rope_theta")
    file = ConfigFile({"rope_theta": theta}, "config.json")
    return read_rope(file, config.head_dim, None, config.max_position_embeddings)


def toy_tensors(shape: ModelShape) -> Tensors:
    tensors = decoder_tensors(shape)
    new = {"input_layernorm": "post_feedforward_layernorm"}
    return {
        ".".join(new.get(part, part) for part in name.split(".")): spec
        for name, spec in tensors.items()
    }


TOY_CONFIG = {
    "architectures": ["ToyForCausalLM"],
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "local_rope_theta": 100.0,
    "eos_token_id": 2,
}


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A checkpoint of the family."""
    register_architecture(
        "ToyForCausalLM", Architecture(tensors=toy_tensors, model=f"{__name__}:ToyModel")
    )
    (tmp_path / "config.json").write_text(json.dumps(TOY_CONFIG))
    torch.manual_seed(0)
    weights = {
        name: torch.rand(spec.shape) + 0.5
        if spec.role is Role.NORM
        else torch.randn(spec.shape) * 0.15
        for name, spec in tensors_of(load_model_config(tmp_path)).items()
    }
    save_file(weights, tmp_path / "model.safetensors")
    return tmp_path


def dense_logits(tokens: list[int], weights: dict[str, Tensor], config: ModelConfig) -> Tensor:
    """Logits [vocab_size] after the last token, in float64 and without any cache."""
    length, head_dim = len(tokens), config.head_dim
    hidden = weights["model.embed_tokens.weight"][tokens]
    causal = torch.full((length, length), -torch.inf, dtype=torch.float64).triu(1)

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weights[name], config.rms_norm_eps)

    for index in range(config.num_layers):
        part = f"model.layers.{index}"
        rope = local_rope(config) if index % 2 else config.ropes[0]
        angles = torch.outer(torch.arange(length), torch.tensor(rope.frequencies)).double()
        turns = torch.polar(torch.ones_like(angles), angles).unsqueeze(1)

        def heads(x: Tensor, name: str, part: str = part) -> Tensor:
            out = x @ weights[f"{part}.self_attn.{name}_proj.weight"].t()
            return out.view(length, -1, head_dim)

        def rotate(x: Tensor, turns: Tensor = turns) -> Tensor:
            first, second = x.chunk(2, dim=-1)
            turned = torch.complex(first, second) * turns
            return torch.cat((turned.real, turned.imag), dim=-1)

        q, k, v = rotate(heads(hidden, "q")), rotate(heads(hidden, "k")), heads(hidden, "v")
        k, v = (x.repeat_interleave(config.num_heads // config.num_kv_heads, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * head_dim**-0.5 + causal
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        attended = attended @ weights[f"{part}.self_attn.o_proj.weight"].t()
        hidden = hidden + norm(attended, f"{part}.post_attention_layernorm.weight")
        gate, up = (
            hidden @ weights[f"{part}.mlp.{name}_proj.weight"].t() for name in ("gate", "up")
        )
        mixed = (F.silu(gate) * up) @ weights[f"{part}.mlp.down_proj.weight"].t()
        hidden = hidden + norm(mixed, f"{part}.post_feedforward_layernorm.weight")
    return norm(hidden[-1:], "model.norm.weight")[0] @ weights["lm_head.weight"].t()


def dense_tokens(folder: Path, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens by the direct computation."""
    from safetensors.torch import load_file

    weights = {name: w.double() for name, w in load_file(folder / "model.safetensors").items()}
    config, tokens = load_model_config(folder), list(prompt)
    while len(tokens) < len(prompt) + count:
        tokens.append(int(dense_logits(tokens, weights, config).argmax()))
        if tokens[-1] in config.eos_token_ids:
            break
    return tokens[len(prompt) :]


@pytest.mark.parametrize("limit", [512, 16])
def test_a_new_family(toy: Path, limit: int) -> None:
    engine = make_engine(toy, max_num_batched_tokens=limit, max_num_seqs=4)
    shared = [(7 * i) % 190 + 3 for i in range(40)]
    work = [(shared, 8), ([5, 9, 4], 8), ([*shared[:35], 11], 8)]
    answers = tokens_of(run(engine, work))
    assert answers == [dense_tokens(toy, prompt, count) for prompt, count in work]


# --- a number format: int8 weights with a scale for each row --------------------------------------


class Int8Linear:
    """See `paged_backend.models.linear.LinearMethod`; in plain torch, for biases of none."""

    def __init__(self, spec: LinearSpec, kernels: Kernels) -> None:
        assert not spec.bias
        self._parts = {
            name: torch.empty(size, spec.inputs, dtype=kernels.dtype, device=kernels.device)
            for name, size in spec.parts.items()
        }

    def parameters(self) -> dict[str, Tensor]:
        return {f"{name}.weight": part for name, part in self._parts.items()}

    def pack(self) -> None:
        self._weight, self._scale = quantized(torch.cat(list(self._parts.values())))
        self._parts.clear()

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight.to(x.dtype)) * self._scale.t()

    def add_to(self, out: Tensor, x: Tensor) -> None:
        out += self(x)

    def rows(self, index: Tensor) -> Tensor:
        return self._weight[index] * self._scale[index]


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [outputs, inputs] as int8, and their scales [outputs, 1]."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round().to(torch.int8), scale


def test_a_number_format(tmp_path: Path) -> None:
    """The tokens are those of transformers on the weights that int8 leaves of the checkpoint's."""
    register_linear_method("toy_int8", Int8Linear)
    oracle = Oracle("smollm", tmp_path)
    for name, weight in oracle.model.named_parameters():
        if weight.dim() == 2:
            values, scale = quantized(weight.data)
            assert not torch.equal(weight.data, values * scale), name
            weight.data = values * scale
    engine = make_engine(tmp_path, quantization="toy_int8", max_num_seqs=4)
    work = mixed_work(8)
    oracle.confirm(work, tokens_of(run(engine, work)))


def test_an_unknown_number_format_is_refused_by_name(tmp_path: Path) -> None:
    Oracle("smollm", tmp_path)
    with pytest.raises(ConfigError, match=r"^option quantization must be null.*, got 'awq'$"):
        make_engine(tmp_path, quantization="awq")


# --- an executor: the worker runs in another process, which gets encoded messages only -----------

WORKER = """
import json, struct, sys
from pathlib import Path
from paged_backend.values.config import EngineConfig
from paged_backend.executor.messages import decode_masks, decode_scheduler_output, encode
from paged_backend.engine.worker import Worker

folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
worker = Worker(EngineConfig.from_mapping(options), folder)
stream, out = sys.stdin.buffer, sys.stdout.buffer

def send(payload):
    out.write(struct.pack("I", len(payload)) + payload)
    out.flush()

send(encode(worker.info))
while header := stream.read(4):
    output = decode_scheduler_output(stream.read(*struct.unpack("I", header)))
    launched = worker.launch(output)
    masks = decode_masks(stream.read(*struct.unpack("I", stream.read(4))))
    send(encode(launched.sample(masks).result()))
"""


class RemoteStep(LaunchedStep):
    """A step that the other process has launched."""

    def __init__(self, executor: RemoteExecutor) -> None:
        self._executor = executor

    def sample(self, masks: TokenMasks | None = None) -> RemoteStep:
        self._executor.send(encode(masks))
        return self

    def result(self) -> ModelRunnerOutput:
        return decode_model_runner_output(self._executor.receive())


class RemoteExecutor:
    """See `paged_backend.executor.base.Executor`."""

    def __init__(self, config: EngineConfig, folder: Path) -> None:
        options = json.dumps(asdict(config))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(folder), options], **pipes
        )
        self.info = msgspec.msgpack.decode(self.receive(), type=WorkerInfo)

    adapters = None

    def check(self) -> None:
        assert self.process.poll() is None

    def launch(self, output: SchedulerOutput, guide: DraftGuide | None = None) -> RemoteStep:
        self.send(encode(output))
        return RemoteStep(self)

    def send(self, payload: bytes) -> None:
        self.process.stdin.write(struct.pack("I", len(payload)) + payload)
        self.process.stdin.flush()

    def close(self) -> None:
        self.process.stdin.close()
        self.process.stdout.close()
        assert self.process.wait(30) == 0

    def receive(self) -> bytes:
        (size,) = struct.unpack("I", self.process.stdout.read(4))
        return self.process.stdout.read(size)


def test_a_worker_in_another_process(tmp_path: Path) -> None:
    """Preemption, forks, copy-on-write, cancellation and prefix hits give the usual tokens."""
    Oracle("llama3", tmp_path)
    block_bytes = 2**24 // make_engine(tmp_path).executor.info.num_blocks
    options = {
        "model": str(tmp_path), "dtype": "float32", "device": "cpu", "max_num_seqs": 5,
        "max_num_batched_tokens": 32, "max_model_len": 128,
        "kv_cache_memory_bytes": 14 * block_bytes,
    }  # fmt: skip
    config = EngineConfig.from_mapping(options)
    remote = RemoteExecutor(config, tmp_path)
    try:
        answers = [
            drive(Engine(config, executor)) for executor in (Worker(config, tmp_path), remote)
        ]
    finally:
        remote.close()
    assert answers[0] == answers[1]
    tokens, num_preemptions, num_hits, num_copies = answers[0]
    assert len(tokens) == 14 and min(num_preemptions, num_hits, num_copies) > 0


def drive(engine: Engine) -> tuple[dict[tuple[str, int], list[int]], int, int, int]:
    """Tokens by request and completion, and how often what is to be tested happened."""
    copies = 0
    launch = engine.executor.launch

    def count_copies(output: SchedulerOutput, guide: DraftGuide | None = None) -> LaunchedStep:
        nonlocal copies
        copies += len(output.block_copies)
        return launch(output, guide)

    engine.executor.launch = count_copies
    shared = [(7 * i) % 190 + 3 for i in range(40)]
    params = {"max_tokens": 24, "ignore_eos": True, "seed": 3, "temperature": 1.0}
    engine.add_request(Request("cancelled", shared, SamplingParams(n=2, **params)))
    for number in range(8):
        prompt = [*shared[: 20 + 2 * number], number + 5]
        n = 3 if number % 4 == 1 else 1
        settings = SamplingParams(n=n, repetition_penalty=1.2, **params)
        engine.add_request(Request(f"r{number}", prompt, settings))
    tokens: dict[tuple[str, int], list[int]] = {}
    for step in count():
        if not engine.has_unfinished:
            break
        if step == 9:
            engine.abort_request("cancelled")
        for output in engine.step():
            tokens.setdefault((output.request_id, output.index), []).extend(output.new_token_ids)
        engine.scheduler.check_invariants()
    stats = engine.stats()
    return tokens, stats.num_preemptions, stats.num_cache_hits, copies


# --- a drafter: what followed the last two tokens in a text follows them again --------------------


class LookupDrafter(Drafter):
    """See `paged_backend.core.drafter.Drafter`."""

    def __init__(self, texts: list[list[int]]) -> None:
        self._following = {
            (text[start - 2], text[start - 1]): text[start : start + 4]
            for text in texts
            for start in range(2, len(text))
        }

    def propose(self, sequences: Iterable[Sequence], budget: int) -> dict[int, Draft]:
        drafts = {seq.seq_id: self._following.get(tuple(seq.token_ids[-2:])) for seq in sequences}
        return {seq_id: Draft(draft) for seq_id, draft in drafts.items() if draft}

    def awaits(self, sequences: Iterable[Sequence]) -> set[int]:
        """Let each sequence wait until its tokens are known."""
        return {seq.seq_id for seq in sequences}

    def observe_step(self, seconds: float, output: SchedulerOutput) -> None:
        """It has as many drafts however long steps take."""


def test_a_drafter(tmp_path: Path) -> None:
    """The same tokens in fewer steps: greedy, sampled, penalized and with log-probabilities."""
    oracle = Oracle("llama3", tmp_path)
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 32}
    work = [(prompt, 30) for prompt, _ in mixed_work(6)]
    plain = make_engine(tmp_path, **settings)
    answers = tokens_of(run(plain, work))
    texts = [[*prompt, *answer] for (prompt, _), answer in zip(work, answers, strict=True)]
    drafted = make_engine(
        tmp_path, drafter=LookupDrafter(texts[:5]), speculative_config={}, **settings
    )
    assert tokens_of(run(drafted, work)) == answers
    oracle.confirm(work, answers)
    assert drafted.stats().num_steps < 0.8 * plain.stats().num_steps
    for engine in (plain, drafted):
        for index, (prompt, _) in enumerate(work):
            params = {"temperature": 0.5, "logprobs": 2, "n": 1 + index % 2, "seed": index}
            penalty = 1.05 if index % 3 == 0 else 1.0
            sampled = SamplingParams(max_tokens=30, repetition_penalty=penalty, **params)
            engine.add_request(Request(f"s{index}", prompt, sampled))
    assert outputs_of(drafted) == outputs_of(plain)
    names = ("num_prompt_tokens", "num_generation_tokens", "num_used_blocks", "finished")
    assert all(getattr(drafted.stats(), n) == getattr(plain.stats(), n) for n in names)


def outputs_of(engine: Engine) -> dict[tuple[str, int], list[tuple[int, list[int], FinishReason]]]:
    """Tokens with the most likely ones at their positions, and the reason of the end."""
    found: dict[tuple[str, int], list[tuple[int, list[int], FinishReason]]] = {}
    while engine.has_unfinished:
        for output in engine.step():
            rows = zip(output.new_token_ids, output.logprobs, strict=True)
            entries = [(token, row.top_token_ids, output.finish_reason) for token, row in rows]
            found.setdefault((output.request_id, output.index), []).extend(entries)
        engine.scheduler.check_invariants()
    return {key: [entry[:2] for entry in rows] + [rows[-1][2]] for key, rows in found.items()}


def test_a_drafter_needs_room_in_steps(tmp_path: Path) -> None:
    Oracle("llama3", tmp_path)
    with pytest.raises(ConfigError, match="speculative_config must be set"):
        make_engine(tmp_path, drafter=LookupDrafter([]))
