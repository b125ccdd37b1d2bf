"""Refuses values of keywords about numbers that llguidance would not enforce exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from paged_backend.grammar.schema_walk import SchemaError, leaves

# llguidance reads numbers as 64-bit floats, and then the bounds of integers as 64-bit integers.
_MAX_INTEGER = 2**63 - 1
_MIN_INTEGER = -(2**63) + 1024  # the smallest float above -2**63
_MAX_EXACT = 2**53  # from here on, a float plus 1 may be the same float
_MAX_PRODUCT = 2**32  # product of numbers for which llguidance computes a common multiple
_KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_COMBINING = ("allOf", "anyOf", "oneOf", "$ref", "patternProperties")
# The smallest and the largest number of each format of integers; OpenAPI defines these formats.
INTEGER_FORMATS = {
    **{f"int{n}": (max(-(2 ** (n - 1)), _MIN_INTEGER), 2 ** (n - 1) - 1) for n in (8, 16, 32, 64)},
    **{f"uint{n}": (0, min(2**n - 1, _MAX_INTEGER)) for n in (8, 16, 32, 64)},
}


def check_numbers(parts: Sequence[dict[str, Any]]) -> None:
    """Check the keywords about numbers in all of these schemas, which may be combined.

    Raises:
        SchemaError: a keyword would not be enforced; the message names it.
    """
    for part in parts:
        for name in _KEYWORDS:
            if name in part and not _is_kept(name, part[name], part.get("type") == "integer"):
                raise SchemaError(f"the keyword {name} must be a number that can be kept exactly")
        for name in ("const", "enum"):
            if not all(map(_is_constant, leaves(part.get(name)))):
                raise SchemaError(f"the keyword {name} has a number that cannot be kept exactly")
    _check_narrow_ranges(parts)
    _check_common_multiples(parts)


def _is_kept(name: str, value: Any, of_integers: bool) -> bool:
    """Return True if llguidance enforces this value of a keyword, or a stricter one."""
    if not _is_number(value) or not math.isfinite(value):
        return False
    if name == "multipleOf":
        digits, exponent = _decimal(value)
        return digits > 0 and Fraction(digits, 10**exponent) == Fraction(repr(abs(value)))
    if abs(value) < _MAX_EXACT:
        return True
    if name.startswith("exclusive"):
        return False
    read = Fraction(repr(float(value)))  # the text that becomes a part of a regular expression
    if of_integers:
        read = Fraction(max(-_MAX_INTEGER - 1, min(_MAX_INTEGER, int(float(value)))))
    exact = Fraction(repr(value))
    return read <= exact if name == "maximum" else read >= exact


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_constant(value: Any) -> bool:
    """Return True unless this is a number that llguidance would change."""
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) <= _MAX_INTEGER and int(float(value)) == value
    return not isinstance(value, float) or math.isfinite(value)


def _decimal(value: float) -> tuple[int, int]:
    """Return (digits, exponent) of the decimal number that llguidance makes of a ``multipleOf``."""
    read, exponent = abs(float(value)), 0
    while read % 1 != 0:
        read *= 10
        exponent += 1
    return int(read), exponent


def _check_narrow_ranges(parts: Sequence[dict[str, Any]]) -> None:
    """Refuse ranges that begin above a whole number and end before the next one.

    llguidance would allow the whole number, too. This includes the mirror images below zero.
    """
    of_floats = [part for part in parts if part.get("type") != "integer"]
    for sign, above, below in (
        (1, "exclusiveMinimum", ("maximum", "exclusiveMaximum")),
        (-1, "exclusiveMaximum", ("minimum", "exclusiveMinimum")),
    ):
        ends = {sign * part[name] for part in of_floats for name in below if name in part}
        for start in {sign * part[above] for part in of_floats if above in part}:
            if start >= 0 and start % 1 == 0 and any(start < end < start + 1 for end in ends):
                raise SchemaError(
                    f"the keyword {above} cannot be enforced in a range shorter than 1"
                )


def _check_common_multiples(parts: Sequence[dict[str, Any]]) -> None:
    """Refuse values of ``multipleOf`` with a common multiple too large for llguidance."""
    values = {_decimal(part["multipleOf"]) for part in parts if "multipleOf" in part}
    if len(values) < 2 or not any(name in part for part in parts for name in _COMBINING):
        return
    most = max(exponent for _, exponent in values)
    if math.prod(digits * 10 ** (most - exponent) for digits, exponent in values) >= _MAX_PRODUCT:
        raise SchemaError("the keyword multipleOf has values that cannot be combined")
