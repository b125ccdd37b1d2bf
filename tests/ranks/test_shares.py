"""The shares of all ranks together are the checkpoint, in every family and number format."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import FAMILIES, write_config

from paged_backend.checkpoint.model_config import load_model_config
from paged_backend.checkpoint.registry import tensors_of
from paged_backend.checkpoint.shares import Share, divide, shares_of
from paged_backend.quantization.weight import QuantizedWeight, divided_block
from paged_backend.values.errors import ConfigError

# Sizes that two ranks divide.
EVEN = {"kimi-linear": {"linear_num_heads": 4}}


@pytest.mark.parametrize("by_expert", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_have_each_number_of_a_tensor(family: str, by_expert: bool, tmp_path: Path) -> None:
    write_config(family, tmp_path, **EVEN.get(family, {}))
    whole = load_model_config(tmp_path)
    try:
        part = divide(whole, 2, by_expert=by_expert)
    except ConfigError as error:
        pytest.skip(str(error))
    mixers = zip(whole.variant.state_mixers, part.variant.state_mixers, strict=True)
    for mixer, own in mixers:
        if mixer is not None and own is not None:  # a rank keeps a part of each state
            assert own.kept_numbers[0] < mixer.kept_numbers[0]
            assert 2 * own.kept_numbers[1] == mixer.kept_numbers[1]
    shares = [shares_of(whole, part, rank, 2, by_expert=by_expert) for rank in range(2)]
    names = set(shares[0]) | set(shares[1])
    divided = [name for name in tensors_of(whole) if name in names]
    assert divided
    for name in divided:
        spec = tensors_of(whole)[name]
        tensor = torch.arange(spec.num_elements).view(spec.shape)
        found: set[int] = set()
        for each in shares:
            share = each.get(name, Share(spec.shape, spec.shape, 0, ((0, spec.shape[0]),)))
            if not share.is_elsewhere:
                part_of_rank = share.take(tensor)
                assert tuple(part_of_rank.shape) == share.shape, name
                found |= set(part_of_rank.flatten().tolist())
        assert found == set(range(spec.num_elements)), name
    for name, spec in tensors_of(whole).items():
        if spec.is_added_once and not (by_expert and spec.experts):
            assert name not in shares[0] and shares[1][name].dim is None, name


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("block", [(1, 64), (1, 16), (1, 24), (8, 8), (12, 40), (48, 64)])
@pytest.mark.parametrize(
    "share",
    [
        Share((48, 64), (24, 64), 0, ((24, 24),)),
        Share((48, 64), (20, 64), 0, ((4, 8), (28, 4), (40, 8))),
        Share((48, 64), (48, 16), 1, ((32, 16),)),
        Share((48, 64), (48, 32), 1, ((32, 32),)),
    ],
    ids=["half of the rows", "rows of three parts", "a quarter of the columns", "half of them"],
)
def test_a_share_of_a_quantized_weight(
    share: Share, block: tuple[int, int], has_zeros: bool
) -> None:
    generator = torch.Generator().manual_seed(0)

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-8, 8, shape, generator=generator, dtype=torch.int8)

    blocks = -(-48 // block[0]), -(-64 // block[1])
    scales = torch.rand(blocks, generator=generator) + 0.5
    zeros = integers(*blocks) if has_zeros else None
    weight = QuantizedWeight(integers(48, 64), scales, block, zeros)
    part = weight.take(share)
    assert torch.equal(part.dequantize(), share.take(weight.dequantize()))
    assert part.block == divided_block(block, share)
    if block[0] == 1 and share.dim == 1:  # the groups of inputs may be in any order
        groups = torch.randint(0, blocks[1], (64,), generator=generator)
        shuffled = QuantizedWeight(weight.values, scales, block, zeros, groups)
        expected = share.take(shuffled.dequantize())
        assert torch.equal(shuffled.take(share).dequantize(), expected)
