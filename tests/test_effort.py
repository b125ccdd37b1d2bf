"""What `make test` leaves out: examples of hypothesis, and cases of products of parameters."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import combinations, product
from pathlib import Path

import effort
import pytest
import torch
from effort import sample

ROOT = Path(__file__).parent.parent
MARKED = """
import effort
import pytest

@pytest.mark.sampled
@pytest.mark.parametrize(("a", "b"), [(1, 2), (3, 4), (5, 6)])
@pytest.mark.parametrize("c", "xy")
def test_values(a, b, c):
    pass

@pytest.mark.sampled(2)
@pytest.mark.parametrize("a", [1, 2])
@pytest.mark.parametrize("b", [1, 2])
@pytest.mark.parametrize("c", [1, 2])
def test_pairs(a, b, c):
    pass

@pytest.mark.parametrize("a", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_few(a):
    pass

@pytest.mark.thorough
def test_rare():
    pass

def test_examples():
    assert effort.examples(100) == NUMBER
"""


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_each_combination_of_values_is_in_a_case(strength: int) -> None:
    cases = list(product(range(4), range(3), range(2), range(5)))
    chosen = sample(cases, strength)
    assert set(chosen) <= set(cases) and len(chosen) == len(set(chosen))
    for places in combinations(range(4), strength):
        found = {tuple(case[place] for place in places) for case in chosen}
        assert found == {tuple(case[place] for place in places) for case in cases}
    assert len(chosen) < {1: 6, 2: 30, 3: 90}[strength]


def test_values_that_are_only_together_stay_together() -> None:
    cases = [(0, 0), (1, 1), (1, 2), (2, 2)]
    assert set(sample(cases, 1)) == {(0, 0), (1, 1), (2, 2)}
    assert set(sample(cases, 2)) == set(cases)


def test_a_strength_needs_as_many_parameters() -> None:
    with pytest.raises(ValueError, match="strength 2 needs as many parameters"):
        sample([(0,), (1,)], 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="all cases run on such a machine")
@pytest.mark.parametrize(
    ("tried", "number", "summary"),
    [("", 20, "9 passed, 9 deselected"), ("all", 100, "18 passed")],
)
def test_marks_and_examples_follow_the_environment(
    tried: str, number: int, summary: str, tmp_path: Path
) -> None:
    """By default, 3 of 6 cases, 4 of 8, and 1 of 2 run."""
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "test_marked.py").write_text(MARKED.replace("NUMBER", str(number)))
    environment = {
        **os.environ,
        "PAGED_TESTS": tried,
        "PYTEST_ADDOPTS": "",  # which a developer may have set
        "PYTHONPATH": str(ROOT / "tests"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), str(tmp_path)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert summary in done.stdout.splitlines()[-1], done.stdout + done.stderr


def test_few_examples_stay_as_they_are() -> None:
    assert [effort.examples(number) for number in (1, 10)] == [1, 10]
