from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from paged_kernels.device import Device, pretend
from paged_kernels.errors import ArgumentError
from paged_kernels.fused_qk_norm_rope_cache import fused_qk_norm_rope_cache
from paged_kernels.reference import fused_qk_norm_rope_cache as reference
from torch import Tensor

# The kernel rounds once: half of the last place, relative, and float32's own error where a
# rotation cancels.
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2**-11 * 1.01, torch.bfloat16: 2**-8 * 1.01}
QUANTIZED = [torch.float8_e4m3fn, torch.int8]
PADDING = 8  # elements after each row of qkv


@dataclass
class Step:
    """Arguments of one call. Memory that is not to be read or written holds NaN, or 85 in int8."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    cache_dtype: torch.dtype | None = None
    block_size: int = 8
    norms: bool = False
    token_scales: bool = False  # for a quantized cache
    slots: list[int] = field(default_factory=lambda: [9, 31, 16, -1, 0])

    def __post_init__(self) -> None:
        num_tokens, dim, kv = len(self.slots), self.head_dim, self.num_kv_heads
        width = (self.num_heads + 2 * kv) * dim
        self.rows = torch.full((num_tokens, width + PADDING), float("nan"), dtype=self.dtype)
        self.rows[:, :width] = torch.randn(num_tokens, width).to(self.dtype)
        self.rows = self.rows.to(self.device)
        self.qkv = self.rows[:, :width]
        shape = (5, 2, kv, self.block_size, dim)
        self.cache = _poisoned(shape, self.cache_dtype or self.dtype, self.device)
        angles = torch.arange(40)[:, None] * 10 ** torch.linspace(0, -4, dim // 2)
        self.cos_sin_cache = torch.cat((angles.cos(), angles.sin()), dim=1).to(self.device)
        positions = torch.randint(1, 40, (num_tokens,), dtype=torch.int32)
        self.positions = positions.to(self.device)
        self.slot_mapping = torch.tensor(self.slots, dtype=torch.int64, device=self.device)
        self.options: dict[str, Any] = {"num_heads": self.num_heads, "norm_eps": 1e-3}
        if self.norms:
            for name in ("q_norm", "k_norm"):
                self.options[name] = (1 + torch.randn(dim)).to(self.device, self.dtype)
        self.scales = torch.full(shape[:4], float("nan"), device=self.device)
        if self.cache.dtype != self.dtype and not self.token_scales:
            for name, scale in (("k_scale", 0.011), ("v_scale", 0.017)):
                scales = scale * (1 + torch.arange(kv, dtype=torch.float32))
                self.options[name] = scales.to(self.device)

    def run(self, write: Any, cache: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Heads [tokens, heads, head_dim] and cache after a write to copies of them."""
        rows, cache = self.rows.clone(), self.cache.clone() if cache is None else cache
        if self.token_scales:
            self.options["kv_scales"] = self.scales.clone()
        qkv = rows[:, : self.qkv.shape[1]]
        result = write(
            qkv, self.positions, self.cos_sin_cache, cache, self.slot_mapping, **self.options
        )
        assert result is None
        assert rows[:, self.qkv.shape[1] :].isnan().all()
        num_heads = self.num_heads + 2 * self.num_kv_heads
        return qkv.reshape(len(qkv), num_heads, self.head_dim), cache


def _poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if dtype == torch.int8:
        return torch.full(shape, 85, dtype=dtype, device=device)
    return torch.full(shape, float("nan"), device=device).to(dtype)


def assert_heads_equal(step: Step, heads: Tensor, expected: Tensor) -> None:
    q, expected_q = heads[:, : step.num_heads], expected[:, : step.num_heads]
    assert_rounded_once(q, expected_q, step.dtype)
    unchanged = step.qkv.reshape(heads.shape)[:, step.num_heads :]
    assert torch.equal(heads[:, step.num_heads :], unchanged)


