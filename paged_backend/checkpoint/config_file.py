"""Typed reading of a checkpoint's config.json: every breach names the key and the file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paged_backend.values.errors import ConfigError
from paged_backend.values.json_file import read_json_object
from paged_backend.values.validation import Rule, shorten


class ConfigFile:
    """The values of a JSON object; a key that holds null counts as missing."""

    def __init__(self, values: dict[str, Any], origin: str) -> None:
        self._values = values
        self._origin = origin

    @classmethod
    def read(cls, path: Path) -> ConfigFile:
        """Read a JSON file.

        Raises:
            ConfigError: the file is missing or holds no JSON object.
        """
        return cls(read_json_object(path), str(path))

    def error(self, key: str, problem: str) -> ConfigError:
        """The error for a key that cannot be used."""
        return ConfigError(f"{self._origin}: {key} {problem}")

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def keys(self) -> Iterable[str]:
        """The keys, in the file's order."""
        return self._values.keys()

    def value(self, key: str) -> Any:
        """The raw value, None where the key is missing."""
        return self._values.get(key)

    def integer(
        self, key: str, default: int | None = None, *, low: int = 1, high: int | None = None
    ) -> int:
        """An integer from `low` up to `high`; without a default the key is required."""
        return int(self._checked(key, Rule(int, low, high), default))

    def number(self, key: str, default: float | None = None) -> float:
        """A number above zero; without a default the key is required."""
        value = self._checked(key, Rule(float, above=0), default)
        try:
            return float(value)
        except OverflowError as error:
            problem = f"must be a number above 0 that float64 has, got {shorten(value)}"
            raise self.error(key, problem) from error

    def optional_number(self, key: str) -> float | None:
        """A number above zero; None where the key is missing."""
        return None if self.value(key) is None else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        return bool(self._checked(key, Rule(bool), default))

    def text(self, key: str, default: str, choices: Iterable[str] = ()) -> str:
        """A string, one of `choices` if any are given."""
        return str(self._checked(key, Rule(str, choices=tuple(choices)), default))

    def section(self, key: str) -> ConfigFile | None:
        """The object under a key, None where it is missing or empty."""
        values = self.value(key)
        if not values:
            return None
        if not isinstance(values, dict):
            raise self.error(key, f"must be an object, got {shorten(values)}")
        return ConfigFile(values, f"{self._origin}: {key}")

    def with_only(self, *keys: str) -> ConfigFile:
        """Return a copy that has no other keys than `keys`."""
        values = {key: value for key, value in self._values.items() if key in keys}
        return ConfigFile(values, self._origin)

    def with_defaults(self, **values: Any) -> ConfigFile:
        """Return a copy in which missing keys have the given values."""
        present = {key: value for key, value in self._values.items() if value is not None}
        return ConfigFile(values | present, self._origin)

    def with_absent(self, **values: Any) -> ConfigFile:
        """Return a copy in which keys that are not in the file, not even as null, have values."""
        return ConfigFile(values | self._values, self._origin)

    def replaced(self, **values: Any) -> ConfigFile:
        """Return a copy in which keys have the given values."""
        return ConfigFile(self._values | values, self._origin)

    def renamed(self, **names: str) -> ConfigFile:
        """Return a copy in which keys have other names, given by their names in the file."""
        values = {key: value for key, value in self._values.items() if key not in names}
        values |= {names[key]: value for key, value in self._values.items() if key in names}
        return ConfigFile(values, self._origin)

    def _checked(self, key: str, rule: Rule, default: object) -> Any:
        value = self.value(key)
        if value is None:
            value = default
        if value is None:
            raise self.error(key, f"is missing; it must be {rule.describe()}")
        if not rule.accepts(value):
            raise self.error(key, f"must be {rule.describe()}, got {shorten(value)}")
        return value
