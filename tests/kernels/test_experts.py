from __future__ import annotations

from typing import Any

import pytest
import torch
from matmul_checks import between_nans, ordered_dot
from paged_kernels.errors import ArgumentError
from paged_kernels.experts import _sort_pairs, experts
from paged_kernels.reference import experts as reference
from paged_kernels.tuning.products import experts_config
from torch import Tensor

# (rows, experts, top_k, hidden, intermediate): one row, odd sizes, experts that no row chooses,
# all experts for each row, and several tiles of rows.
SHAPES = [
    (1, 1, 1, 1, 1),
    (1, 5, 2, 64, 32),
    (3, 8, 3, 70, 45),
    (7, 4, 4, 130, 33),
    (40, 2, 1, 33, 70),
]
GPT_OSS = {"alpha": 1.702, "limit": 7.0, "up_offset": 1.0}
# The activation and the outputs of experts are rounded besides the result.
ROUNDING = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def random_call(
    rows: int,
    num_experts: int,
    top_k: int,
    hidden: int,
    inner: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    bias: bool = False,
) -> dict[str, Any]:
    """Arguments whose results are about 1."""

    def values(*shape: int, scale: float = 1.0) -> Tensor:
        return between_nans((torch.randn(shape) * scale).to(device, dtype))

    chosen = [torch.randperm(num_experts)[:top_k] for _ in range(rows)]
    call: dict[str, Any] = {
        "x": values(rows, hidden),
        "gate_up": values(num_experts, 2 * inner, hidden, scale=2 * hidden**-0.5),
        "down": values(num_experts, hidden, inner, scale=inner**-0.5),
        "expert_ids": between_nans(torch.stack(chosen).int().to(device)),
        "expert_weights": between_nans((torch.rand(rows, top_k) + 0.1).to(device)),
    }
    if bias:
        call["gate_up_bias"] = values(num_experts, 2 * inner)
        call["down_bias"] = values(num_experts, hidden)
    return call


def check(out: Tensor, call: dict[str, Any]) -> None:
    """Compare with the reference; errors are relative to the largest numbers of a row."""
    expected = reference.experts(**call)
    magnitude = expected.abs().amax(1, keepdim=True) + 1.0
    error = (out.double() - expected).abs() / magnitude
    assert bool((error <= ROUNDING[out.dtype]).all()), error.max()


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("index", "shape"), list(enumerate(SHAPES)))
def test_equals_the_reference(
    index: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    call = random_call(*shape, dtype, device, bias=index % 2 == 1)
    if index % 2:
        call |= GPT_OSS
    out = experts(**call)
    assert out.dtype == dtype and out.shape == call["x"].shape
    check(out, call)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("index", "shape"), list(enumerate(SHAPES)))
