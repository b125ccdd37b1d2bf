"""The decoder against transformers, through the paged cache, in batches of all kinds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import FAMILIES, make_checkpoint
from torch import Tensor

from paged_backend.checkpoint.model_config import load_model_config
from paged_backend.models.attention import AttentionBackend, AttentionMetadata
from paged_backend.models.base import Model
from paged_backend.models.kv_cache import KVCacheFormat, KVCacheSpec
from paged_backend.models.loader import load_model
from paged_backend.models.states import StatePool, StateSpec
from paged_backend.platforms.base import Platform
from paged_backend.platforms.cpu.platform import CpuPlatform
from paged_backend.platforms.cpu.torch_platform import TorchPlatform
from paged_backend.values.config import EngineConfig

PLATFORMS = [CpuPlatform(), TorchPlatform(torch.float32)]
BLOCK_SIZE = 16
NUM_BLOCKS = 112
LENGTHS = (70, 1, 33, 16)
# For each step, how many tokens each sequence computes: whole prompts beside the start of a
# chunked one; then chunks that go on from the cache beside decodes; then decodes alone.
STEPS = ((20, 1, 32, 0), (31, 0, 1, 16), (18, 0, 0, 0), (1, 0, 0, 0))


def run_steps(model: Model, attention: AttentionBackend, tokens: list[Tensor]) -> list[Tensor]:
    """Compute the sequences step by step; logits [length, vocab_size] of each."""
    generator = torch.Generator().manual_seed(3)
    blocks = torch.randperm(NUM_BLOCKS - 1, generator=generator).int() + 1
    num_groups = len(_spec(model).groups)
    tables = blocks[: num_groups * 5 * len(tokens)].view(num_groups, len(tokens), 5)
    done = [0] * len(tokens)
    logits: list[list[Tensor]] = [[] for _ in tokens]
    for counts in STEPS:
        active = [seq for seq, count in enumerate(counts) if count]
        ends = torch.tensor([counts[seq] for seq in active]).cumsum(0)
        slots, positions = [], []
        for seq in active:
            here = torch.arange(done[seq], done[seq] + counts[seq])
            positions.append(here)
            slots.append(tables[:, seq, here // BLOCK_SIZE] * BLOCK_SIZE + here % BLOCK_SIZE)
        meta = AttentionMetadata(
            query_start_loc=torch.cat((torch.zeros(1), ends)).int(),
            seq_lens=torch.tensor([done[seq] + counts[seq] for seq in active]).int(),
            block_tables=tuple(table[active] for table in tables),
            slot_mappings=torch.cat(slots, dim=1).long().unbind(),
            positions=torch.cat(positions).int(),
            num_decodes=0,
            state_slots=torch.tensor(
                [(seq + 1 if done[seq] else 0, seq + 1) for seq in active]
            ).int(),
        )
        ids = [tokens[seq][done[seq] : done[seq] + counts[seq]] for seq in active]
        hidden = model.forward(torch.cat(ids), attention, meta, torch.arange(int(ends[-1])))
        rows = model.compute_logits(hidden).float()
        for seq, part in zip(active, rows.split([counts[seq] for seq in active]), strict=True):
            logits[seq].append(part)
            done[seq] += counts[seq]
    return [torch.cat(parts) for parts in logits]


def load(folder: Path, platform: Platform) -> Model:
    return load_model(EngineConfig(), load_model_config(folder), None, folder, platform)


def _spec(model: Model, dtype: torch.dtype = torch.float32) -> KVCacheSpec:
    layers, stored = model.attention_layers, KVCacheFormat(dtype)
    return KVCacheSpec.of(layers, BLOCK_SIZE, stored, model.max_model_len)


def make_backend(model: Model, platform: Platform) -> AttentionBackend:
    attention = platform.attention(_spec(model, platform.dtype), NUM_BLOCKS)
    if model.state_layers and platform.state_functions is not None:
        states = StateSpec(tuple(model.state_layers), num_slots=1 + len(LENGTHS))
        attention.states = StatePool(states, platform.state_functions, platform.device)
    return attention


@pytest.mark.sampled
@pytest.mark.parametrize("platform", PLATFORMS, ids=["cpu", "torch"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(
    family: str, platform: Platform, tmp_path: Path
) -> None:
    reference = make_checkpoint(family, tmp_path)
    model = load(tmp_path, platform)
    generator = torch.Generator().manual_seed(5)
    vocab_size = model.config.vocab_size
    tokens = [torch.randint(vocab_size, (length,), generator=generator) for length in LENGTHS]
    with torch.no_grad():
        expected = [reference(ids.unsqueeze(0), use_cache=False).logits[0] for ids in tokens]
    logits = run_steps(model, make_backend(model, platform), tokens)
    for ours, theirs in zip(logits, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
        assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def test_only_the_rows_asked_for_are_returned(tmp_path: Path) -> None:
    make_checkpoint("llama2", tmp_path)
    platform = CpuPlatform()
    model = load(tmp_path, platform)
    meta = AttentionMetadata(
        query_start_loc=torch.tensor([0, 5], dtype=torch.int32),
        seq_lens=torch.tensor([5], dtype=torch.int32),
        block_tables=(torch.ones(1, 1, dtype=torch.int32),),
        slot_mappings=(torch.arange(BLOCK_SIZE, BLOCK_SIZE + 5),),
        positions=torch.arange(5, dtype=torch.int32),
        num_decodes=0,
    )

    def logits(rows: list[int]) -> Tensor:
        index = torch.tensor(rows, dtype=torch.int64)
        attention = make_backend(model, platform)
        return model.compute_logits(model.forward(torch.arange(5), attention, meta, index))

    everything = logits([0, 1, 2, 3, 4])
    torch.testing.assert_close(logits([4, 4, 1]), everything[[4, 4, 1]])
    assert logits([]).shape == (0, model.config.vocab_size)


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_bfloat16_is_near(family: str, tmp_path: Path) -> None:
    reference = make_checkpoint(family, tmp_path)
    platform = TorchPlatform(torch.bfloat16)
    model = load(tmp_path, platform)
    tokens = [torch.arange(length) for length in LENGTHS]
    with torch.no_grad():
        expected = [reference(ids.unsqueeze(0), use_cache=False).logits[0] for ids in tokens]
    logits = run_steps(model, make_backend(model, platform), tokens)
    for ours, theirs in zip(logits, expected, strict=True):
        assert ours.dtype == torch.float32
        assert torch.nn.functional.cosine_similarity(ours, theirs).min() > 0.99


@pytest.mark.sampled
@pytest.mark.parametrize("quantization", ["int8", "fp8"])
@pytest.mark.parametrize("family", ["glm4", "glm4-moe", "phi4-mini"])
def test_quantized_heads_have_the_order_of_the_kernels(
    family: str, quantization: str, tmp_path: Path
) -> None:
    reference = make_checkpoint(family, tmp_path)
    config, platform = load_model_config(tmp_path), CpuPlatform()
    model = load_model(EngineConfig(quantization=quantization), config, None, tmp_path, platform)
    tokens = [1 + torch.arange(length) for length in LENGTHS]
    with torch.no_grad():
        expected = [reference(ids.unsqueeze(0), use_cache=False).logits[0] for ids in tokens]
    logits = run_steps(model, make_backend(model, platform), tokens)
    for ours, theirs in zip(logits, expected, strict=True):
        assert torch.nn.functional.cosine_similarity(ours, theirs).mean() > 0.97
