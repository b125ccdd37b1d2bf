from __future__ import annotations

from typing import Any

import pytest
import torch
from paged_kernels.choose_experts import SCORINGS, choose_experts
from paged_kernels.errors import ArgumentError
from paged_kernels.reference import choose_experts as reference


@pytest.mark.sampled(2)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize(
    ("rows", "num_experts", "top_k"), [(1, 1, 1), (3, 8, 2), (5, 60, 4), (9, 128, 8), (2, 7, 7)]
)
def test_equals_the_reference(
    rows: int, num_experts: int, top_k: int, scoring: str, normalize: bool, device: torch.device
) -> None:
    logits = 3 * torch.randn(rows, num_experts, device=device)
    options: dict[str, Any] = {"scoring": scoring, "normalize": normalize}
    ids, weights = choose_experts(logits, top_k, **options)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    wanted_ids, wanted = reference.choose_experts(logits, top_k, **options)
    assert torch.equal(ids.long(), wanted_ids)
    torch.testing.assert_close(weights.double(), wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("num_experts", "top_k", "groups"),
    [(8, 3, None), (12, 4, (4, 2, 2)), (40, 8, (5, 3, 1)), (16, 6, (2, 1, 2))],
)
def test_groups_and_biases_choose_but_do_not_weigh(
    num_experts: int,
    top_k: int,
    groups: tuple[int, int, int] | None,
    biased: bool,
    scoring: str,
    device: torch.device,
) -> None:
    logits = 2 * torch.randn(9, num_experts, device=device)
    bias = 0.4 * torch.randn(num_experts, device=device) if biased else None
    options: dict[str, Any] = {"scoring": scoring, "normalize": True, "scale": 2.5}
    options |= {"bias": bias, "groups": groups}
    ids, weights = choose_experts(logits, top_k, **options)
    wanted_ids, wanted = reference.choose_experts(logits, top_k, **options)
    assert torch.equal(ids.long(), wanted_ids)
    torch.testing.assert_close(weights.double(), wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_equal_logits_the_lowest_id_comes_first(
    dtype: torch.dtype, device: torch.device
) -> None:
    logits = torch.zeros(3, 12, device=device, dtype=dtype)
    logits[1, 5:] = 2.0
    logits[2, [3, 9]] = 1.0
    ids, _ = choose_experts(logits, 3)
    assert ids.tolist() == [[0, 1, 2], [5, 6, 7], [3, 9, 0]]


def test_ids_are_valid_whatever_the_logits_are(device: torch.device) -> None:
    logits = torch.full((2, 6), float("nan"), device=device)
    logits[1, 4] = -1.0
    ids, weights = choose_experts(logits, 3)
    assert ids.tolist() == [[0, 1, 2], [4, 0, 1]]
    assert weights[1, 0] == 1.0


def test_large_logits_do_not_overflow(device: torch.device) -> None:
    logits = torch.tensor([[3e38, -3e38, 1e4, 0.0]], device=device)
    for scoring in SCORINGS:
        assert choose_experts(logits, 2, scoring=scoring)[1][0, 0] == 1.0


def test_no_rows(device: torch.device) -> None:
    ids, weights = choose_experts(torch.empty(0, 8, device=device), 2)
    assert ids.shape == weights.shape == (0, 2)


def test_bad_calls_name_the_argument(device: torch.device) -> None:
    good: dict[str, Any] = {"logits": torch.zeros(4, 8, device=device), "top_k": 2}
    changes: dict[str, list[Any]] = {
        "logits": [good["logits"][0], good["logits"].long(), torch.zeros(1, 1025, device=device)],
        "top_k": [0, 9],
        "scoring": ["relu"],
        "bias": [torch.zeros(7, device=device)],
        "groups": [(3, 1, 1), (4, 5, 1), (4, 2, 3), (8, 1, 1)],
    }
    for name, bad in changes.items():
        for value in bad:
            with pytest.raises(ArgumentError, match=f"^{name} "):
                choose_experts(**good | {name: value})
