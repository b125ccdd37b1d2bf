"""Order of the files of tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from file_order import mixed


class Item:
    """Stands for a test of pytest."""

    def __init__(self, file: str, has_server: bool) -> None:
        self.path = Path(file)
        self._has_server = has_server

    def get_closest_marker(self, name: str) -> bool:
        return name == "server" and self._has_server


def test_files_with_servers_are_spread_among_the_others() -> None:
    """A file of which one test has a server is such a file, and its tests keep their order."""
    items: list[Any] = [Item(file, file in "adgj") for file in "aabbccdefghhij"]
    items.insert(-1, Item("i", True))
    order = mixed(items)
    assert "".join(str(item.path) for item in order) == "aabbdccgeiifjhh"
    assert [item for item in order if item.path == Path("i")] == items[-3:-1]
