"""What `make test` leaves to `make soak`: examples, and cases of large products of parameters.

With `PAGED_TESTS=all` in the environment, as in `make soak`, everything is tried. Where torch sees
an NVIDIA device, all cases run in any case. Two marks of pytest say what is left out otherwise:

- ``pytest.mark.thorough`` on a test or a value of a parameter: it is left out.
- ``pytest.mark.sampled`` on a test with several parameters: only enough combinations run that each
  value is in one of them; with ``sampled(2)``, enough that each pair of values is.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from itertools import combinations

import pytest

ALL = os.environ.get("PAGED_TESTS") == "all"
_SHARE, _FEW = 0.2, 10
"""`make test` tries this part of hypothesis' examples, but not fewer than this number."""

Case = tuple[Hashable, ...]
"""A case of a product of parameters: something that stands for its value, for each of them."""


def examples(number: int) -> int:
    """Number of examples that hypothesis tries, where `number` are tried with everything."""
    return number if ALL else max(math.ceil(_SHARE * number), min(number, _FEW))


def left_out(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Tests that do not run now, by their marks.

    Args:
        items: all tests that were collected.
    """
    dropped = {item for item in items if item.get_closest_marker("thorough")}
    sampled = [item for item in items if item.get_closest_marker("sampled")]
    if ALL or not (dropped or sampled) or _has_device():
        return set()
    products: dict[str, list[pytest.Item]] = {}
    for item in sampled:
        if item not in dropped:
            products.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for product in products.values():
        cases = [_case(item) for item in product]
        kept = set(sample(cases, _strength(product[0])))
        dropped |= {item for item, case in zip(product, cases, strict=True) if case not in kept}
    return dropped


def sample(cases: Sequence[Case], strength: int) -> list[Case]:
    """Choose cases such that all values, or all pairs of values, of the cases are in them.

    Each step takes the case with most values, or pairs of values, that no case before has; among
    equals the first one, or with a strength of 1 the one with values that were chosen least often.

    Args:
        cases: all cases, with as many parameters each.
        strength: 1 for values, 2 for pairs of them.

    Raises:
        ValueError: a case has fewer parameters than `strength`.
    """
    if not all(len(case) >= strength for case in cases):
        raise ValueError(f"a sample of strength {strength} needs as many parameters")
    missing = {part for case in cases for part in _parts(case, strength)}
    used: Counter[tuple[int, Hashable]] = Counter()
    chosen: list[Case] = []

    def gain(case: Case) -> tuple[int, int]:
        new = sum(part in missing for part in _parts(case, strength))
        return new, -sum(used[place] for place in enumerate(case)) if strength == 1 else 0

    while missing:
        case = max(cases, key=gain)
        chosen.append(case)
        missing.difference_update(_parts(case, strength))
        used.update(enumerate(case))
    return chosen


def _parts(case: Case, strength: int) -> Iterable[tuple[tuple[int, Hashable], ...]]:
    return combinations(enumerate(case), strength)


def _strength(item: pytest.Item) -> int:
    mark = item.get_closest_marker("sampled")
    assert mark is not None
    return mark.args[0] if mark.args else 1


def _case(item: pytest.Item) -> Case:
    """The identities of the values; names that one mark gives values are one parameter."""
    params: dict[str, object] = dict(item.callspec.params)  # type: ignore[attr-defined]
    case: list[Hashable] = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        each = names.replace(" ", "").split(",") if isinstance(names, str) else names
        case.append(tuple(id(params.pop(name)) for name in each))
    return (*case, *(id(params[name]) for name in sorted(params)))


def _has_device() -> bool:
    import torch

    return torch.cuda.is_available()
