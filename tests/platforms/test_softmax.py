"""The weights of attention against float64, whatever lies around the keys that count."""

from __future__ import annotations

import math

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_backend.platforms.cpu.softmax import LOWEST, _make_weigh, weigh, weigh_bfloat16
from paged_backend.platforms.cpu.vectors import round_to_bfloat16

MAX_KEYS, HEAD_DIM = 256, 40
# As on a processor without the instruction that rounds to bf16.
_without_instruction = _make_weigh("without_instruction", np.uint16, round_to_bfloat16)
WEIGHS = {"float32": weigh, "bf16": weigh_bfloat16, "bf16, plain": _without_instruction}


def compiled(function):
    def run(scores, sums, maximum, total, first, last, num_keys):
        state = (maximum, total)
        return function(scores, sums, HEAD_DIM, state, (first, last, num_keys))

    return numba.njit(fastmath=True)(run)


RUNS = {name: compiled(function) for name, function in WEIGHS.items()}


@pytest.mark.parametrize("name", RUNS)
@given(st.data())
def test_weights_are_powers_relative_to_the_maximum(name: str, data: st.DataObject) -> None:
    num_keys = data.draw(st.integers(1, MAX_KEYS))
    last = data.draw(st.integers(0, num_keys))
    first = data.draw(st.integers(0, num_keys))
    old = np.float32(data.draw(st.sampled_from([float(LOWEST), -3.0, 2.5, 40.0])))
    total = np.float32(0.0 if old == LOWEST else 1.5)
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    scale = data.draw(st.sampled_from([0.1, 5.0, 200.0]))
    scores = (random.standard_normal(MAX_KEYS + 16) * scale).astype(np.float32)
    around = np.float32(data.draw(st.sampled_from([math.nan, math.inf, -math.inf, 1e30])))
    scores[:first] = scores[last:] = around
    wanted, sums = scores[first:last].astype(np.float64), np.ones(HEAD_DIM, np.float32)
    after = scores[-(-num_keys // 16) * 16 :].copy()

    state = RUNS[name](scores.ctypes.data, sums.ctypes.data, old, total, first, last, num_keys)

    weights = scores if name == "float32" else bfloat16s(scores)
    assert not weights[:first].any() and not weights[max(first, last) : num_keys].any()
    assert scores[-(-num_keys // 16) * 16 :].tobytes() == after.tobytes()
    if first >= last:
        assert state == (old, total) and (sums == 1).all()
        return
    highest = max(float(old), wanted.max())
    powers = np.exp2(wanted - highest)
    shrink = 0.0 if old == LOWEST else 2.0 ** (float(old) - highest)
    assert state[0] == np.float32(highest)
    assert state[1] == pytest.approx(total * shrink + powers.sum(), rel=1e-5)
    np.testing.assert_allclose(sums, shrink, rtol=1e-5, atol=1e-30)
    tolerance = 1e-5 if name == "float32" else 2.0**-8
    np.testing.assert_allclose(weights[first:last], powers, rtol=tolerance, atol=1e-30)


def bfloat16s(row: np.ndarray) -> np.ndarray:
    """Read the numbers at the beginning of a row as bf16."""
    return (row.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("num_keys", [1, 15, 16, 17, 100, 255])
def test_both_ways_of_rounding_give_the_same_numbers(num_keys: int) -> None:
    rows = []
    for name in ("bf16", "bf16, plain"):
        random = np.random.default_rng(num_keys)
        scores = random.standard_normal(MAX_KEYS).astype(np.float32) * 4
        sums, zero = np.zeros(HEAD_DIM, np.float32), np.float32(0.0)
        places = scores.ctypes.data, sums.ctypes.data
        RUNS[name](*places, np.float32(LOWEST), zero, 0, num_keys, num_keys)
        rows.append(scores.view(np.uint16)[:num_keys].tolist())
    assert rows[0] == rows[1]
