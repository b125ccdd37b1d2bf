"""Order of the files of tests."""

from __future__ import annotations

from collections.abc import Sequence

import pytest


def mixed(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Order the files of tests such that files with servers are spread evenly among the others.

    A test with a server leaves its core idle for half of its time.

    Args:
        items: all tests, the tests of a file one after another.
    """
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(str(item.path), []).append(item)
    kinds: dict[bool, list[list[pytest.Item]]] = {True: [], False: []}
    for tests in files.values():
        kinds[any(test.get_closest_marker("server") for test in tests)].append(tests)
    places = [
        ((number + 0.5) / len(kind), tests)
        for kind in kinds.values()
        for number, tests in enumerate(kind)
    ]
    return [test for _, tests in sorted(places, key=lambda place: place[0]) for test in tests]
