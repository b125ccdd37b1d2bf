"""The arithmetic of a plan, against values worked out by hand and the engine's own counts."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from kv_specs import alike
from oracle import Oracle, make_engine
from ranks_in_threads import load_first_rank, make_ranks_engine
from torch import Tensor

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.decoder_tensors import num_read_again
from paged_backend.checkpoint.model_config import ModelConfig, load_model_config
from paged_backend.checkpoint.moe import MoeShape, Routing
from paged_backend.checkpoint.registry import tensors_of
from paged_backend.checkpoint.shape import ModelShape, Variant
from paged_backend.checkpoint.shape_reader import read_shape
from paged_backend.cli import main
from paged_backend.models.kv_cache import KVCacheSpec, KVScales
from paged_backend.models.loader import build_model
from paged_backend.platforms.cpu.torch_platform import TorchPlatform
from paged_backend.tools.plan.gpus import GPUS, Gpu, find_gpu
from paged_backend.tools.plan.groups import Group
from paged_backend.tools.plan.lengths import Lengths
from paged_backend.tools.plan.memory import CONTEXT_BYTES, Memory, MemoryPlanner, group_sizes
from paged_backend.tools.plan.model_file import find_config
from paged_backend.tools.plan.number_types import KV_TYPES, WEIGHT_TYPES
from paged_backend.tools.plan.prices import cost_per_million, read_prices
from paged_backend.tools.plan.roofline import Roofline
from paged_backend.tools.plan.sizes import (
    KvSizes,
    count_parameters,
    prompt_attention_flops,
    share_of_experts,
    state_bytes,
)
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import ConfigError
from paged_backend.values.kv_cache_groups import (
    KVCacheGroup,
    KVCacheLayout,
    StateLayout,
    num_empty_blocks,
    num_state_slots,
)
from paged_backend.values.options.scheduling import GPU_LIMITS
from paged_backend.values.windows import Chunks

KIB, GIB = 2**10, 2**30
BF16, KV16 = WEIGHT_TYPES["bfloat16"], KV_TYPES["bfloat16"]


def shape_of(name: str) -> ModelShape:
    return read_shape(ConfigFile.read(find_config(name)))


class MetaPlatform(TorchPlatform):
    """Models have tensors with sizes, but without memory."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.device = torch.device("meta")


LLAMA_8B, LLAMA_70B = shape_of("llama-3-8b"), shape_of("llama-3-70b")
MHA = replace(LLAMA_8B, num_kv_heads=32)  # Llama-2-7B's cache
MQA = replace(LLAMA_8B, num_kv_heads=1)


def kv(shape: ModelShape, kind: str = "bfloat16", num_gpus: int = 1) -> KvSizes:
    return KvSizes.of(shape, KV_TYPES[kind], num_gpus)


# Parameters


def test_parameters_of_llama_3_8b() -> None:
    # Embedding and output: 128256 x 4096 each. A layer: q and o 4096 x 4096, k and v 4096 x 1024,
    # three of 4096 x 14336, two norms of 4096. A last norm.
    parameters = count_parameters(LLAMA_8B)
    assert parameters.embedding == parameters.head == 525_336_576
    assert parameters.linear == 32 * (2 * 16_777_216 + 2 * 4_194_304 + 3 * 58_720_256)
    assert parameters.rest == 32 * 2 * 4096 + 4096
    assert parameters.total == 8_030_261_248  # published as 8.03B


def test_parameters_of_llama_3_70b() -> None:
    assert count_parameters(LLAMA_70B).total == 70_553_706_496  # published as 70.55B


def test_weights_take_two_bytes_each_in_bfloat16() -> None:
    assert count_parameters(LLAMA_8B).bytes(BF16) == 2 * 8_030_261_248
    assert count_parameters(LLAMA_8B).bytes(WEIGHT_TYPES["float32"]) == 4 * 8_030_261_248


def test_quantized_weights_leave_the_embedding_and_norms_alone() -> None:
    linear, others = 6_979_321_856, 8_030_261_248 - 6_979_321_856
    parameters = count_parameters(LLAMA_8B)
    assert parameters.bytes(WEIGHT_TYPES["fp8"]) == linear + 2 * others
    # Of each group of 128: 64 bytes, a scale of two, a zero point of half a byte.
    assert parameters.bytes(WEIGHT_TYPES["int4"]) == linear * 66.5 / 128 + 2 * others