def assert_rounded_once(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Numbers on either side of a half may go to either neighbour: that is twice the half."""
    close = {"rtol": 2 * TOLERANCES[dtype], "atol": 2e-6, "equal_nan": True}
    torch.testing.assert_close(actual, expected, **close)
    if dtype != torch.float32:
        differing = (actual != expected) & ~expected.isnan()
        assert differing.float().mean() < 0.01


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [
        *[(4, 2, 16, 8), (3, 1, 80, 8), (7, 1, 96, 16), (2, 2, 64, 8), (8, 2, 128, 8)],
        *[(2, 1, 256, 32), (8, 1, 512, 8)],
    ],
)
def test_equals_the_reference(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    norms: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    step = Step(
        num_heads, num_kv_heads, head_dim, dtype, device, block_size=block_size, norms=norms
    )
    heads, cache = step.run(fused_qk_norm_rope_cache)
    expected, expected_cache = step.run(reference.fused_qk_norm_rope_cache)
    assert_heads_equal(step, heads, expected)
    assert_rounded_once(cache, expected_cache, dtype)
    written = (~cache.isnan()).sum()
    assert written == 4 * 2 * num_kv_heads * head_dim  # four of the five rows have a slot


@pytest.mark.parametrize("cache_dtype", QUANTIZED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [32, 80])
def test_quantized_caches_equal_the_reference(
    head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype, device: torch.device
) -> None:
    step = Step(4, 2, head_dim, dtype, device, cache_dtype=cache_dtype, norms=True)
    heads, cache = step.run(fused_qk_norm_rope_cache)
    expected, expected_cache = step.run(reference.fused_qk_norm_rope_cache)
    assert_heads_equal(step, heads, expected)
    codes, expected_codes = (c.view(torch.int8).int() for c in (cache, expected_cache))
    differences = (codes - expected_codes).abs()
    assert differences.max() <= 1
    assert differences.float().mean() < 0.001


@pytest.mark.parametrize("cache_dtype", QUANTIZED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [32, 80])
def test_scales_of_tokens_equal_the_reference(
    head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype, device: torch.device
) -> None:
    step = Step(4, 2, head_dim, dtype, device, cache_dtype, norms=True, token_scales=True)
    heads, cache = step.run(fused_qk_norm_rope_cache)
    scales = step.options["kv_scales"]
    expected, expected_cache = step.run(reference.fused_qk_norm_rope_cache)
    expected_scales = step.options["kv_scales"]
    assert_heads_equal(step, heads, expected)
    torch.testing.assert_close(scales, expected_scales, rtol=2e-6, atol=0, equal_nan=True)
    assert (~scales.isnan()).sum() == 4 * 2 * 2  # four of the five rows have a slot
    codes, expected_codes = (c.view(torch.int8).int() for c in (cache, expected_cache))
    differences = (codes - expected_codes).abs()
    assert differences.max() <= 1
    assert differences.float().mean() < 0.001
    largest = {torch.int8: 127, torch.float8_e4m3fn: 448}[cache_dtype]
    written = cache.float().movedim(3, 2)[~scales.movedim(3, 2).isnan()]
    assert (written.abs().amax(-1) == largest).all()


@pytest.mark.parametrize("cache_dtype", QUANTIZED)
def test_what_is_stored_for_a_token_depends_on_it_alone(
    cache_dtype: torch.dtype, device: torch.device
) -> None:
    step = Step(4, 2, 32, torch.float32, device, cache_dtype, token_scales=True)
    _, together = step.run(fused_qk_norm_rope_cache)
    scales = step.options["kv_scales"]
    step.rows, step.qkv = step.rows[1:2], step.qkv[1:2]
    step.positions = step.positions[1:2].clone()
    step.slot_mapping = torch.tensor([5], device=device)  # it was 31, in another block
    _, alone = step.run(fused_qk_norm_rope_cache)
    assert torch.equal(alone[0, :, :, 5].view(torch.int8), together[3, :, :, 7].view(torch.int8))
    assert torch.equal(step.options["kv_scales"][0, :, :, 5], scales[3, :, :, 7])


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("cache_dtype", QUANTIZED)
def test_scales_of_zeros_and_of_numbers_that_are_not_finite(
    cache_dtype: torch.dtype, device: torch.device
) -> None:
    step = Step(1, 1, 16, torch.float32, device, cache_dtype, token_scales=True, slots=[3, 4, 5])
    step.qkv[0, 16:] = 0
    step.qkv[1, 40] = float("inf")  # a value
    step.qkv[2, 40] = float("nan")
    _, cache = step.run(fused_qk_norm_rope_cache)
    scales = step.options["kv_scales"][0, :, 0]
    assert (scales[:, 3] == 1).all()
    assert (cache[0, :, 0, 3].float() == 0).all()
    assert scales[1, 4].isinf()
    assert (cache[0, 1, 0, 4].float() == 0).all()
    assert scales[1, 5].isfinite()
    assert cache[0, 1, 0, 5, 8].float() == 0


@pytest.mark.parametrize(("cache_dtype", "limit"), [(torch.float8_e4m3fn, 448), (torch.int8, 127)])
def test_quantization_saturates(cache_dtype: torch.dtype, limit: int, device: torch.device) -> None:
    step = Step(1, 1, 16, torch.float32, device, cache_dtype=cache_dtype, slots=[3])
    step.options.update(k_scale=torch.ones(1, device=device), v_scale=torch.ones(1, device=device))
    step.positions.zero_()
    step.qkv[0, 16:32] = 1e6
    step.qkv[0, 32:] = -1e30
    _, cache = step.run(fused_qk_norm_rope_cache)
    assert (cache[0, 0, 0, 3].float() == limit).all()
    assert (cache[0, 1, 0, 3].float() == -limit).all()


@pytest.mark.parametrize("cache_dtype", QUANTIZED)
def test_halves_are_rounded_to_even(cache_dtype: torch.dtype, device: torch.device) -> None:
    step = Step(1, 1, 16, torch.float32, device, cache_dtype=cache_dtype, slots=[3])
    step.options.update(v_scale=torch.full((1,), 0.5, device=device))
    # Halves between whole numbers; for float8, midpoints of its numbers from 16 to 32.
    halves = torch.arange(-8, 8, device=device) + 0.5
    values = halves if cache_dtype == torch.int8 else 16 + 2 * halves.abs()
    step.qkv[0, 32:] = values / 2
    _, cache = step.run(fused_qk_norm_rope_cache)
    even = halves.round() if cache_dtype == torch.int8 else 16 + 2 * halves.abs().round()
    assert torch.equal(cache[0, 1, 0, 3].float(), even)


def test_one_norm_alone(device: torch.device) -> None:
    step = Step(2, 1, 16, torch.float32, device, norms=True)
    del step.options["q_norm"]
    heads, cache = step.run(fused_qk_norm_rope_cache)
    expected, expected_cache = step.run(reference.fused_qk_norm_rope_cache)
    assert_heads_equal(step, heads, expected)
    assert_rounded_once(cache, expected_cache, torch.float32)


def test_padded_rows_are_rotated_and_write_nothing(device: torch.device) -> None:
    step = Step(2, 1, 16, torch.bfloat16, device, slots=[-1, -1])
    heads, cache = step.run(fused_qk_norm_rope_cache)
    assert_heads_equal(step, heads, step.run(reference.fused_qk_norm_rope_cache)[0])
    assert not torch.equal(heads[:, :2], step.qkv.reshape(heads.shape)[:, :2])
    assert cache.isnan().all()


def test_slots_beyond_two_to_the_31_elements(device: torch.device) -> None:
    """In int8 that takes 2 GiB of addresses; only the last block is touched."""
    num_blocks, block_size, dim = 2**31 // (2 * 256 * 256) + 2, 256, 256
    cache = torch.empty((num_blocks, 2, 1, block_size, dim), dtype=torch.int8, device=device)
    cache[-1] = 85
    step = Step(1, 1, dim, torch.float32, device, torch.int8, slots=[num_blocks * block_size - 2])
    _, cache = step.run(fused_qk_norm_rope_cache, cache)
    small = torch.full((1, 2, 1, block_size, dim), 85, dtype=torch.int8, device=device)
    step.slot_mapping = torch.tensor([block_size - 2], device=device)
    _, small = step.run(reference.fused_qk_norm_rope_cache, small)
    assert (cache[-1].int() - small[0].int()).abs().max() <= 1


def test_no_tokens(device: torch.device) -> None:
    step = Step(2, 1, 16, torch.float32, device, slots=[])
    _, cache = step.run(fused_qk_norm_rope_cache)
    assert cache.isnan().all()


def test_bad_calls_name_the_argument(device: torch.device) -> None:
    step = Step(4, 2, 16, torch.float32, device, norms=True)
    quantized = Step(4, 2, 16, torch.float32, device, torch.int8)
    cache, scale = step.cache, torch.ones(2, device=device)
    bad: dict[str, list[Any]] = {
        "qkv": [step.rows, step.qkv[:, :64], step.qkv.long(), step.qkv[0], step.rows[:, 1:]],
        "positions": [step.positions.long(), step.positions[:3], step.positions.to("meta")],
        "cos_sin_cache": [
            step.cos_sin_cache.half(),
            step.cos_sin_cache[:, :8],
            step.cos_sin_cache[:, :8].contiguous(),
        ],
        "slot_mapping": [step.slot_mapping.int(), step.slot_mapping[:3]],
        "kv_cache": [
            cache.half(),
            cache[0],
            cache[:, :1],
            cache.to("meta"),
            cache.transpose(2, 3),
            torch.zeros(5, 2, 2, 8, 24, device=device),
        ],
        "num_heads": [0, 3, -2],
        "q_norm": [torch.ones(8, device=device), torch.ones(16, device=device).half()],
        "k_norm": [torch.ones(8, device=device), torch.ones(16, device=device).half()],
        "k_scale": [scale],
        "v_scale": [scale],
    }
    bad["kv_scales"] = [step.scales]
    cases = [(step, name, value) for name, values in bad.items() for value in values]
    for name in ("k_scale", "v_scale"):
        for wrong in (None, scale[:1], scale.half(), scale.to("meta")):
            cases.append((quantized, name, wrong))
    per_token = Step(4, 2, 16, torch.float32, device, torch.int8, token_scales=True)
    cases.append((quantized, "kv_scales", quantized.scales))  # beside k_scale and v_scale
    for wrong in (step.scales[1:], step.scales.half(), step.scales[0], step.scales.to("meta")):
        cases.append((per_token, "kv_scales", wrong))
    cases.append((per_token, "k_scale", None))  # no scales at all
    for case, name, value in cases:
        arguments: dict[str, Any] = {
            "qkv": case.qkv,
            "positions": case.positions,
            "cos_sin_cache": case.cos_sin_cache,
            "kv_cache": case.cache,
            "slot_mapping": case.slot_mapping,
            **case.options,
            name: value,
        }
        with pytest.raises(ArgumentError, match=f"^{name} "):
            fused_qk_norm_rope_cache(**arguments)


def test_float8_needs_a_device_that_has_it(device: torch.device) -> None:
    step = Step(2, 1, 16, torch.float32, device, torch.float8_e4m3fn)
    with pretend(Device(arch=80, num_sms=108)):
        with pytest.raises(ArgumentError, match="^kv_cache .*8.9"):
            step.run(fused_qk_norm_rope_cache)
