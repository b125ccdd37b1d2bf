"""Checks constants and patterns of strings, and rewrites what llguidance reads otherwise."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

from paged_backend.grammar.schema_walk import SchemaError, leaves

# ECMAScript's white space. Rust's \s has U+0085 and lacks U+FEFF.
_SPACE = r"\t-\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_LINE_ENDS = r"\n\r\u2028\u2029"  # what ECMAScript's . does not match
_ONLY_RUST = (r"\a", r"\A", r"\z")  # escapes that mean something else in ECMAScript
_OUTSIDE = {r"\s": f"[{_SPACE}]", r"\S": f"[^{_SPACE}]", ".": f"[^{_LINE_ENDS}]"}
# In a class of Rust, [ begins another one, and && and ~~ combine two.
_IN_CLASS = {r"\s": _SPACE, r"\S": f"[^{_SPACE}]", "[": r"\[", "&": r"\&", "~": r"\~"}
_TOKEN = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[xu]\{[0-9a-fA-F]+\}|.)|.", re.DOTALL)
# Characters that JSON can only write as \uXXXX, which llguidance is told not to use. It would leave
# them out, and match the rest.
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")

_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP_YEAR = "(?:(?:0[48]|[2468][048]|[13579][26])00|[0-9]{2}(?:0[48]|[2468][048]|[13579][26]))"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP_YEAR}-02-29)"
)
# Without leap seconds, which are valid only at the end of a day in UTC.
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?"
    "(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
# Without labels that have hyphens in the third and the fourth place, such as IDNA's, most of which
# are invalid.
_LABEL = (
    "[a-zA-Z0-9](?:[a-zA-Z0-9]?|[a-zA-Z0-9-][a-zA-Z0-9]"
    "|[a-zA-Z0-9-][a-zA-Z0-9][a-zA-Z0-9-]{0,59}[a-zA-Z0-9]"
    "|[a-zA-Z0-9-]-[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,58}[a-zA-Z0-9])?)"
)
_FORMATS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}[tT]{_TIME}$",
    "byte": "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",  # OpenAPI's base64
    "hostname": rf"^{_LABEL}(?:\.{_LABEL})*$",
}
_MAX_HOSTNAME = 253  # characters


def check_constants(part: Mapping[str, Any]) -> None:
    """Refuse constants with characters that llguidance would leave out.

    Raises:
        SchemaError: there is one; the message names the keyword.
    """
    for name in ("const", "enum"):
        texts = (value for value in leaves(part.get(name)) if isinstance(value, str))
        if any(map(_CONTROL.search, texts)):
            raise SchemaError(f"the keyword {name} cannot have control characters")


def rewrite_strings(part: dict[str, Any]) -> None:
    """Rewrite the patterns and the format of a schema in place.

    Raises:
        SchemaError: a pattern means something else to llguidance.
    """
    if isinstance(part.get("pattern"), str):
        part["pattern"] = _to_rust(part["pattern"], "pattern")
    if isinstance(part.get("patternProperties"), dict):
        part["patternProperties"] = {
            _to_rust(pattern, "patternProperties"): schema
            for pattern, schema in part["patternProperties"].items()
        }
    name = part.get("format")
    if name == "unknown":
        raise SchemaError("the format unknown is not supported")
    if name in _FORMATS:
        del part["format"]
        also = [{"pattern": part["pattern"]}] if "pattern" in part else []
        part["pattern"] = _FORMATS[name]
        if name == "hostname":
            also.append({"maxLength": _MAX_HOSTNAME})
        if also:
            part["allOf"] = [*part.get("allOf", []), *also]


def _to_rust(pattern: str, keyword: str) -> str:
    """Return a pattern of ECMAScript in the syntax of Rust, which llguidance reads."""
    tokens: list[str] = _TOKEN.findall(pattern)
    written: list[str] = []
    place = 0
    while place < len(tokens):
        is_class = tokens[place] == "["
        end = _end_of_class(tokens, place) if is_class else place + 1
        found = tokens[place:end]
        if problem := _class_problem(found) if is_class else _token_problem(found[0]):
            raise SchemaError(f"the keyword {keyword} cannot have {problem}")
        written += _class_to_rust(found) if is_class else [_OUTSIDE.get(found[0], found[0])]
        place = end
    return "".join(written)


def _end_of_class(tokens: list[str], start: int) -> int:
    """Return the index after a character class of a regex; a ] at its beginning is a member."""
    first = start + 1 + (tokens[start + 1 : start + 2] == ["^"])
    ends = (place + 1 for place in range(first + 1, len(tokens)) if tokens[place] == "]")
    return next(ends, len(tokens))


def _class_to_rust(tokens: list[str]) -> list[str]:
    return ["[", *(_IN_CLASS.get(token, token) for token in tokens[1:-1]), *tokens[1:][-1:]]


def _class_problem(tokens: list[str]) -> str:
    """Return what llguidance would read otherwise in a class, an empty string if nothing."""
    members = tokens[1:-1]
    for token, after in itertools.pairwise([*members, ""]):
        if token in _ONLY_RUST or token == after == "-":
            return token if token in _ONLY_RUST else "-- in a class"
    return "control characters" if members and all(map(_is_control, members)) else ""


def _token_problem(token: str) -> str:
    if token in _ONLY_RUST:
        return token
    return "control characters" if _is_control(token) else ""


def _is_control(token: str) -> bool:
    """Return True if the token stands for a character that JSON can only write as \\uXXXX."""
    if token == r"\v":
        return True
    if token[:2] in (r"\x", r"\u") and len(token) > 2:
        code = int(token[2:].strip("{}"), 16)
        return code < 0x80 and _CONTROL.match(chr(code)) is not None
    return _CONTROL.match(token) is not None
