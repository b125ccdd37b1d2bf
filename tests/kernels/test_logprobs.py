"""Log-probabilities against a sort in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from logit_rows import Stacks, logits_of, poisoned_stacks
from paged_kernels import logprobs as operation
from paged_kernels.errors import ArgumentError
from paged_kernels.logprobs import LogProbs, logprobs
from paged_kernels.reference import logprobs as reference
from torch import Tensor

UNTOUCHED = -77


@pytest.fixture(autouse=True)
def stacks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stacks]:
    yield from poisoned_stacks(monkeypatch, operation)


def run_logprobs(
    logits: Tensor,
    sampled: list[int],
    wanted: list[int],
    width: int,
    device: torch.device,
    slots: list[int] | None = None,
) -> LogProbs:
    rows = len(logits)
    found = logprobs(
        logits.to(device),
        torch.tensor(slots or range(rows), dtype=torch.int32, device=device),
        torch.tensor(sampled, dtype=torch.int32, device=device),
        torch.tensor(wanted, dtype=torch.int32, device=device),
        width,
    )
    return LogProbs(*(tensor.cpu() for tensor in found))


def check_logprobs(found: LogProbs, row: int, logits: Tensor, token: int, number: int) -> None:
    sampled, rank, tokens, top = reference.logprobs(logits, token, number)
    tolerance = {"rel": 1e-5, "abs": 2e-6}
    assert float(found.sampled[row]) == pytest.approx(sampled, **tolerance)
    assert int(found.ranks[row]) == rank
    assert found.top_tokens[row, :number].tolist() == tokens
    assert found.top[row, :number].tolist() == pytest.approx(top, **tolerance)


@pytest.mark.parametrize("kind", ["peaked", "coarse", "descending"])
def test_logprobs(kind: str, device: torch.device) -> None:
    logits = torch.stack([logits_of(kind, 5003) for _ in range(4)])
    logits[3, 100:200] = math.nan
    sampled = [int(logits[0].argmax()), 17, 5002, 4000]
    wanted = [0, 1, 5, 20]
    found = run_logprobs(logits, sampled, wanted, 20, device)
    for row, (token, number) in enumerate(zip(sampled, wanted, strict=True)):
        check_logprobs(found, row, logits[row], token, number)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits_give_the_logprobs_of_the_same_float32(
    dtype: torch.dtype, device: torch.device
) -> None:
    logits = torch.stack([logits_of("peaked", 5003) for _ in range(2)]).to(dtype)
    found = run_logprobs(logits, [17, 5002], [5, 20], 20, device)
    check_logprobs(found, 0, logits[0].float(), 17, 5)
    check_logprobs(found, 1, logits[1].float(), 5002, 20)


def test_logprobs_of_ties_that_overflow_the_stacks(device: torch.device) -> None:
    logits = torch.stack([torch.zeros(2048 * 8 + 1), logits_of("strided", 2048 * 8 + 1)])
    found = run_logprobs(logits, [16384, 7], [3, 4], 4, device)
    check_logprobs(found, 0, logits[0], 16384, 3)
    check_logprobs(found, 1, logits[1], 7, 4)


def test_logprobs_of_impossible_tokens_are_minus_infinity(device: torch.device) -> None:
    inf = math.inf
    logits = torch.tensor([[-inf, 2.0, -inf, math.nan, 2.0], [-inf] * 5])
    found = run_logprobs(logits, [0, 0], [4, 2], 4, device)
    assert found.sampled.tolist() == [-inf, -inf]
    assert found.ranks.tolist() == [5, 5]
    assert found.top_tokens[0].tolist() == [1, 4, -1, -1]
    assert found.top[0].tolist() == pytest.approx([-math.log(2)] * 2 + [-inf] * 2)
    assert found.top_tokens[1, :2].tolist() == [-1, -1]
    assert found.top[1, :2].tolist() == [-inf, -inf]


def test_more_logprobs_than_tokens(device: torch.device) -> None:
    """The widest beam of a model with few tokens."""
    logits = torch.randn(2, 9)
    found = run_logprobs(logits, [3, 8], [32, 32], 32, device)
    for row, token in enumerate((3, 8)):
        check_logprobs(found, row, logits[row], token, 9)
    assert (found.top_tokens[:, 9:] == -1).all()


def test_logprobs_of_one_lane(device: torch.device) -> None:
    """Where its peak is the only one, the stacks lack what is next."""
    logits = torch.full((1, 5000), -math.inf)
    logits[0, [4, 4 + 2048, 4 + 4096]] = torch.tensor([1.0, 3.0, 2.0])
    found = run_logprobs(logits, [4], [3], 3, device)
    check_logprobs(found, 0, logits[0], 4, 3)


def test_logprobs_are_written_where_they_are_wanted(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = torch.empty

    def marked(*size: object, **kwargs: object) -> Tensor:
        return real(*size, **kwargs).fill_(UNTOUCHED)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(torch, "empty", marked)
    logits = torch.randn(4, 50)
    found = run_logprobs(logits, [1] * 4, [-1, 2, 9], 3, device, slots=[-1, 0, 2, 1])
    for tensor in found:
        assert (tensor[:2] == UNTOUCHED).all()
    assert found.top_tokens[3, 2] == UNTOUCHED
    assert found.top[3, 2] == UNTOUCHED
    check_logprobs(found, 2, logits[2], 1, 3)
    check_logprobs(found, 3, logits[3], 1, 2)


def test_bad_calls_are_refused(device: torch.device) -> None:
    logits = torch.zeros(8, 16, device=device)
    ids = torch.zeros(8, dtype=torch.int32, device=device)
    floats, more = torch.zeros(8, device=device), ids.new_zeros(9)
    logprobs(logits, ids, ids, ids, 1)
    with pytest.raises(ArgumentError, match="^logits"):
        logprobs(logits.double(), ids, ids, ids, 1)
    with pytest.raises(ArgumentError, match="^slots"):
        logprobs(logits, more, ids, ids, 1)
    with pytest.raises(ArgumentError, match="^sampled"):
        logprobs(logits, ids, more, ids, 1)
    with pytest.raises(ArgumentError, match="^wanted"):
        logprobs(logits, ids, ids, floats, 1)
    for width in (-1, 33):
        with pytest.raises(ArgumentError, match="^width"):
            logprobs(logits, ids, ids, ids, width)


def test_no_rows(device: torch.device) -> None:
    none = torch.empty(0, dtype=torch.int32, device=device)
    found = logprobs(torch.empty(0, 10, device=device), none, none, none, 4)
    assert found.top.shape == (0, 4)
