"""LoRA adapters beside peft's own model of the same checkpoint."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from free_drafts import make_drafts_free
from lora_oracle import run_requests as run
from oracle import EOS, make_engine, mixed_work
from packed_adapters import pack, write_packed
from quantization.test_checkpoints import FORMATS, INT8, TOKEN_INT8, ct, rounded, whole
from quantized_checkpoints import Writer, compressed, quantize_checkpoint
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from paged_backend import ConfigError, InvalidRequest, LoRARequest
from paged_backend.engine.engine import Engine
from paged_backend.values.lora import numbered
from paged_backend.values.outputs import FinishReason, SequenceOutput
from paged_backend.values.request import Request
from paged_backend.values.sampling_params import SamplingParams

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings(  # peft uses a deprecated property of transformers
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
)
Outputs = dict[str, list[SequenceOutput]]
Change = Callable[[PreTrainedModel, Path], None]
"""Changes a checkpoint in its folder, and transformers' model of it."""

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_up_proj", "gate_proj", "up_proj", "down_proj"]
_ADAPTERS: list[dict[str, Any]] = [
    {"r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]},
    {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]},
    {"r": 3, "lora_alpha": 3, "target_modules": ATTENTION, "use_rslora": True},
    {"r": 4, "lora_alpha": 2, "target_modules": [*MLP[1:]]},
    {"r": 8, "lora_alpha": 8, "target_modules": [*ATTENTION, *MLP[1:]]},
    {"r": 5, "lora_alpha": 5, "target_modules": ATTENTION, "rank_pattern": {"k_proj": 7}},
    {
        "r": 4,
        "lora_alpha": 4,
        "target_modules": ["o_proj", "down_proj"],
        "alpha_pattern": {"^model.layers.1.self_attn.o_proj": 12},
    },
    {"r": 16, "lora_alpha": 16, "target_modules": ["up_proj"], "layers_to_transform": [0, 2]},
]


class LoraCase:
    """A checkpoint with 8 adapters of different ranks and targets."""

    def __init__(self, family: str, folder: Path, change: Change | None = None) -> None:
        self.folder = folder / "model"
        base = make_checkpoint(family, self.folder)
        if change is not None:
            change(base, self.folder)
        state = torch.get_rng_state()
        torch.manual_seed(11)
        self.names = [f"adapter-{index}" for index in range(len(_ADAPTERS))]
        for name, values in zip(self.names, _ADAPTERS, strict=True):
            config = peft.LoraConfig(task_type="CAUSAL_LM", **values)
            if name == self.names[0]:
                self.model = peft.PeftModel(base, config, adapter_name=name)
            else:
                self.model.add_adapter(name, config)
        for key, parameter in self.model.named_parameters():
            if "lora_" in key:
                torch.nn.init.normal_(parameter, std=0.3)
        torch.set_rng_state(state)
        self.model.save_pretrained(folder / "adapters")
        self.modules = {name: str(folder / "adapters" / name) for name in self.names}
        self.model.eval()

    def lora(self, name: str) -> LoRARequest | None:
        """Return the adapter of a name as the engine knows it from its options."""
        return numbered(self.modules).get(name)

    def engine(self, **options: Any) -> Engine:
        values = {"enable_lora": True, "lora_modules": self.modules, **options}
        return make_engine(self.folder, **values)

    @torch.inference_mode()
    def logits(self, adapter: str, tokens: list[int]) -> torch.Tensor:
        if not adapter:
            with self.model.disable_adapter():
                return self.model(torch.tensor([tokens])).logits[0]
        self.model.set_adapter(adapter)
        return self.model(torch.tensor([tokens])).logits[0]

    def confirm(self, request: Request, outputs: list[SequenceOutput]) -> None:
        """Check that each token is the likeliest of peft's, and its logits."""
        answer = [token for output in outputs for token in output.new_token_ids]
        prompt = request.prompt_token_ids
        name = _name_of(request)
        logits = self.logits(name, prompt + answer)
        assert answer == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert answer[-1] == EOS or len(answer) == request.params.max_tokens
        found = [entry for output in outputs for entry in output.logprobs or ()]
        start = len(prompt)
        if outputs[0].prompt_logprobs is not None:
            found, start = outputs[0].prompt_logprobs + found, 1
        for row, entry in zip(logits[start - 1 :], found, strict=False):
            if entry.logits is not None:
                assert torch.allclose(_floats(entry.logits), row, atol=1e-4)

    def errors(self, request: Request, outputs: list[SequenceOutput]) -> list[float]:
        """The distance of the logits of each token from those of peft, over their length."""
        answer, prompt = tokens(outputs), request.prompt_token_ids
        rows = self.logits(_name_of(request), prompt + answer)[len(prompt) - 1 : -1]
        entries = [entry for output in outputs for entry in output.logprobs or ()]
        return [
            ((_floats(entry.logits) - row).norm() / row.norm()).item()
            for row, entry in zip(rows, entries, strict=True)
        ]


