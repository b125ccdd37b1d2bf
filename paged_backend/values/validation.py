"""Checks of untrusted values, declared at the field that they concern.

A dataclass field made by :func:`checked` carries its rule; :func:`check_fields` applies the rules
of all fields and reports the first violation, with the field's name and its allowed range.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Protocol, TypeVar

MAX_LISTED = 32  # names that an error message lists
MAX_COMPARED = 64  # characters of an unknown name that is compared with the known ones

Refuse = Callable[[str, str], Exception]
"""Makes the error to raise from a field's name and the problem with its value."""


class DataclassInstance(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


T = TypeVar("T", bound=DataclassInstance)


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """What a field accepts: a kind, a range for numbers, choices or a length for strings, null.

    A string with a ``max_length`` must be valid UTF-8, and errors do not repeat it.
    """

    kind: type
    low: float | None = None
    high: float | None = None
    above: float | None = None
    choices: tuple[str, ...] = ()
    max_length: int | None = None  # characters
    optional: bool = False

    def describe(self) -> str:
        """Describe the allowed values, for error messages."""
        noun: dict[type, str] = {
            int: "an integer",
            float: "a number",
            bool: "true or false",
            str: "a string",
            dict: "a JSON object",
        }
        words = noun[self.kind]
        if self.choices:
            words = "one of " + ", ".join(self.choices)
        if self.max_length is not None:
            words += f" of at most {self.max_length} characters"
        if self.above is not None:
            words += f" above {self.above:g}"
        if self.low is not None:
            words += f" from {_plain(self.low)}"
        if self.high is not None:
            words += f" up to {_plain(self.high)}"
        return words + (" or null" if self.optional else "")

    def accepts(self, value: object) -> bool:
        """Return True if the value has the right kind and lies in the range."""
        if value is None:
            return self.optional
        if self.kind in (int, float):
            return self._accepts_number(value)
        if not isinstance(value, self.kind):
            return False
        if self.max_length is not None and not (
            is_text(value) and len(str(value)) <= self.max_length
        ):
            return False
        return not self.choices or value in self.choices

    def _accepts_number(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        if isinstance(value, float) and (self.kind is int or not math.isfinite(value)):
            return False
        return (
            (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
        )


def checked(default: Any, rule: Rule, help: str = "") -> Any:
    """A dataclass field with a default, a rule and a sentence of documentation."""
    return dataclasses.field(default=default, metadata={"rule": rule, "help": help})


def check_fields(instance: DataclassInstance, refuse: Refuse) -> None:
    """Raise ``refuse(field, problem)`` for the first field that breaks its rule."""
    for spec in dataclasses.fields(instance):
        rule: Rule | None = spec.metadata.get("rule")
        value = getattr(instance, spec.name)
        if rule is not None and not rule.accepts(value):
            got = "" if rule.max_length is not None else f", got {shorten(value)}"
            raise refuse(spec.name, f"must be {rule.describe()}{got}")


def check_known(names: Iterable[str], known: Iterable[str], refuse: Refuse) -> None:
    """Raise ``refuse`` for the first unknown name, and suggest the known name nearest to it."""
    allowed = list(known)
    for name in names:
        if name not in allowed:
            # Comparing takes seconds for a name of a megabyte.
            near = (
                difflib.get_close_matches(name, allowed, n=1) if len(name) <= MAX_COMPARED else []
            )
            hint = f", did you mean {near[0]}?" if near else _known(allowed)
            raise refuse(shorten(name, 40, quote=False) or "''", f"is not known{hint}")


def coerce(cls: type[DataclassInstance], values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert strings to numbers and booleans where the rules of ``cls`` ask for them."""
    rules: dict[str, Rule] = {
        spec.name: spec.metadata["rule"]
        for spec in dataclasses.fields(cls)
        if "rule" in spec.metadata
    }
    return {
        name: from_string(rules[name].kind, value)
        if isinstance(value, str) and name in rules
        else value
        for name, value in values.items()
    }


def from_string(kind: type, text: str) -> Any:
    """Convert a string to ``kind``; a string that cannot be converted is returned as it is.

    An object (``dict``) is given as JSON.
    """
    if kind is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    try:
        return json.loads(text) if kind is dict else kind(text)
    except ValueError:
        return text


def from_mapping(cls: type[T], values: Mapping[str, Any], refuse: Refuse) -> T:
    """Build a dataclass from untrusted names and values."""
    check_known(values, (spec.name for spec in dataclasses.fields(cls)), refuse)
    return cls(**values)


def shorten(value: object, limit: int = 60, *, quote: bool = True) -> str:
    """Return a value as text for an error message: one line of limited length."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, (str, bytes, list)):
        value = value[: limit + 1]  # more would only be cut off below
    text = repr(value) if quote else ascii(str(value))[1:-1]
    return text if len(text) <= limit else text[: limit - 3] + "..."


def is_text(value: object) -> bool:
    """Whether a value is a string that UTF-8 can encode; JSON allows half a surrogate pair."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_deeper(value: object, max_depth: int) -> bool:
    """Return whether a value of JSON has more levels of arrays and objects, without recursion."""
    level = [value]
    for _ in range(max_depth + 1):
        containers = [item for item in level if isinstance(item, (list, dict))]
        if not containers:
            return False
        level = [
            item
            for container in containers
            for item in (container.values() if isinstance(container, dict) else container)
        ]
    return True


def _plain(number: float) -> str:
    return str(int(number)) if float(number).is_integer() else f"{number:g}"


def _known(names: list[str]) -> str:
    more = len(names) - MAX_LISTED
    return f"; known: {', '.join(names[:MAX_LISTED])}" + (f" and {more} more" if more > 0 else "")