def allocated(config: ModelConfig) -> dict[str, Tensor]:
    """The memory for the weights of a model."""
    parameters = build_model(config, 2, MetaPlatform(torch.bfloat16)).parameters()
    return {name: place for name, place in parameters.items() if isinstance(place, Tensor)}


@pytest.mark.parametrize("name", ["demo", "llama-30m", "smollm2-135m", "llama-3-8b", "llama-3-70b"])
def test_the_engine_makes_room_for_as_many_weights(name: str) -> None:
    config = load_model_config(find_config(name).parent)
    parameters = allocated(config)
    assert (
        sum(parameter.numel() for parameter in parameters.values())
        == count_parameters(config).total
    )
    if not config.tied_embeddings:
        del parameters["model.embed_tokens.weight"]
    read = count_parameters(config).bytes_of_step(BF16)
    assert read == sum(parameter.nbytes for parameter in parameters.values())


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("Qwen2ForCausalLM", {}),
        ("Qwen3ForCausalLM", {"attention_bias": True}),
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
        ("MistralForCausalLM", {"num_key_value_heads": 1}),
    ],
)
def test_biases_and_head_norms_are_counted(
    tmp_path: Path, architecture: str, changes: dict[str, object]
) -> None:
    values = json.loads(find_config("llama-30m").read_text())
    values |= {"architectures": [architecture], **changes}
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = load_model_config(tmp_path)
    parameters = allocated(config)
    assert (
        sum(parameter.numel() for parameter in parameters.values())
        == count_parameters(config).total
    )


# KV cache


def test_kv_bytes_of_llama_3() -> None:
    assert kv(LLAMA_8B).bytes_per_token == 128 * KIB  # 2 x 32 layers x 8 heads x 128 x 2 bytes
    assert kv(LLAMA_8B).bytes_per_token * 8192 == GIB
    assert kv(LLAMA_70B).bytes_per_token == 320 * KIB


@pytest.mark.parametrize("name", ["demo", "smollm2-135m", "llama-3-70b"])
def test_the_engine_makes_blocks_of_as_many_bytes(name: str) -> None:
    shape = shape_of(name)
    group = KVCacheGroup(None, tuple(range(shape.num_layers)))
    heads = (group,), alike((group,), shape.num_kv_heads, shape.head_dim)
    spec = KVCacheSpec(*heads, block_size=32, dtype=torch.float16)
    assert spec.bytes_per_block == 32 * kv(shape, "float16").bytes_per_token
    spec = KVCacheSpec(*heads, 32, torch.int8, KVScales.TOKEN_HEAD)
    assert spec.bytes_per_block == 32 * kv(shape, "int8_per_token_head").bytes_per_token


def test_kv_bytes_by_the_number_of_heads() -> None:
    assert kv(MHA).bytes_per_token == 512 * KIB
    assert kv(MQA).bytes_per_token == 16 * KIB


@pytest.mark.parametrize(
    ("kind", "kib"),
    [
        ("float32", 256),
        ("float16", 128),
        ("fp8", 64 + 2),  # 512 vectors of 128 bytes with a scale of four bytes each
        ("int8_per_token_head", 64 + 2),
    ],
)
def test_kv_bytes_by_dtype(kind: str, kib: int) -> None:
    assert kv(LLAMA_8B, kind).bytes_per_token == kib * KIB


def test_a_window_bounds_what_is_read_but_not_what_is_kept() -> None:
    shape = replace(LLAMA_8B, variant=Variant(windows=(4096,) * 32))
    assert kv(shape).bytes_per_token == 128 * KIB
    assert kv(shape).bytes_seen(4000) == 4000 * 128 * KIB
    assert kv(shape).bytes_seen(32768) == 4096 * 128 * KIB
    half = replace(LLAMA_8B, variant=Variant(windows=(4096, None) * 16))
    assert kv(half).bytes_seen(8192) == (4096 + 8192) * 64 * KIB
    chunks = replace(LLAMA_8B, variant=Variant(windows=(Chunks(4096),) * 32))
    assert kv(chunks).bytes_seen(4000) == 4000 * 128 * KIB
    assert kv(chunks).bytes_seen(32768) == 2048.5 * 128 * KIB  # the mean of all places in a chunk


def test_gpus_share_heads_until_there_are_none_left() -> None:
    assert kv(LLAMA_70B, num_gpus=4).bytes_per_token == 80 * KIB
    assert kv(LLAMA_70B, num_gpus=8).bytes_per_token == 40 * KIB
    assert kv(LLAMA_70B, num_gpus=16).bytes_per_token == 40 * KIB  # each head twice
    assert list(group_sizes(LLAMA_70B)) == [1, 2, 4, 8, 16, 32, 64]
    assert list(group_sizes(shape_of("smollm2-135m"))) == [1, 3, 9]