def _floats(logits: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(logits), dtype=torch.float32)


@pytest.fixture(
    scope="module", params=["llama3", pytest.param("qwen2", marks=pytest.mark.thorough)]
)
def case(request, tmp_path_factory) -> LoraCase:
    return LoraCase(request.param, tmp_path_factory.mktemp(request.param))


def _name_of(request: Request) -> str:
    return "" if request.lora is None else Path(request.lora.lora_path).name


def requests(case: LoraCase, number: int = 24, **params: Any) -> list[Request]:
    """Requests of all adapters and of the base model in turns."""
    adapters = ["", *case.names]
    return [
        Request(
            str(index),
            prompt,
            SamplingParams(temperature=0, max_tokens=max_tokens, **params),
            lora=case.lora(adapters[index % len(adapters)]),
        )
        for index, (prompt, max_tokens) in enumerate(mixed_work(number))
    ]


def _bits(outputs: list[SequenceOutput]) -> list[bytes]:
    return [entry.logits for output in outputs for entry in output.logprobs or ()]


def tokens(outputs: list[SequenceOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"enforce_eager": True}, marks=pytest.mark.thorough),
        {"max_num_batched_tokens": 16},
        pytest.param(
            {"max_num_seqs": 4, "max_loras": 2, "max_cpu_loras": 3}, marks=pytest.mark.thorough
        ),
        {"max_loras": 1, "max_cpu_loras": 1},
        {"max_model_len": 128, "kv_cache_memory_bytes": 2**17, "block_size": 8},
        {"speculative_config": {"method": "suffix"}},
    ],
    ids=["graphs", "eager", "chunks", "evictions", "one at a time", "preemptions", "drafts"],
)
def test_tokens_equal_those_of_peft(case, options):
    engine = case.engine(**options)
    work = requests(case)
    for _ in range(2):  # the second time with graphs and prefix hits
        outputs = run(engine, work)
        for request in work:
            case.confirm(request, outputs[request.request_id])
        work = [
            Request(f"again {r.request_id}", r.prompt_token_ids, r.params, lora=r.lora)
            for r in work
        ]
    if "kv_cache_memory_bytes" in options:
        assert engine.stats().num_preemptions > 0


def test_a_draft_model_has_no_adapters(case, monkeypatch):
    make_drafts_free(monkeypatch)
    draft = {"method": "draft_model", "model": str(case.folder)}
    engine = case.engine(speculative_config=draft)
    work = requests(case, 9)
    outputs = run(engine, work)
    for request in work:
        case.confirm(request, outputs[request.request_id])
    assert engine.stats().num_draft_tokens > 0


@pytest.mark.parametrize("case", ["llama3", "qwen2"], indirect=True)  # the latter has biases
def test_logits_equal_those_of_peft(case):
    params = {"return_context_logits": True, "prompt_logprobs": 0, "logprobs": 0}
    work = requests(case, 18, **params, return_generation_logits=True)
    outputs = run(case.engine(max_num_batched_tokens=64), work)
    for request in work:
        assert outputs[request.request_id][0].prompt_logprobs
        case.confirm(request, outputs[request.request_id])


def test_answers_do_not_depend_on_the_batch(case):
    params = {"return_generation_logits": True, "logprobs": 0}
    work = requests(case, 18, **params)
    together = run(case.engine(), work)
    alone = case.engine(max_num_batched_tokens=8, enable_prefix_caching=False, enforce_eager=True)
    for request in work:
        outputs = run(alone, [request])[request.request_id]
        assert _bits(outputs) == _bits(together[request.request_id])