def test_experts_without_a_gate(
    index: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    *sizes, inner = shape
    call = random_call(*sizes, inner, dtype, device, bias=index % 2 == 1)
    for name in ("gate_up", "gate_up_bias") if index % 2 else ("gate_up",):
        call[name] = between_nans(call[name][:, :inner].contiguous() / 2)
    call["gated"] = False
    out = experts(**call)
    check(out, call)


def test_the_limit_is_applied(device: torch.device) -> None:
    call = random_call(4, 3, 2, 32, 16, torch.float32, device, bias=True)
    call |= GPT_OSS | {"limit": 0.5}
    out = experts(**call)
    check(out, call)
    with pytest.raises(AssertionError):
        check(out, call | {"limit": None})


def test_the_cube_is_applied(device: torch.device) -> None:
    """With these factors the activation is GELU, approximated by a hyperbolic tangent."""
    call = random_call(4, 3, 2, 32, 16, torch.float32, device)
    call |= {"alpha": 1.5957691216, "cubic": 0.0713548162}
    out = experts(**call)
    check(out, call)
    with pytest.raises(AssertionError):
        check(out, call | {"cubic": 0.0})


@pytest.mark.parametrize("rows", [20, 150])
def test_all_rows_choose_one_expert(rows: int, device: torch.device) -> None:
    call = random_call(rows, 3, 1, 32, 16, torch.float32, device)
    call["expert_ids"].fill_(1)
    check(experts(**call), call)


# Results of padding are those of whatever was in memory.
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@pytest.mark.parametrize("padding", [[0], [3, 4, 6], [0, 1, 2, 3, 4, 5, 6]])
def test_no_weights_are_read_for_padding(padding: list[int], device: torch.device) -> None:
    """The experts that only rows of padding choose have no tile."""
    call = random_call(7, 20, 2, 33, 16, torch.float32, device)
    ids, slots = call["expert_ids"], torch.arange(7, device=device) + 100
    slots[padding] = -1
    used = [row for row in range(7) if row not in padding]
    for row in padding:
        ids[row] = torch.tensor([18, 19])
    for row in used:
        ids[row] %= 18
    out = experts(**call, slots=slots)
    names = "x", "expert_ids", "expert_weights"
    check(out[used], call | {name: call[name][used] for name in names})
    tiles = _sort_pairs(ids, slots, 20, 16)
    num_tiles = int(tiles.experts[-1])
    assert set(tiles.experts[:num_tiles].tolist()) == set(ids[used].flatten().tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_other_rows(dtype: torch.dtype, device: torch.device) -> None:
    call = random_call(180, 2, 1, 70, 40, dtype, device, bias=True)
    size = dtype.itemsize
    configs = {experts_config(-(-rows // 2), size) for rows in (1, 17, 64, 180)}
    assert len(configs) == (1 if dtype == torch.float32 else 3)

    def computed(first: int, last: int) -> Tensor:
        names = "x", "expert_ids", "expert_weights"
        return experts(**call | {name: call[name][first:last].clone() for name in names})

    with ordered_dot():
        whole = computed(0, 180)
        for first, last in ((0, 1), (5, 6), (3, 20), (100, 164)):
            assert torch.equal(computed(first, last), whole[first:last]), (first, last)


def test_a_wrong_weight_of_an_expert_is_noticed(device: torch.device) -> None:
    call = random_call(3, 4, 2, 32, 16, torch.float32, device)
    out = experts(**call)
    check(out, call)
    call["expert_weights"] = call["expert_weights"].clone()
    call["expert_weights"][1, 1] *= 1.01
    with pytest.raises(AssertionError):
        check(out, call)


def test_no_rows(device: torch.device) -> None:
    call = random_call(1, 4, 2, 32, 16, torch.float32, device)
    call |= {name: call[name][:0] for name in ("x", "expert_ids", "expert_weights")}
    assert experts(**call).shape == (0, 32)


def test_bad_calls_name_the_argument(device: torch.device) -> None:
    good = random_call(4, 3, 2, 32, 16, torch.float32, device, bias=True)
    changes: dict[str, list[dict[str, Any]]] = {
        "x": [{"x": good["x"][0]}, {"x": good["x"].long()}],
        "gate_up": [
            {"gate_up": good["gate_up"][:, :31].contiguous()},
            {"gate_up": good["gate_up"][:, :, :16]},
            {"gate_up": good["gate_up"].half()},
            {"gate_up": good["gate_up"][:0]},
        ],
        "down": [{"down": good["down"][:2]}, {"down": good["down"].transpose(1, 2)}],
        "expert_ids": [
            {"expert_ids": good["expert_ids"].long()},
            {"expert_ids": good["expert_ids"][:2]},
            {"expert_ids": good["expert_ids"][:, :0]},
        ],
        "expert_weights": [
            {"expert_weights": good["expert_weights"].half()},
            {"expert_weights": good["expert_weights"][:, :1].contiguous()},
        ],
        "gate_up_bias": [{"gate_up_bias": good["gate_up_bias"][:2]}],
        "down_bias": [{"down_bias": good["down_bias"].half()}],
    }
    for name, bad in changes.items():
        for change in bad:
            with pytest.raises(ArgumentError, match=f"^{name} "):
                experts(**good | change)