# Memory


def planner(shape: ModelShape, gpu: str, block_size: int = 16) -> MemoryPlanner:
    limits = EngineConfig().step_limits(GPU_LIMITS)
    return MemoryPlanner(shape, BF16, KV16, find_gpu(gpu), 0.9, block_size, limits, 8192)


def test_memory_of_llama_3_8b_on_an_h200() -> None:
    memory = planner(LLAMA_8B, "h200").divide(Group(1))
    # Largest step: 8192 tokens of 2 x 4096 + 4096 + 6144 + 3 x 14336 numbers in two bytes, and
    # 256 x 128256 logits twice in four; all of it twice.
    assert memory.step_bytes == 2 * (8192 * 61440 * 2 + 256 * 128256 * 8)
    usable = int(0.9 * 143771 * 2**20)
    assert memory.pool_bytes == usable - CONTEXT_BYTES - 16_060_522_496 - memory.step_bytes
    assert memory.num_blocks == memory.pool_bytes // (16 * 128 * KIB) - 1  # the null block
    assert memory.num_sequences(8192) == memory.num_blocks // 512
    assert memory.num_sequences(8193) == memory.num_blocks // 513


def test_windows_leave_room_for_more_sequences() -> None:
    full = planner(LLAMA_8B, "h200").divide(Group(1))
    half = planner(replace(LLAMA_8B, variant=Variant(windows=(512, None) * 16)), "h200").divide(
        Group(1)
    )
    assert half.num_blocks == pytest.approx(2 * full.num_blocks, abs=3)  # blocks of half the layers
    # Beside the 512 blocks of 8192 tokens without a window: 33 of a decode, 512 of one prefill.
    assert half.num_sequences(8192) == 1 + (half.num_blocks - 1024) // 545
    assert half.layout.blocks_of_decode(8192) == 545


def test_the_least_number_of_gpus() -> None:
    def least(shape: ModelShape, gpu: str, sequences: int = 1) -> int | None:
        groups = map(Group, group_sizes(shape))
        memory = planner(shape, gpu).least(groups, 8192, sequences)
        return memory and memory.num_gpus

    # Of an L4's 20.2 GiB, weights take 15.0, a step 2.4 and CUDA 0.5; a sequence takes 1.
    assert least(LLAMA_8B, "l4", sequences=2) == 1
    assert least(LLAMA_8B, "l4", sequences=3) == 2
    assert least(LLAMA_70B, "h100") == 2  # 2 x 71.7 GiB for 131.4 GiB of weights
    assert least(LLAMA_70B, "h100", sequences=64) == 8  # and 160 GiB of KV: 4 x 71.7 do not do
    assert least(LLAMA_70B, "b200") == 1
    assert least(LLAMA_70B, "tiny=1:1:1") is None