def _stored(config: dict[str, Any], writer: Writer) -> Change:
    """Store the weights in a format; the model gets what they stand for."""

    def change(model: PreTrainedModel, folder: Path) -> None:
        quantize_checkpoint(model, folder, config, whole(writer))

    return change


def _rounds(rounding: Callable[[torch.Tensor], torch.Tensor], model: PreTrainedModel) -> None:
    """Round the inputs of the base model's layers, and not those of adapters, which come later."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, inputs: (rounding(inputs[0]),))


def _int8(model: PreTrainedModel, folder: Path) -> None:
    config = ct("int-quantized", INT8, input_activations=TOKEN_INT8)
    _stored(config, compressed("int-quantized", torch.float32, **INT8))(model, folder)
    for layer in model.model.layers:
        _rounds(rounded, layer)


def _bfloat16(model: PreTrainedModel, folder: Path) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            for parameter in module.parameters():
                parameter.data = parameter.data.bfloat16().float()
    _rounds(lambda x: x.bfloat16().float(), model)


class NumberFormat(NamedTuple):
    """A number format of the base model, and how close its logits are to those of peft."""

    change: Change
    median: float  # largest median of `LoraCase.errors`, over all adapters
    largest: float  # the largest error
    options: dict[str, Any] = {}


NUMBER_FORMATS = {
    # The weights are dequantized as they are loaded: all that follows is float32.
    "gptq-4": NumberFormat(_stored(*FORMATS["gptq-4"]), 2e-6, 4e-5),
    "awq": NumberFormat(_stored(*FORMATS["awq"]), 2e-6, 2e-5),
    # peft rounds to the same int8 numbers, but for a few that lie between two of them: errors of
    # float32 decide which one is nearer, and the next layers follow.
    "int8": NumberFormat(_int8, 1e-3, 0.1),
    # peft rounds the same weights and inputs, but not keys and values: that is about one percent.
    "bfloat16": NumberFormat(_bfloat16, 0.02, 0.2, {"dtype": "bfloat16"}),
}


@pytest.mark.parametrize("name", NUMBER_FORMATS)
def test_adapters_in_number_formats(name: str, tmp_path: Path) -> None:
    number_format = NUMBER_FORMATS[name]
    case, options = LoraCase("llama3", tmp_path, number_format.change), number_format.options
    work = requests(case, 18, return_generation_logits=True, logprobs=0)
    together = run(case.engine(**options), work)
    alone = case.engine(max_num_batched_tokens=8, enable_prefix_caching=False, **options)
    for request in work:
        outputs = run(alone, [request])[request.request_id]
        assert _bits(outputs) == _bits(together[request.request_id])
    errors = [error for r in work for error in case.errors(r, together[r.request_id])]
    assert statistics.median(errors) < number_format.median
    assert max(errors) < number_format.largest


def test_adapters_in_float16(tmp_path: Path) -> None:
    """torch's products depend on the batch, so only the distance to peft's logits is checked."""
    case = LoraCase("llama3", tmp_path, lambda base, _: base.half().float())
    work = requests(case, 18, return_generation_logits=True, logprobs=0)
    outputs = run(case.engine(dtype="float16"), work)
    errors = [error for r in work for error in case.errors(r, outputs[r.request_id])]
    assert statistics.median(errors) < 5e-3
    assert max(errors) < 8e-2  # 0.050 on a processor of the Zen 5 family, less on others


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_requests_without_adapters_have_the_bits_of_an_engine_without_any(case, dtype):
    work = requests(case, 18, return_generation_logits=True, logprobs=0)
    mixed = run(case.engine(dtype=dtype), work)
    without = [request for request in work if request.lora is None]
    outputs = run(make_engine(case.folder, dtype=dtype), without)
    for request_id, parts in outputs.items():
        assert _bits(parts) == _bits(mixed[request_id])


def test_completions_of_a_request_share_its_adapter(case):
    engine = case.engine()
    prompt = list(range(3, 40))
    params = SamplingParams(temperature=0, max_tokens=8, n=3)
    outputs = run(engine, [Request("0", prompt, params, lora=case.lora(case.names[4]))])["0"]
    for index in range(3):
        own = [output for output in outputs if output.index == index]
        case.confirm(Request("0", prompt, params, lora=case.lora(case.names[4])), own)


def test_a_prompt_shares_no_block_with_another_adapter(case):
    engine = case.engine()
    params = SamplingParams(temperature=0, max_tokens=4)
    prompt = list(range(3, 120))

    def cached(name: str) -> int:
        request = Request(
            f"{name} {engine.stats().num_steps}", prompt, params, lora=case.lora(name)
        )
        (outputs,) = run(engine, [request]).values()
        case.confirm(request, outputs)
        return outputs[-1].num_cached_tokens

    for name in ("", *case.names):
        assert cached(name) == 0
        assert cached(name) == 112
    first, second = case.names[:2]
    engine.adapters.load(case.lora(first))
    assert cached(first) == 112  # the same content
    other = LoRARequest("other name", 99, case.modules[second])
    engine.adapters.load(other)
    request = Request("other", prompt, params, lora=other)
    assert run(engine, [request])["other"][-1].num_cached_tokens == 112


def test_reloaded_weights_hit_no_block_of_the_earlier_ones(case, tmp_path):
    engine = case.engine(lora_modules=None)
    params = SamplingParams(temperature=0, max_tokens=4)
    prompt = list(range(3, 60))
    for number, source in enumerate(case.names[3:5]):
        lora = LoRARequest("name", number, case.modules[source])
        engine.adapters.load(lora)
        request = Request(str(number), prompt, params, lora=lora)
        outputs = run(engine, [request])[str(number)]
        assert outputs[-1].num_cached_tokens == 0
        case.confirm(Request(str(number), prompt, params, lora=case.lora(source)), outputs)


def test_a_request_that_comes_after_the_unload_is_refused(case):
    """A front end may have read it before; a request that had begun goes on in the next engine."""
    root = Path(case.modules[case.names[3]]).parent
    engine = case.engine(lora_modules=None, runtime_lora_folder=str(root))
    lora = LoRARequest("name", 7, case.modules[case.names[3]])
    late = Request(
        "late", list(range(3, 20)), SamplingParams(temperature=0, max_tokens=4), lora=lora
    )
    reference = replace(late, lora=case.lora(case.names[3]))
    assert load(engine, lora) == ""
    engine.adapters.forget(lora, is_replaced=True)
    case.confirm(reference, run(engine, [late])["late"])
    engine.adapters.forget(lora)
    with pytest.raises(InvalidRequest, match="^LoRA name is not supported: it was unloaded"):
        engine.add_request(late)
    assert not engine.has_unfinished
    engine.add_request(late, [[]])
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    case.confirm(reference, outputs)
    assert load(engine, lora) == ""
    case.confirm(reference, run(engine, [late])["late"])


def test_an_adapter_is_replaced_while_a_request_uses_it(case):
    engine = case.engine(max_loras=2)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=False)
    first, second = case.names[3:5]
    outputs: list[SequenceOutput] = []
    for request_id, source in (("old", first), ("new", second)):
        lora = LoRARequest("name", 1, case.modules[source])
        engine.adapters.load(lora)
        engine.add_request(Request(request_id, list(range(3, 30)), params, lora=lora))
        outputs += engine.step()
    while engine.has_unfinished:
        outputs += engine.step()
    for request_id, source in (("old", first), ("new", second)):
        own = [output for output in outputs if output.request_id == request_id]
        case.confirm(Request(request_id, list(range(3, 30)), params, lora=case.lora(source)), own)


def test_engines_without_adapters(case):
    lora = case.lora(case.names[0])
    engine = make_engine(case.folder)
    for use in (
        lambda: engine.add_request(Request("0", [3, 4], SamplingParams(max_tokens=1), lora=lora)),
        lambda: engine.adapters.start_loading("load", lora),
    ):
        with pytest.raises(InvalidRequest) as error:
            use()
        assert str(error.value) == "LoRA feature is not enabled."


def load(engine: Engine, lora: LoRARequest) -> str:
    """Load an adapter while the engine runs; returns the problem."""
    engine.adapters.start_loading("load", lora)
    while engine.has_unfinished:
        assert not engine.step()
        for load_id, problem in engine.adapters.take_loaded():
            assert load_id == "load"
            return problem
    raise AssertionError("the load has not ended")


def test_an_adapter_is_loaded_and_forgotten_while_the_engine_runs(case):
    root = Path(case.modules[case.names[0]]).parent
    engine = case.engine(lora_modules=None, runtime_lora_folder=str(root), max_loras=2)
    first, second = (LoRARequest(name, 7, name) for name in case.names[3:5])
    params = SamplingParams(temperature=0, max_tokens=24)
    requests = [
        Request(lora.lora_name, list(range(3, 30)), params, lora=lora) for lora in (first, second)
    ]
    for lora in (first, second):
        assert load(engine, lora) == ""
    engine.add_request(requests[0])
    outputs = engine.step()
    engine.adapters.forget(first)  # the request goes on with its weights
    engine.adapters.forget(second, is_replaced=True)
    engine.add_request(requests[1])  # its weights are read again
    while engine.has_unfinished:
        outputs += engine.step()
    for request in requests:
        own = [output for output in outputs if output.request_id == request.request_id]
        case.confirm(replace(request, lora=case.lora(request.request_id)), own)
    for lora in (first, second):
        engine.adapters.forget(lora)
    assert not engine.adapters._digests and not engine.adapters._reading
    assert load(engine, first) == ""


def test_packed_adapters_are_those_of_folders(case, tmp_path):
    """What a request brings, in float32 here so that nothing is rounded."""
    engine = case.engine(lora_modules=None, max_request_lora_bytes=2**24)
    engine.adapters.allow_folder(tmp_path)
    without_patterns = [*case.names[:5], case.names[7]]
    loras = [LoRARequest(name, n, str(tmp_path / name)) for n, name in enumerate(without_patterns)]
    for lora in loras:
        packed = pack(Path(case.modules[lora.lora_name]), np.float32)
        write_packed(Path(lora.lora_path), *packed)
    params = SamplingParams(temperature=0, max_tokens=16, return_generation_logits=True, logprobs=0)
    work = [Request(lora.lora_name, list(range(3, 40)), params, lora=lora) for lora in loras]
    outputs = run(engine, work)
    for request in work:
        case.confirm(request, outputs[request.request_id])


def test_adapters_outside_of_the_folder_are_refused(case, tmp_path):
    source = Path(case.modules[case.names[0]])
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    _copy(source, outside)
    _copy(source, root / "good")
    (root / "link").symlink_to(outside)
    (root / "inner link").symlink_to(root / "good")
    (root / "loop").symlink_to(root / "loop")
    (root / "linked file").mkdir()
    for file in outside.iterdir():
        (root / "linked file" / file.name).symlink_to(file)
    engine = case.engine(lora_modules=None, runtime_lora_folder=str(root))
    problem = "is not inside of the folder of adapters"
    bad = ["link", "linked file", "loop", "..", "../outside", str(outside), "/", "\0", "~"]
    for number, path in enumerate(bad):
        found = load(engine, LoRARequest("a", number, path))
        assert problem in found or "cannot read" in found, path
    for path in ("good", "inner link", str(root / "good"), "good/../good"):
        assert load(engine, LoRARequest("a", 1, path)) == ""
    assert "cannot read" in load(engine, LoRARequest("a", 1, "missing"))
    engine = case.engine(lora_modules=None)
    assert "runtime_lora_folder is not set" in load(engine, LoRARequest("a", 1, str(source)))


def test_an_adapter_that_has_gone_ends_its_request_alone(case, tmp_path):
    folder = tmp_path / "adapter"
    _copy(Path(case.modules[case.names[0]]), folder)
    engine = case.engine(max_loras=1, lora_modules=None)
    gone, other = LoRARequest("gone", 1, str(folder)), case.lora(case.names[1])
    engine.adapters.load(gone)
    engine.adapters.load(other)  # takes its place
    (folder / "adapter_model.safetensors").unlink()
    params = SamplingParams(temperature=0, max_tokens=4)
    outputs = run(
        engine,
        [
            Request("0", [3, 4, 5], params, lora=gone),
            Request("1", [3, 4, 5], params, lora=other),
        ],
    )
    (failed,) = outputs["0"]
    assert failed.finish_reason is FinishReason.ERROR
    assert "adapter_model.safetensors is missing" in failed.problem
    case.confirm(Request("1", [3, 4, 5], params, lora=case.lora(case.names[1])), outputs["1"])


def test_a_request_that_waits_for_its_adapter_is_cancelled(case):
    engine = case.engine(max_loras=1)  # the last adapter is in memory
    params = SamplingParams(temperature=0, max_tokens=4)
    engine.add_request(Request("0", [3, 4, 5], params, lora=case.lora(case.names[0])))
    assert engine.is_open("0") and engine.has_unfinished
    (output,) = engine.cancel_request("0")
    assert output.finish_reason is FinishReason.ABORT
    assert not engine.is_open("0") and not engine.has_unfinished


def _copy(source: Path, target: Path) -> None:
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("use_dora", True, "use_dora is not supported"),
        ("bias", "all", "bias is not supported"),
        ("modules_to_save", ["lm_head"], "modules_to_save is not supported"),
        ("fan_in_fan_out", True, "fan_in_fan_out is not supported"),
        ("init_lora_weights", "pissa", "init_lora_weights is not supported"),
        ("peft_type", "IA3", "peft_type can only be LORA"),
        ("r", 17, r"r is 17 for .*; at most max_lora_rank \(16\)"),
        ("r", 3, "has the shape .*; the model and the rank ask for"),
        ("r", "2", "r must be a number"),
        ("r", 0, "r must be from 1 to"),
        ("lora_alpha", None, "lora_alpha must be a number"),
        ("rank_pattern", {".*(a+)+": 2}, "rank_pattern can only have names of modules"),
        ("target_modules", ["q_proj", "k_proj"], "target_modules has .*k_proj"),
    ],
)
def test_configurations_that_are_refused(case, tmp_path, key, value, message):
    folder = tmp_path / "adapter"
    _copy(Path(case.modules[case.names[1]]), folder)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    with pytest.raises(ConfigError, match=message) as error:
        case.engine(lora_modules={"bad": str(folder)})
    assert str(folder) in str(error.value)


_NAME = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(f"{_NAME}.lora_A.weight"), "lora_A.weight of .* is missing"),
        (lambda tensors: tensors.update({f"{_NAME}.bias": torch.zeros(2)}), "is not supported"),
        (
            lambda tensors: tensors.update(
                {f"base_model.model.lm_head.lora_{k}.weight": torch.zeros(2, 2) for k in "AB"}
            ),
            "lm_head.* is no module that can have an adapter",
        ),
        (
            lambda tensors: tensors.update({f"{_NAME}.lora_A.weight": torch.zeros(2, 32)}),
            r"has the shape \[2, 32\]",
        ),
        (
            lambda tensors: tensors.update(
                {f"{_NAME}.lora_A.weight": torch.zeros(2, 64, dtype=torch.int8)}
            ),
            "must be in float32",
        ),
    ],
)
def test_weights_that_are_refused(case, tmp_path, change, message):
    folder = tmp_path / "adapter"
    _copy(Path(case.modules[case.names[1]]), folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=message):
        case.engine(lora_modules={"bad": str(folder)})


def test_pickled_weights_are_refused(case, tmp_path):
    folder = tmp_path / "adapter"
    _copy(Path(case.modules[case.names[1]]), folder)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(ConfigError, match="adapter_model.bin is pickled"):
        case.engine(lora_modules={"bad": str(folder)})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "embed"}, "enable_lora can only be false"),
        ({"max_cpu_loras": 2}, "max_cpu_loras must be at least max_loras"),
        ({"enable_lora": False}, "lora_modules needs enable_lora"),
        ({"lora_modules": {"a": 1}}, "lora_modules must map names to folders"),
        ({"runtime_lora_folder": "/no folder"}, "runtime_lora_folder must be a folder"),
    ],
)
def test_options_that_do_not_fit(case, options, message):
    with pytest.raises(ConfigError, match=message):
        case.engine(**options)
