"""Translates structural tags, which constrain parts of an output, into llguidance's Lark.

Two forms are known: vLLM's older one with ``structures`` and ``triggers``, and xgrammar's with a
tree of formats under ``format``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from paged_backend.grammar.json_schema import JSON_ON_ONE_LINE, checked_schema
from paged_backend.grammar.lark import to_lark
from paged_backend.grammar.writer import GrammarWriter

MAX_FORMATS = 512


class StructuralTagError(ValueError):
    """A structural tag that cannot be translated; the message names the part."""


def write_structural_tag(writer: GrammarWriter, text: str) -> str:
    """Return an expression for a structural tag.

    Raises:
        StructuralTagError: the tag has an unknown form.
    """
    try:
        tag = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StructuralTagError(f"is not valid JSON: {error}") from None
    if not isinstance(tag, Mapping):
        raise StructuralTagError("must be a JSON object")
    if "structures" in tag:
        return _Translator(writer).write(_older_form(tag))
    if "format" not in tag:
        raise StructuralTagError("must have a format, or structures and triggers")
    return _Translator(writer).write(tag["format"])


def _older_form(tag: Mapping[str, Any]) -> dict[str, Any]:
    """Return the format that means the same as ``structures`` and ``triggers``."""
    structures = _list(tag, "structures")
    return {
        "type": "triggered_tags",
        "triggers": _list(tag, "triggers"),
        "tags": [
            {
                "type": "tag",
                "begin": _get(item, "begin", str),
                "content": {"type": "json_schema", "json_schema": _get(item, "schema", dict)},
                "end": _get(item, "end", str),
            }
            for item in structures
        ],
    }


class _Translator:
    """Writes the formats of one structural tag."""

    def __init__(self, writer: GrammarWriter) -> None:
        self._writer = writer
        self._num_formats = 0
        self._writers: dict[str, Callable[[Mapping[str, Any]], str]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "any_text": self._any_text,
            "regex": self._regex,
            "grammar": self._grammar,
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }

    def write(self, format: Any) -> str:
        """Return an expression for a format."""
        self._num_formats += 1
        if self._num_formats > MAX_FORMATS:
            raise StructuralTagError(f"has over {MAX_FORMATS} formats")
        kind = _get(format, "type", str)
        if kind not in self._writers:
            raise StructuralTagError(f"the format {kind} is not supported")
        return self._writers[kind](format)

    def _const_string(self, format: Mapping[str, Any]) -> str:
        return self._writer.literal(_get(format, "value", str))

    def _json_schema(self, format: Mapping[str, Any]) -> str:
        schema = checked_schema(_get(format, "json_schema", dict))
        return self._writer.json(schema, JSON_ON_ONE_LINE)

    def _any_text(self, format: Mapping[str, Any]) -> str:
        return self._writer.text()

    def _regex(self, format: Mapping[str, Any]) -> str:
        return self._writer.regex(_get(format, "pattern", str))

    def _grammar(self, format: Mapping[str, Any]) -> str:
        return self._writer.lark(to_lark(_get(format, "grammar", str)))

    def _sequence(self, format: Mapping[str, Any]) -> str:
        return self._writer.rule(" ".join(map(self.write, _list(format, "elements"))))

    def _or(self, format: Mapping[str, Any]) -> str:
        return self._writer.rule(" | ".join(map(self.write, _list(format, "elements"))))

    def _tag(self, format: Mapping[str, Any]) -> str:
        begin = self._writer.literal(_get(format, "begin", str))
        return self._writer.rule(f"{begin} {self._rest(format, '')}")

    def _rest(self, format: Mapping[str, Any], trigger: str) -> str:
        """Return what follows the trigger, with which the tag begins."""
        begin = _get(format, "begin", str).removeprefix(trigger) if trigger else ""
        end, content = _end(format), format.get("content")
        if isinstance(content, Mapping) and content.get("type") == "any_text" and end:
            return f"{self._writer.literal(begin)} {self._writer.text_until(end)}"
        return f"{self._writer.literal(begin)} {self.write(content)} {self._writer.literal(end)}"

    def _triggered_tags(self, format: Mapping[str, Any]) -> str:
        """Write free text in which a tag must go on once its trigger has appeared."""
        choices = []
        for tag in _list(format, "tags"):
            begin = _get(tag, "begin", str)
            triggers = [word for word in _list(format, "triggers") if begin.startswith(str(word))]
            if not triggers:
                raise StructuralTagError(f"no trigger begins the tag {begin[:40]!r}")
            # A trigger that is the beginning of a special token is never seen alone.
            trigger = max(triggers[0], self._writer.leading_special_token(begin), key=len)
            head = self._writer.text_until(trigger)
            choices.append(f"{head} {self._rest(tag, trigger)}")
        tags = self._writer.rule(" | ".join(choices))
        text = self._writer.text()
        if format.get("stop_after_first"):
            return tags if format.get("at_least_one") else f"({tags} | {text})"
        return f"{tags}{'+' if format.get('at_least_one') else '*'} {text}"

    def _tags_with_separator(self, format: Mapping[str, Any]) -> str:
        tags = self._writer.rule(" | ".join(map(self.write, _list(format, "tags"))))
        separator = self._writer.literal(_get(format, "separator", str))
        if format.get("stop_after_first"):
            return f"{tags}{'' if format.get('at_least_one') else '?'}"
        several = f"{tags} ({separator} {tags})*"
        return several if format.get("at_least_one") else f"({several})?"


def _end(format: Mapping[str, Any]) -> str:
    end = format.get("end", "")
    if isinstance(end, list) and len(end) == 1:
        (end,) = end
    if not isinstance(end, str):
        raise StructuralTagError("the end of a tag must be a string")
    return end


def _get(item: Any, name: str, kind: type) -> Any:
    if not isinstance(item, Mapping) or not isinstance(item.get(name), kind):
        raise StructuralTagError(f"{name} is missing, or is not {_NOUNS[kind]}")
    return item[name]


def _list(item: Mapping[str, Any], name: str) -> list[Any]:
    values: list[Any] = _get(item, name, list)
    if not values:
        raise StructuralTagError(f"{name} must not be empty")
    return values


_NOUNS: dict[type, str] = {str: "a string", dict: "an object", list: "a list"}