def test_memory_of_stages() -> None:
    """The embedding is in the first stage, and the output layer, as large, in the last one."""
    parameters = count_parameters(LLAMA_70B)
    layers = parameters.total - parameters.embedding - parameters.head
    memory = planner(LLAMA_70B, "h100").divide(Group(2, 4))
    assert (memory.num_gpus, memory.group.num_nodes) == (8, 1)
    assert memory.weight_bytes == 2 * (layers // 4 + parameters.head) // 2
    per_layer = 4 * KIB // 2  # bytes on each of two GPUs
    assert memory.num_blocks == memory.pool_bytes // (16 * 20 * per_layer) - 1
    uneven = planner(LLAMA_70B, "h100").divide(Group(1, 3))
    assert uneven.weight_bytes == 2 * layers * 27 // 80 + 2 * parameters.head


def test_memory_that_weights_alone_exceed_has_no_blocks() -> None:
    memory = planner(LLAMA_70B, "l4").divide(Group(1))
    assert (memory.pool_bytes, memory.num_blocks, memory.num_sequences(16)) == (0, 0, 0)


# Lengths


def test_equal_lengths_by_hand() -> None:
    # 10 of prompt, 6 of output: a sequence holds 11 ... 16 tokens, 13.5 on average. In blocks of 4
    # those are 3, 3, 4, 4, 4, 4.
    lengths = Lengths.lognormal(10, 6, 0, 100)
    assert lengths.pairs == ((10, 6),)
    assert lengths.mean_held == 13.5
    assert lengths.mean_slots(4) == 4 * 22 / 6
    assert lengths.mean_slots(1) == 13.5
    assert lengths.mean_blocks(KVCacheLayout(4, 64)) == 22 / 6
    # The last token sees those from 5 ... 10 on: 1, 1, 1, 2, 2, 2 blocks are freed.
    assert lengths.mean_blocks(KVCacheLayout(4, 64, (None, 6))) == (2 * 22 - 9) / 6
    # In chunks of 6 it sees those from 6, 6, 12, 12, 12, 12 on: 1, 1, 3, 3, 3, 3 blocks.
    assert lengths.mean_blocks(KVCacheLayout(4, 64, (None, Chunks(6)))) == (2 * 22 - 14) / 6


def test_lengths_weigh_by_the_steps_that_they_run() -> None:
    # One step at 11 tokens, three at 11, 12 and 13.
    assert Lengths(((10, 1), (10, 3))).mean_held == (11 + 11 + 12 + 13) / 4


def test_log_normal_lengths_keep_their_mean_and_spread() -> None:
    lengths = Lengths.lognormal(1000, 200, 1.0, 2**24)
    assert lengths.mean_input == pytest.approx(1000, rel=1e-3)
    assert lengths.mean_output == pytest.approx(200, rel=5e-3)
    prompts = sorted({prompt for prompt, _ in lengths.pairs})
    assert prompts[len(prompts) // 2] == pytest.approx(1000 * math.exp(-0.5), rel=0.03)


def test_no_length_exceeds_the_context() -> None:
    lengths = Lengths.lognormal(1000, 200, 2.0, 4096)
    assert max(prompt + output for prompt, output in lengths.pairs) == 4096
    assert min(min(pair) for pair in lengths.pairs) >= 1


# Rooflines


ONE = Group()


def roofline_of(
    shape: ModelShape, gpu: Gpu, group: Group = ONE, network_gb_s: float = 50
) -> Roofline:
    return Roofline(shape, BF16, KV16, gpu, group, network_gb_s * 1e9)


def test_decode_roofline_by_hand() -> None:
    roofline = roofline_of(LLAMA_8B, GPUS["h200"])
    # All weights but the embedding's table, and 128 KiB for each of 32 x 1024 tokens.
    bytes_read = 2 * (8_030_261_248 - 525_336_576) + 32 * 1024 * 128 * KIB
    step = roofline.decode(32, 1024)
    assert step.bound == "memory"
    assert step.seconds == pytest.approx(bytes_read / 4.8e12)
    assert step.tokens_per_s == pytest.approx(32 / (bytes_read / 4.8e12))


def test_large_batches_of_short_sequences_are_bound_by_computing() -> None:
    step = roofline_of(LLAMA_8B, GPUS["l40s"]).decode(2048, 16)
    # Two operations for each weight; four for each query head's number and each token it sees.
    flops = 2 * (8_030_261_248 - 525_336_576 - 266_240) + 4 * 32 * 4096 * 16
    assert step.bound == "compute"
    assert step.seconds == pytest.approx(2048 * flops / 362e12)


def test_prefill_roofline_by_hand() -> None:
    step = roofline_of(LLAMA_8B, GPUS["h100-sxm"]).prefill(8192)
    linear = 2 * 6_979_321_856 * 8192
    attention = 32 * 4 * 4096 * (8192 * 8193 // 2)
    assert step.bound == "compute"
    assert step.seconds == pytest.approx((linear + attention + 2 * 525_336_576) / 989.5e12)


def test_prompt_attention_within_a_window() -> None:
    shape = replace(LLAMA_8B, num_layers=1, variant=Variant(windows=(3,)))
    assert prompt_attention_flops(shape, 5) == 4 * 4096 * (1 + 2 + 3 + 3 + 3)
    assert prompt_attention_flops(shape, 2) == 4 * 4096 * (1 + 2)
    chunks = replace(LLAMA_8B, num_layers=1, variant=Variant(windows=(Chunks(3),)))
    assert prompt_attention_flops(chunks, 5) == 4 * 4096 * (1 + 2 + 3 + 1 + 2)
    assert prompt_attention_flops(chunks, 2) == 4 * 4096 * (1 + 2)


def test_gpus_share_the_work() -> None:
    fast = replace(GPUS["h200"], link_gb_s=math.inf)
    one, four = (roofline_of(LLAMA_70B, fast, Group(n)) for n in (1, 4))
    assert one.decode(16, 2048).seconds == pytest.approx(4 * four.decode(16, 2048).seconds)
    assert one.prefill(4096).seconds == pytest.approx(4 * four.prefill(4096).seconds)


def test_each_layer_adds_the_hidden_states_of_all_gpus_twice() -> None:
    fast = replace(GPUS["h200"], link_gb_s=math.inf)
    for group, gb_s in ((Group(4), 450), (Group(16), 50)):  # 16 GPUs are two hosts
        work = roofline_of(LLAMA_70B, fast, group, math.inf).decode(16, 2048).seconds
        step = roofline_of(LLAMA_70B, GPUS["h200"], group).decode(16, 2048)
        share = 2 * (group.tensor - 1) / group.tensor
        traffic = 80 * 2 * share * 16 * 8192 * 2 / (gb_s * 1e9)
        assert step.seconds == pytest.approx(work + traffic)


def test_a_step_passes_one_stage_after_another() -> None:
    """70B on 4 x 2 GPUs: each stage reads its part of the weights while the others wait."""
    group, gpu = Group(2, 4), GPUS["h200"]
    step = roofline_of(LLAMA_70B, gpu, group).decode(64, 2048)
    parameters = count_parameters(LLAMA_70B)
    read = 2 * (parameters.total - parameters.embedding) / 2 + 64 * 2048 * 80 * 2 * KIB
    traffic = 80 * 2 * 1 * 64 * 8192 * 2  # the sums of two GPUs
    traffic += 3 * 64 * (8192 + LLAMA_70B.vocab_size) * 2  # hidden states, and logits
    assert step.bound == "memory"
    assert step.seconds == pytest.approx(read / 4.8e12 + traffic / 450e9)
    assert step.tokens_per_s == pytest.approx(64 / step.seconds)


def test_a_request_takes_its_prefill_and_its_share_of_decodes() -> None:
    roofline = roofline_of(LLAMA_70B, GPUS["h200"], Group(1, 4))
    decode, prefill = roofline.decode(64, 1000), roofline.prefill(1000)
    wanted = prefill.seconds + 10 * decode.seconds / 64
    assert roofline.request_seconds(64, 1000, 10, 1000) == pytest.approx(wanted)


def test_a_gpu_without_fp8_multiplies_as_bfloat16() -> None:
    assert GPUS["a100-80gb"].flops_per_s("fp8") == 312e12
    assert GPUS["h100-sxm"].flops_per_s("fp8") == 1979e12


def test_the_tied_output_layer_is_computed_too() -> None:
    shape = replace(LLAMA_8B, tied_embeddings=True)
    tied, untied = (roofline_of(s, GPUS["l4"]) for s in (shape, LLAMA_8B))
    assert tied.decode(1, 10) == untied.decode(1, 10)


# GPUs and prices


@pytest.mark.parametrize(
    ("text", "name"),
    [("H200", "h200"), ("a100", "a100-80gb"), ("h100", "h100-sxm"), ("NVIDIA_A100 40GB", None)],
)
def test_names_of_gpus(text: str, name: str | None) -> None:
    assert find_gpu(text).name == (name or "a100-40gb")


def test_every_gpu_names_its_source() -> None:
    assert all("data sheet" in gpu.source for gpu in GPUS.values())
    assert all({"float32", "bfloat16", "int8"} <= set(gpu.tflops) for gpu in GPUS.values())


def test_a_gpu_of_ones_own() -> None:
    gpu = find_gpu("mine=24:1008:165")
    assert (gpu.memory_bytes, gpu.bytes_per_s, gpu.flops_per_s("fp8")) == (
        24 * GIB,
        1.008e12,
        165e12,
    )


@pytest.mark.parametrize(
    "text", ["h300", "", "x=1:2", "x=1:2:nan", "=1:2:3", "x=1:2:-3", "x=a:b:c"]
)
def test_wrong_gpus(text: str) -> None:
    with pytest.raises(ConfigError, match="^--gpu: "):
        find_gpu(text)


def test_costs_by_hand() -> None:
    # 3.60 an hour are 0.001 a second, in which 1000 tokens come: a million take 1000 seconds.
    assert cost_per_million(3.6, 1000) == pytest.approx(1.0)
    assert cost_per_million(None, 1000) is None
    assert read_prices(["2", "3"], 2) == [2, 3]
    assert read_prices(["2"], 3) == [2, 2, 2]
    assert read_prices([], 2) == [None, None]


@pytest.mark.parametrize("prices", [["0"], ["-1"], ["nan"], ["inf"], ["free"], ["1", "2", "3"]])
def test_wrong_prices(prices: list[str]) -> None:
    with pytest.raises(ConfigError, match="^--price: "):
        read_prices(prices, 2)


# Experts


@pytest.fixture
def mixture() -> ModelShape:
    """Qwen3-30B-A3B, but for the norms of its heads."""
    routing = Routing(8, norm_topk_prob=True)
    moe = MoeShape(hidden_size=2048, num_experts=128, intermediate_size=768, routing=routing)
    return replace(
        LLAMA_8B,
        vocab_size=151_936,
        hidden_size=2048,
        num_layers=48,
        num_kv_heads=4,
        variant=Variant(moe=moe),
    )


def test_parameters_of_a_mixture_of_experts(mixture: ModelShape) -> None:
    parameters = count_parameters(mixture)
    assert parameters.experts == 48 * 128 * 3 * 2048 * 768
    assert parameters.linear == 48 * (2 * 4096 * 2048 + 2 * 512 * 2048)
    assert parameters.rest == 48 * (2 * 2048 + 128 * 2048) + 2048
    assert 30.5e9 < parameters.total < 30.6e9  # published as 30.5B


def test_a_step_reads_the_experts_that_its_tokens_choose(mixture: ModelShape) -> None:
    parameters = count_parameters(mixture)
    assert share_of_experts(LLAMA_8B, 1) == 1
    assert share_of_experts(mixture, 1) == 8 / 128
    assert share_of_experts(mixture, 2) == pytest.approx(1 - (120 / 128) ** 2)
    unread = parameters.bytes_of_step(BF16) - parameters.bytes_of_step(BF16, 8 / 128)
    assert unread == 2 * parameters.experts * 120 // 128
    gpu = GPUS["h200"]
    step = roofline_of(mixture, gpu).decode(1, 1)
    active = 3.35e9 - 151_936 * 2048  # published as 3.3B, of which the embedding is looked up
    assert step.bound == "memory"
    assert step.seconds == pytest.approx(2 * active / gpu.bytes_per_s, rel=0.01)


# Latent attention


def deepseek_v3() -> ModelShape:
    """DeepSeek-V3: its config.json names what differs from the family's defaults."""
    values = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_size": 7168,
        "intermediate_size": 18_432,
        "max_position_embeddings": 163_840,
        "num_attention_heads": 128,
        "num_hidden_layers": 61,
        "num_nextn_predict_layers": 1,
        "vocab_size": 129_280,
    }
    return read_shape(ConfigFile(values, "config.json"))


def test_parameters_of_deepseek_v3() -> None:
    assert count_parameters(deepseek_v3()).total == 671_026_419_200  # published as 671B


def test_latent_attention_keeps_a_row_for_each_token() -> None:
    shape = deepseek_v3()
    assert kv(shape).bytes_per_token == 61 * (512 + 64) * 2
    assert kv(shape, num_gpus=8).bytes_per_token == kv(shape).bytes_per_token
    group = KVCacheGroup(None, tuple(range(shape.num_layers)))
    spec = KVCacheSpec(
        (group,), alike((group,), *shape.kept_of(0)), block_size=32, dtype=torch.bfloat16
    )
    assert spec.bytes_per_block == 32 * kv(shape).bytes_per_token


def test_all_heads_of_latent_attention_multiply_whole_rows() -> None:
    # Each of 128 heads multiplies 576 numbers of a row for its score, and adds 512.
    assert prompt_attention_flops(deepseek_v3(), 2) == 61 * 3 * 2 * 128 * (576 + 512)


def test_gpus_that_share_latent_attention_divide_its_heads() -> None:
    assert list(group_sizes(deepseek_v3())) == [1, 2, 4, 8, 16, 32, 64]


@pytest.mark.parametrize("family", ["gemma4", "gemma4-plain", "llama4"])
def test_layers_that_differ_as_the_engine_counts_them(family: str, tmp_path: Path) -> None:
    """Its bytes of a token and its blocks, in the memory that the engine has."""
    oracle = Oracle(family, tmp_path)
    info = make_engine(oracle.folder).executor.info
    shape = read_shape(ConfigFile.read(tmp_path / "config.json"))
    sizes = KvSizes.of(shape, KV_TYPES["float32"])
    groups = sizes.groups(shape.max_position_embeddings)
    assert info.kv_layout.windows == tuple(group.window for group in groups)
    assert info.kv_bytes_per_token == sizes.bytes_per_token
    assert info.num_blocks == 16 * 2**20 // sizes.block_bytes(groups, 16)
    counted = count_parameters(shape)
    total = sum(weight.numel() for weight in oracle.model.state_dict().values())
    assert counted.total == total - (counted.embedding if shape.tied_embeddings else 0)


def test_layers_that_share_keys_and_values_read_them_each(tmp_path: Path) -> None:
    """Layers 3 and 4 keep nothing; they read 2 heads of 16, and of 32, in the window and beyond."""
    make_checkpoint("gemma4", tmp_path)
    sizes = KvSizes.of(read_shape(ConfigFile.read(tmp_path / "config.json")), KV_TYPES["float32"])
    small, large = 4 * 2 * 2 * 16, 4 * 2 * 2 * 32
    assert sizes.bytes_per_token == 2 * small + large
    assert sizes.bytes_seen(100) == 20 * 3 * small + 100 * 2 * large


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_states_of_qwen3_next_as_the_engine_counts_them(
    tensor: int, pipeline: int, tmp_path: Path
) -> None:
    """Its blocks and slots, in the memory that each rank of an engine has."""
    kinds = ["linear_attention", "linear_attention", "full_attention", "full_attention"]
    make_checkpoint("qwen3-next", tmp_path, num_hidden_layers=4, layer_types=kinds)
    ranks = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    problem = (
        "option pipeline_parallel_size must be so small that each stage has a layer with "
        "attention; of 2 stages, number 1 has the layers 0 to 1, none of which has attention"
    )
    if pipeline > 1:
        with pytest.raises(ConfigError, match=problem):
            load_first_rank(tmp_path, **ranks)
        kinds[1:3] = kinds[2:0:-1]
        make_checkpoint("qwen3-next", tmp_path, num_hidden_layers=4, layer_types=kinds)
    info = make_ranks_engine(tmp_path, max_num_seqs=2, **ranks).executor.info
    shape = read_shape(ConfigFile.read(tmp_path / "config.json"))
    weights, kv32, pool = WEIGHT_TYPES["float32"], KV_TYPES["float32"], 16 * 2**20
    # Each of 2 layers: 3 earlier inputs of 2 * 32 + 96 channels, and 4 heads of 16 x 24.
    slot_bytes = 2 * 4 * (3 * (2 * 32 + 96) + 4 * 16 * 24)
    assert state_bytes(shape, weights) == slot_bytes
    group = Group(tensor, pipeline)
    for stage in group.stages(shape.num_layers):
        of_rank = state_bytes(shape, weights, tensor, stage)
        assert of_rank == slot_bytes // group.num_gpus
    num_slots = num_state_slots(pool, of_rank, 2)
    assert info.kv_layout.states is not None
    assert info.kv_layout.states.num_slots == num_slots
    per_token = KvSizes.of(shape, kv32, tensor).bytes_per_token // pipeline
    assert per_token == info.kv_bytes_per_token
    assert info.num_blocks == (pool - num_slots * of_rank) // (16 * per_token)
    limits = EngineConfig(max_num_seqs=2).step_limits(GPU_LIMITS)
    planned = MemoryPlanner(shape, weights, kv32, find_gpu("l4"), 0.9, 16, limits, 512)
    memory = planned.divide(group)
    num_slots = num_state_slots(2**40, of_rank, 2)
    left = int(0.9 * find_gpu("l4").memory_bytes) - CONTEXT_BYTES - num_slots * of_rank
    assert memory.pool_bytes == left - memory.weight_bytes - memory.step_bytes
    assert memory.num_blocks == memory.pool_bytes // (16 * per_token) - 1
    assert list(group_sizes(shape)) == [1, 2]


@pytest.mark.parametrize("tensor", [1, 2])
def test_states_without_attention_as_the_engine_counts_them(tensor: int, tmp_path: Path) -> None:
    """Slots have all of the pool, and blocks none."""
    make_checkpoint("mamba2", tmp_path)
    info = make_ranks_engine(tmp_path, max_num_seqs=2, tensor_parallel_size=tensor).executor.info
    shape = read_shape(ConfigFile.read(tmp_path / "config.json"))
    weights, kv32 = WEIGHT_TYPES["float32"], KV_TYPES["float32"]
    # Three layers: 3 earlier inputs of 128 + 2 * 2 * 24 channels, and 8 heads of 16 x 24.
    slot_bytes = 3 * 4 * (3 * (128 + 96) + 8 * 16 * 24) // tensor
    assert state_bytes(shape, weights, tensor) == slot_bytes
    assert KvSizes.of(shape, kv32, tensor).bytes_per_token == info.kv_bytes_per_token == 0
    states = info.kv_layout.states
    assert states is not None and states.num_slots == min(517, 2**24 // slot_bytes)
    assert states.num_slots == num_state_slots(2**24, slot_bytes, 2, alone=True)
    assert info.num_blocks == num_empty_blocks(info.kv_layout, states.num_slots, 512)
    limits = EngineConfig(max_num_seqs=2).step_limits(GPU_LIMITS)
    planned = MemoryPlanner(shape, weights, kv32, find_gpu("l4"), 0.9, 16, limits, 512)
    memory = planned.divide(Group(tensor))
    assert (memory.pool_bytes, memory.state_bytes) == (0, 517 * slot_bytes)
    assert memory.num_blocks == 517 * 512 // 16
    assert memory.num_sequences(512) == memory.limited(1000) == 258
    assert list(group_sizes(shape)) == [1, 2]


def test_slots_limit_the_sequences() -> None:
    """Slot 0 is never written, and each sequence may need a second slot in a step."""
    assert [StateLayout(slots, 0).num_sequences for slots in (3, 4, 5, 517)] == [1, 1, 2, 258]
    layout = KVCacheLayout(16, 512, (None,), StateLayout(7, 0))
    assert [layout.num_sequences(blocks, 32) for blocks in (1, 4, 100)] == [0, 2, 3]


def test_slots_limit_the_sequences_of_a_hybrid_in_little_memory(tmp_path: Path) -> None:
    make_checkpoint("bamba", tmp_path, attn_layer_indices=[1])
    shape = read_shape(ConfigFile.read(tmp_path / "config.json"))
    gpu, limits = find_gpu("l4"), EngineConfig(max_num_seqs=64).step_limits(GPU_LIMITS)

    def divided(share: float) -> Memory:
        return MemoryPlanner(shape, BF16, KV16, gpu, share, 16, limits, 512).divide(ONE)

    much = divided(0.9)
    assert much.layout.states is None
    assert much.num_sequences(512) == much.limited(much.num_blocks // 32) == much.num_blocks // 32
    others = CONTEXT_BYTES + much.weight_bytes + much.step_bytes
    little = divided((others + 20.5 * state_bytes(shape, BF16)) / gpu.memory_bytes)
    assert little.layout.states == StateLayout(10, 0)
    assert little.state_bytes == 10 * state_bytes(shape, BF16)
    assert little.num_sequences(16) == little.limited(1000) == 4
    assert little.num_blocks > 4


def test_a_step_reads_and_writes_states_and_reads_shared_blocks_again(tmp_path: Path) -> None:
    make_checkpoint("mamba2", tmp_path / "alone")
    shape = read_shape(ConfigFile.read(tmp_path / "alone" / "config.json"))
    states = 3 * (2 * 3 * (128 + 96) + 4 * 8 * 16 * 24)
    parameters = count_parameters(shape)
    moved = 2 * (parameters.total - parameters.embedding) + 5 * 2 * states
    step = roofline_of(shape, GPUS["h200"]).decode(5, 1000)
    assert step.seconds == pytest.approx(moved / 4.8e12)
    oracle = Oracle("zamba2", tmp_path / "shared")
    shape = read_shape(ConfigFile.read(tmp_path / "shared" / "config.json"))
    tensors = tensors_of(shape)
    assert sum(spec.num_elements for spec in tensors.values()) == sum(
        weight.numel() for weight in oracle.model.parameters()
    )
    block = "model.layers.1.shared_transformer."  # layers 1 and 4 use it
    again = sum(
        spec.num_elements
        for name, spec in tensors.items()
        if name.startswith(block) and "adapter" not in name
    )
    assert num_read_again(shape) == again > 0


@pytest.mark.parametrize("family", ["mamba2", "mamba", "zamba2"])
def test_tables_of_models_with_states(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    make_checkpoint(family, tmp_path)
    assert main(["plan", str(tmp_path), "--gpu", "l4"]) == 0
    text = capsys.readouterr().out
    assert "a sequence" in text and ("a token in" in text) is (family == "zamba2")
    kind = "MHA" if family == "zamba2" else "none"
    number = 5 if family == "zamba2" else 3
    assert f"{kind}, a state per sequence in {number} of {number} layers" in text
    code = main(["plan", str(tmp_path), "--gpu", "l4", "--kv-cache-dtype", "fp8"])
    problem = "--kv-cache-dtype: it can only be auto for a model without attention, got fp8"
    assert (problem in capsys.readouterr().err, code) == (
        family != "zamba2",
        2 * (family != "zamba2"),
    )
