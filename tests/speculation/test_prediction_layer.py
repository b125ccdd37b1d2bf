"""The drafts of MTP layers equal those of transformers, and they change no token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from effort import ALL
from free_drafts import make_drafts_free, see_drafts
from lora_oracle import LoraOracle, lora_options, run_requests
from oracle import make_engine, mixed_work
from prediction_layers import DraftOracle, make_always_right, make_predicting
from quantized_checkpoints import fp8
from safetensors.torch import load_file, save_file
from test_draft_model import PARAMS, answers_of, stats_of

from paged_backend import SamplingParams
from paged_backend.values.errors import ConfigError
from paged_backend.values.request import Request

DRAFTS = {"method": "mtp", "num_speculative_tokens": 3}
LIMITS = {"max_num_seqs": 4, "max_num_batched_tokens": 48}


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkpoint with a layer that is always right."""
    folder = tmp_path_factory.mktemp("right")
    make_always_right("glm4-moe", folder)
    yield folder


@pytest.fixture
def drafts_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps verify as many drafts as they may, however busy the machine is."""
    make_drafts_free(monkeypatch)


def requests(number: int) -> list[Request]:
    """Prompts of which every fourth begins like the one before it, with parameters of all sorts."""
    made = []
    for index, (prompt, length) in enumerate(mixed_work(number)):
        values = {"max_tokens": length + 9, "seed": index, "ignore_eos": True}
        params = SamplingParams(**values, **PARAMS[index % len(PARAMS)])
        made.append(Request(f"r{index}", prompt, params))
    return made


@pytest.mark.parametrize(
    ("family", "eager"),
    [
        ("deepseek-v3", False),
        pytest.param("deepseek-v3", True, marks=pytest.mark.thorough),
        ("glm4-moe", True),
        ("qwen3-next", False),
        ("qwen3.5", True),
        pytest.param("qwen3.5-moe", False, marks=pytest.mark.thorough),
    ],
)
def test_drafts_are_those_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, eager: bool
) -> None:
    """Every draft of each step: of prompts in parts, of forks, after right and wrong drafts."""
    make_predicting(family, tmp_path, num_likely=5)
    oracle = DraftOracle(tmp_path)
    seen = see_drafts(monkeypatch)
    # A shared block ends with the row of the sequence that has computed it.
    settings = {**LIMITS, "enable_prefix_caching": False, "enforce_eager": eager}
    engine = make_engine(tmp_path, speculative_config=DRAFTS, **settings)
    work = mixed_work(8)
    wanted = [
        Request(
            f"r{index}",
            prompt,
            SamplingParams(temperature=0, max_tokens=length + 9, n=1 + index % 2),
        )
        for index, (prompt, length) in enumerate(work)
    ]
    answers_of(engine, wanted)
    stats = stats_of(engine)
    assert 5 < stats.num_accepted_tokens < stats.num_draft_tokens / 2
    assert sum(bool(drafts) for _, drafts in seen) > 60
    oracle.confirm(seen if ALL else seen[::3])


@pytest.mark.usefixtures("drafts_are_free")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_cache_memory_bytes": 400_000, "max_model_len": 128},
        pytest.param({"dtype": "bfloat16"}, marks=pytest.mark.thorough),
        pytest.param({"enforce_eager": True}, marks=pytest.mark.thorough),
        {"quantization": "int8", "max_num_batched_tokens": 8},
    ],
)
def test_tokens_are_the_same(right: Path, options: dict[str, Any]) -> None:
    """Right drafts are accepted after prefix hits, forks, preemption and parts of prompts."""
    settings = {**LIMITS, **options}
    wanted = requests(12)
    answers = answers_of(make_engine(right, **settings), wanted)
    engine = make_engine(right, speculative_config=DRAFTS, **settings)
    assert answers_of(engine, wanted) == answers
    stats = stats_of(engine)
    assert stats.num_draft_tokens > 60
    if "dtype" not in options and "quantization" not in options:
        # Of two tokens that are almost equally likely, rounding may choose either.
        assert stats.num_accepted_tokens > 0.98 * stats.num_draft_tokens


@pytest.mark.usefixtures("drafts_are_free")
@pytest.mark.parametrize(
    "family", [pytest.param("qwen3-next", marks=pytest.mark.thorough), "qwen3.5"]
)
def test_tokens_of_models_with_states_are_the_same(tmp_path: Path, family: str) -> None:
    """Two tokens are likely, so that many drafts are right, and many follow a wrong one."""
    make_predicting(family, tmp_path)
    values = {"temperature": 1.0, "max_tokens": 30, "ignore_eos": True, "logprobs": 1}
    bias = ((5, 40.0), (9, 40.0))
    wanted = [
        Request(
            f"r{seed}", [4, 8, 15 + seed], SamplingParams(**values, seed=seed, n=2, logit_bias=bias)
        )
        for seed in range(4)
    ]
    answers = answers_of(make_engine(tmp_path, **LIMITS), wanted)
    engine = make_engine(tmp_path, speculative_config=DRAFTS, **LIMITS)
    assert answers_of(engine, wanted) == answers
    stats = stats_of(engine)
    assert 0.2 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.8


def test_the_pool_counts_what_the_layer_keeps(tmp_path: Path) -> None:
    """Keys and values of one more layer, and the hidden state of each token."""
    model = make_predicting("glm4-moe", tmp_path)
    alone = make_engine(tmp_path, **LIMITS).executor.info
    both = make_engine(tmp_path, speculative_config=DRAFTS, **LIMITS).executor.info
    number, size = model.config.num_hidden_layers, model.config.hidden_size
    kept = alone.kv_bytes_per_token // number + 4 * size
    assert both.kv_bytes_per_token == alone.kv_bytes_per_token + kept
    bytes_of_blocks = [info.num_blocks * info.kv_bytes_per_token for info in (alone, both)]
    assert bytes_of_blocks[1] == pytest.approx(bytes_of_blocks[0], rel=0.02)
    stored = load_file(tmp_path / "model.safetensors")
    copies = ("embed_tokens.weight", "head.weight")
    names = [name for name in stored if f".{number}." in name and not name.endswith(copies)]
    held = sum(stored[name].nbytes for name in names)
    # Rotary tables and weights of kernels with other layouts take more.
    assert held <= both.weight_bytes - alone.weight_bytes < 2 * held


@pytest.mark.parametrize("method", ["mtp", "draft_model"])
def test_keys_and_values_have_the_format_of_the_model(tmp_path: Path, method: str) -> None:
    """If the checkpoint asks for 8 bits, what guesses has them, too."""
    make_predicting("glm4-moe", tmp_path)
    path = tmp_path / "config.json"
    config = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    model = {"model": str(tmp_path)} if method == "draft_model" else {}
    infos = [
        make_engine(
            tmp_path, speculative_config={"method": method, **model}, kv_cache_dtype=dtype, **LIMITS
        ).executor.info
        for dtype in ("auto", "fp8_e4m3")
    ]
    assert infos[0].kv_bytes_per_token == infos[1].kv_bytes_per_token
    assert "fp8" in infos[0].kv_cache


@pytest.mark.parametrize(
    ("family", "changes", "options", "said"),
    [
        ("llama3", {}, {}, "cannot be mtp: the checkpoint must have exactly one MTP layer"),
        ("glm4-moe", {"num_nextn_predict_layers": 2}, {}, "must have exactly one MTP layer"),
        ("qwen3.5", {"mtp_num_hidden_layers": 0}, {}, "must have exactly one MTP layer"),
        (
            "qwen3.5",
            {"mtp_use_dedicated_embeddings": True},
            {},
            "must have exactly one MTP layer",
        ),
        ("qwen3.5", {}, {}, r"method cannot be mtp: .* 1 tensor is missing, such as mtp\.fc"),
        ("llama3", {}, {"model_impl": "transformers"}, "transformers computes the model"),
        (
            "glm4-moe",
            {},
            {},
            r"cannot be mtp: .* 1 tensor is missing, such as .*3\.eh_proj\.weight",
        ),
        ("plain glm4-moe", {}, {}, r"names an MTP layer, .* have no model\.layers\.3"),
    ],
)
def test_what_cannot_predict_is_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], options: dict[str, Any], said: str
) -> None:
    if family in ("llama3", "plain glm4-moe"):
        make_checkpoint(family.removeprefix("plain "), tmp_path)
    else:
        make_predicting(family, tmp_path)
    path, file = tmp_path / "config.json", tmp_path / "model.safetensors"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    stored = load_file(file)
    for name in ("model.layers.3.eh_proj.weight", "mtp.fc.weight"):
        stored.pop(name, None)
    save_file(stored, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=said) as caught:
        make_engine(tmp_path, speculative_config=DRAFTS, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("drafts_are_free")
def test_tokens_with_adapters(tmp_path: Path) -> None:
    """The layer has no adapters, and guesses what the base model would say.

    The model computes its last layer, with adapters on it, for all tokens of a step.
    """
    sizes = {"num_hidden_layers": 2, "first_k_dense_replace": 2}
    oracle = LoraOracle("glm4-moe", tmp_path, **sizes)
    make_predicting("glm4-moe", oracle.folder, num_likely=4, **sizes)
    stored = load_file(oracle.folder / "model.safetensors")
    for model in oracle.models.values():  # with the output layer of few likely tokens
        model.model.lm_head.weight.data.copy_(stored["lm_head.weight"])
    engine = make_engine(oracle.folder, speculative_config=DRAFTS, **lora_options(oracle, **LIMITS))
    work = oracle.requests(8, 40, 12)
    oracle.confirm(work, run_requests(engine, work))
    stats = engine.stats()
    assert 5 < stats.num_accepted_tokens < stats.num_draft_tokens


def test_a_layer_with_weights_in_blocks_of_fp8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the published files of DeepSeek V3, in which `eh_proj` has 16 bits."""
    make_predicting("deepseek-v3", tmp_path)
    path, file = tmp_path / "config.json", tmp_path / "model.safetensors"
    plain, quantized, write = load_file(file), load_file(file), fp8(16, 16, "weight_scale_inv")
    for name in list(plain):
        if (
            name.startswith("model.layers.3.self_attn.")
            and "_proj" in name
            and plain[name].ndim > 1
        ):
            stored, plain[name] = write(quantized.pop(name))
            prefix = name.removesuffix(".weight")
            quantized |= {f"{prefix}.{suffix}": tensor for suffix, tensor in stored.items()}
    seen = see_drafts(monkeypatch)
    drafts = []
    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16]}
    for tensors, section in ((plain, {}), (quantized, {"quantization_config": config})):
        save_file(tensors, file, {"format": "pt"})
        path.write_text(json.dumps(json.loads(path.read_text()) | section))
        seen.clear()
        answers_of(make_engine(tmp_path, speculative_config=DRAFTS, **LIMITS), requests(4))
        drafts.append(list(seen))
    assert drafts[0] == drafts[1]
    assert len(drafts[0]) > 20
