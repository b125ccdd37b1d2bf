"""Sampling against a sort in float64."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import pytest
import torch
import triton
import triton.language as tl
from effort import ALL
from logit_rows import LARGEST, Stacks, logits_of, poisoned_stacks
from paged_kernels import sampling
from paged_kernels._selection import find_threshold
from paged_kernels.errors import ArgumentError
from paged_kernels.reference import sampling as reference
from paged_kernels.sampling import SamplingState, sample
from torch import Tensor

GREEDY = (0.0, 0, 1.0, 0.0)
PLAIN = (1.0, 0, 1.0, 0.0)
UNTOUCHED = -77

# Where a logit is the largest float32, its distance to others overflows to infinity on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


@pytest.fixture(autouse=True)
def stacks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stacks]:
    yield from poisoned_stacks(monkeypatch, sampling)


def state_of(
    params: list[tuple[float, int, float, float]], seeds: list[int] | None = None
) -> SamplingState:
    """A slot for each (temperature, top_k, top_p, min_p)."""
    temperature, top_k, top_p, min_p = zip(*params, strict=True)
    return SamplingState(
        torch.tensor(temperature, dtype=torch.float32),
        torch.tensor(top_k, dtype=torch.int32),
        torch.tensor(top_p, dtype=torch.float32),
        torch.tensor(min_p, dtype=torch.float32),
        torch.tensor(seeds or range(11, 11 + len(params))),
    )


def run(
    logits: Tensor,
    state: SamplingState,
    device: torch.device,
    slots: list[int] | None = None,
    positions: list[int] | None = None,
) -> list[int]:
    rows = len(logits)
    out = torch.full((rows + 8,), UNTOUCHED, dtype=torch.int32, device=device)
    given = logits.to(device)
    moved = {f.name: getattr(state, f.name).to(device) for f in dataclasses.fields(state)}
    sample(
        given.clone() if given is logits else given,
        torch.tensor(slots or range(rows), dtype=torch.int32, device=device),
        torch.tensor(positions or [5] * rows, dtype=torch.int32, device=device),
        SamplingState(**moved),
        out[:rows],
    )
    assert torch.equal(given.cpu().view(torch.uint8), logits.view(torch.uint8))
    assert (out[rows:] == UNTOUCHED).all()
    return out[:rows].tolist()


def drawn(logits: Tensor, state: SamplingState, slot: int, positions: list[int]) -> list[int]:
    chances = reference.probabilities(
        logits,
        float(state.temperature[slot]),
        int(state.top_k[slot]),
        float(state.top_p[slot]),
        float(state.min_p[slot]),
    )
    seeds = state.seed[slot].expand(len(positions))
    tokens: list[int] = reference.draw(chances, seeds, torch.tensor(positions)).tolist()
    return tokens


PARAMS = [
    GREEDY,
    PLAIN,
    (0.3, 0, 1.0, 0.0),
    (1.0, 1, 0.9, 0.0),
    (1.0, -1, 1.0, 0.05),
    (0.8, 50, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (0.7, 50, 0.9, 0.0),
    (1.3, 1200, 0.95, 0.001),
    (1.0, 3000, 0.999, 0.0),
    (2.0, 2**31 - 1, 0.3, 0.2),
]


@pytest.mark.parametrize("kind", ["peaked", "flat", "coarse", "descending", "masked"])
def test_draws_equal_those_of_a_sort(kind: str, device: torch.device) -> None:
    logits = torch.stack([logits_of(kind, 5003) for _ in PARAMS])
    state = state_of(PARAMS, seeds=[-(2**63), -1, 0, 2**40 + 3, 2**63 - 1, *range(6)])
    found = run(logits, state, device)
    expected = [drawn(row, state, slot, [5])[0] for slot, row in enumerate(logits)]
    assert found == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits_give_the_tokens_of_the_same_float32(
    dtype: torch.dtype, device: torch.device
) -> None:
    logits = torch.stack([logits_of("peaked", 5003) for _ in PARAMS]).to(dtype)
    logits[0, 7], logits[1, 8] = math.nan, math.inf
    state = state_of(PARAMS)
    assert run(logits, state, device) == run(logits.float(), state, device)


@pytest.mark.parametrize("vocab", [1, 2, 3, 300, 2048, 2049, 8192])
def test_any_vocabulary(vocab: int, device: torch.device) -> None:
    params = [GREEDY, PLAIN, (1.0, 2, 1.0, 0.0), (1.0, 0, 0.8, 0.0), (1.0, 250, 0.8, 0.1)]
    logits = torch.randn(len(params), vocab) * 2
    state = state_of(params)
    found = run(logits, state, device)
    assert found == [drawn(row, state, slot, [5])[0] for slot, row in enumerate(logits)]


def test_tokens_are_right_when_stacks_overflow(device: torch.device) -> None:
    """Ties of more tokens than the stacks hold, and one lane that needs all their depth."""
    vocab = 2048 * 9 + 5
    logits = torch.stack([torch.zeros(vocab), logits_of("strided", vocab)]).repeat(2, 1)
    state = state_of([(1.0, 5, 1.0, 0.0)] * 2 + [(1.0, 0, 0.7, 0.0)] * 2)
    found = run(logits, state, device)
    assert found == [drawn(row, state, slot, [5])[0] for slot, row in enumerate(logits)]


def test_stacks_hold_all_tokens_that_reach_the_bound(stacks: Stacks, device: torch.device) -> None:
    row = torch.randn(1, 9000)
    row[0, [3, 2055, 4100, 8000, 8999]] = torch.tensor([9.0, 8.0, 7.0, 6.0, 6.0])
    run(row, state_of([(1.0, 4, 1.0, 0.0)]), device)
    ((values, tokens),) = stacks
    held = tokens[0][values[0].abs() < LARGEST]
    assert sorted(held[held >= 0].tolist()) == [3, 2055, 4100, 8000, 8999]


@pytest.mark.parametrize(("vocab", "top_k"), [(16, 8), (5003, 3000)])
def test_top_p_is_of_what_top_k_left(vocab: int, top_k: int, device: torch.device) -> None:
    row = torch.linspace(0, 0.5, vocab)[torch.randperm(vocab)]
    state = state_of([(1.0, top_k, 0.5, 0.0)])
    positions = list(range(16))
    found = run(row.repeat(16, 1), state, device, [0] * 16, positions)
    assert found == drawn(row, state, 0, positions)


def test_rows_are_independent(device: torch.device) -> None:
    """Neither batch nor slot nor the neighbours decide, but logits, parameters and position."""
    state = state_of([(1.0, 0, 1.0, 0.0), (1.0, 20, 0.9, 0.0)], seeds=[9, 9])
    row = torch.randn(300)
    positions = [0, 1, 2, 2**31 - 1, 0, 1]
    slots = [0, 0, 0, 0, 1, 1]
    together = run(row.repeat(6, 1), state, device, slots, positions)
    alone = [
        run(row.unsqueeze(0), state, device, [slot], [position])[0]
        for slot, position in zip(slots, positions, strict=True)
    ]
    assert together == alone
    assert together[:4] == drawn(row, state, 0, positions[:4])
    assert len(set(together)) > 3


def test_padding_is_left_alone(device: torch.device) -> None:
    state = state_of([GREEDY, PLAIN])
    logits = torch.full((4, 100), math.nan)
    logits[1], logits[2] = torch.arange(100.0), -torch.arange(100.0)
    assert run(logits, state, device, slots=[-1, 0, 0, -1]) == [UNTOUCHED, 99, 0, UNTOUCHED]


def test_of_equal_largest_logits_the_first_is_chosen(device: torch.device) -> None:
    logits = torch.zeros(2, 5000)
    logits[0, [4000, 2500, 2501]] = 1
    logits[1, :2] = torch.tensor([-0.0, 0.0])
    assert run(logits, state_of([GREEDY, (1.0, 1, 1.0, 0.0)]), device) == [2500, 0]


@pytest.mark.parametrize("params", [GREEDY, PLAIN, (1.0, 2, 0.9, 0.01)])
def test_nan_and_infinite_logits(
    params: tuple[float, int, float, float], device: torch.device
) -> None:
    nan, inf = math.nan, math.inf
    rows = {
        (nan, -3.0, nan): [1],
        (nan, nan, nan): [0],
        (-inf, -inf, -inf): [0],
        (0.0, inf, 5.0): [1],
        (-inf, nan, -2.0): [2],
        (-3e38, -inf, nan): [0],
    }
    logits = torch.tensor(list(rows))
    found = run(logits, state_of([params] * len(rows)), device)
    assert all(token in allowed for token, allowed in zip(found, rows.values(), strict=True))


def test_ties_with_the_last_one_kept_are_kept(device: torch.device) -> None:
    """Two of four equal ones would do, for `top_k` and for `top_p`."""
    row = torch.tensor([0.0, 3.0, 0.0, 3.0, 3.0, 0.0, 3.0])
    state = state_of([(1.0, 2, 1.0, 0.0), (1.0, 0, 0.4, 0.0)])
    for slot in (0, 1):
        positions = list(range(24))
        found = run(row.repeat(24, 1), state, device, [slot] * 24, positions)
        assert set(found) == {1, 3, 4, 6}


CHANCES = torch.tensor([0.3, 1e-4, 0.05, 0.2, 2e-3, 0.4379, 1e-2], dtype=torch.float64)


def test_draws_follow_the_distribution(device: torch.device) -> None:
    """The kernel draws what the reference draws, and this passes chi-square tests."""
    rows = 4000 if device.type == "cuda" else 40
    positions = list(range(rows))
    state = state_of([PLAIN])
    logits = CHANCES.log().float()
    found = run(logits.repeat(rows, 1), state, device, [0] * rows, positions)
    expected = drawn(logits, state, 0, positions)
    assert sum(a != b for a, b in zip(found, expected, strict=True)) <= rows // 2000

    number = 200_000 if ALL else 50_000
    many, one = torch.arange(number), torch.tensor([3])
    for seeds, places in ((many - number // 2, one), (one << 40, many)):
        tokens = reference.draw(CHANCES, seeds.expand(number), places.expand(number))
        counts = tokens.bincount(minlength=len(CHANCES)).double()
        assert _chi_square(counts, CHANCES * number) < _limit(len(CHANCES) - 1)
        pairs = (tokens[:-1] * len(CHANCES) + tokens[1:]).bincount(minlength=len(CHANCES) ** 2)
        chances = torch.outer(CHANCES, CHANCES).flatten() * (number - 1)
        often = chances > 5
        assert _chi_square(pairs[often].double(), chances[often]) < _limit(int(often.sum()))


def _chi_square(counts: Tensor, expected: Tensor) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def _limit(degrees: int) -> float:
    """Four deviations over the mean."""
    return degrees + 4 * math.sqrt(2 * degrees)


def test_philox_gives_the_published_words() -> None:
    """Those of the authors' own library, Random123."""
    cases = [
        ([0] * 4, 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([2**32 - 1] * 4, -1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            0x299F31D0A4093822,
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ]
    for counter, key, expected in cases:
        words = reference.philox(torch.tensor(key), [torch.tensor(word) for word in counter])
        assert " ".join(f"{int(word):08x}" for word in words) == expected


@triton.jit
def _exponential_kernel(words_ptr, out_ptr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, SIZE)
    words = tl.load(words_ptr + at).to(tl.uint32, bitcast=True)
    tl.store(out_ptr + at, sampling._exponential(words))


def test_small_exponentials_keep_their_relative_precision(device: torch.device) -> None:
    words = torch.cat([torch.arange(64), 2 ** torch.arange(6, 32), torch.tensor([2**26 - 1])])
    words = torch.cat([words, torch.randint(0, 2**32 - 2**12, (128 - len(words),))])
    out = torch.empty(128, device=device)
    _exponential_kernel[(1,)](words.to(torch.int32).to(device), out, SIZE=128)
    expected = -torch.log1p(-(words.double() + 0.5) * 2.0**-32)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=3e-6, atol=0)


def test_the_largest_exponential_is_finite(device: torch.device) -> None:
    out = torch.empty(1, device=device)
    _exponential_kernel[(1,)](torch.tensor([-1], dtype=torch.int32, device=device), out, SIZE=1)
    assert 16 < float(out) < 17


@triton.jit
def _search_kernel(  # type: ignore[no-untyped-def]
    values_ptr, ends_ptr, out_ptr, length, target, BY_MASS: tl.constexpr
):
    lowest = tl.load(ends_ptr)
    highest = tl.load(ends_ptr + 1)
    found = find_threshold(values_ptr, length, lowest, highest, target, 1.0, BY_MASS)
    tl.store(out_ptr, found)


def searched(values: Tensor, target: int, by_mass: bool, device: torch.device) -> float:
    values = values.to(device).float()
    out = torch.empty(1, device=device)
    highest = values.max()
    ends = torch.stack([values.min() if by_mass else torch.full_like(highest, -LARGEST), highest])
    _search_kernel[(1,)](values, ends, out, len(values), target, BY_MASS=by_mass)
    return float(out)


def values_of(kind: str) -> Tensor:
    if kind == "normal":
        return torch.randn(3001)
    if kind == "ties":
        return torch.randn(300).round(decimals=1)
    if kind == "scales":
        return torch.cat([torch.randn(50) * 10.0**power for power in range(-30, 38, 4)])
    if kind == "zeros":
        return torch.tensor([0.0, -0.0, 0.0, 1.0, -1.0, -torch.inf, LARGEST])
    if kind == "adjacent":
        return (torch.tensor(math.pi).view(torch.int32) + torch.randint(5, (9,)).int()).view(
            torch.float32
        )
    assert kind == "equal"
    return torch.full((3,), math.pi)


@pytest.mark.parametrize("kind", ["normal", "ties", "scales", "zeros", "adjacent", "equal"])
def test_search_finds_what_a_sort_finds(kind: str, device: torch.device) -> None:
    values = values_of(kind)
    ordered = values.sort(descending=True).values
    finite = int(values.isfinite().sum())
    for rank in {1, 2, 3, finite // 2, finite - 1, finite} & set(range(1, finite + 1)):
        assert searched(values, rank, False, device) == float(ordered[rank - 1])


def test_search_by_mass_is_exact(device: torch.device) -> None:
    """Values whose weights are powers of two: no rounding, and targets met to the last unit."""
    values = -torch.randint(0, 17, (3000,)).double()
    values[5] = 0.0
    ordered = values.sort(descending=True).values
    mass = (ordered.exp2() * 2.0**40).long().cumsum(0)
    for start in range(17):
        target = int(mass[ordered == -start].max())
        assert searched(values, target, True, device) == -start
        if start < 16:
            assert searched(values, target + 1, True, device) == -start - 1


def test_bad_calls_are_refused(device: torch.device) -> None:
    def arguments(**changes: object) -> dict[str, object]:
        ids = torch.zeros(8, dtype=torch.int32, device=device)
        state = state_of([PLAIN] * 4)
        columns = {f.name: getattr(state, f.name).to(device) for f in dataclasses.fields(state)}
        columns |= {name: value for name, value in changes.items() if name in columns}
        given = {"logits": torch.zeros(8, 16, device=device), "slots": ids, "positions": ids}
        given |= {"out": ids.clone()}
        given |= {name: value for name, value in changes.items() if name in given}
        return given | {"state": SamplingState(**columns)}

    floats, ints = torch.zeros(8, device=device), torch.zeros(9, dtype=torch.int32, device=device)
    bad = [
        ("logits", torch.zeros(8, 16, dtype=torch.float64, device=device)),
        ("logits", torch.zeros(8, 32, device=device)[:, ::2]),
        ("logits", torch.zeros(8, 0, device=device)),
        ("slots", ints),
        ("positions", floats),
        ("top_k", floats[:4]),
        ("min_p", floats),
        ("seed", ints[:4]),
        ("out", ints[1:]),
        ("out", torch.zeros(8, dtype=torch.int32, device="meta")),
    ]
    sample(**arguments())  # type: ignore[arg-type]
    for name, value in bad:
        with pytest.raises(ArgumentError) as refused:
            sample(**arguments(**{name: value}))  # type: ignore[arg-type]
        assert refused.value.name == name


def test_no_rows(device: torch.device) -> None:
    state = state_of([PLAIN])
    assert run(torch.empty(0, 10), state, device) == []
