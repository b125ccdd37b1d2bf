"""Writes grammars of llguidance from parts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from paged_backend.grammar.json_schema import STRICT_OPTIONS

ANY_TEXT = r"/(.|\n)*/"


class GrammarWriter:
    """Collects the rules of one grammar. Its methods return expressions in Lark's syntax.

    Args:
        special_token_ids: the tokens, by their text, that llguidance matches only by their id.
    """

    def __init__(self, special_token_ids: Mapping[str, int]) -> None:
        self._special_token_ids = special_token_ids
        longest_first = sorted(special_token_ids, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._rules: list[str] = []
        self._grammars: list[dict[str, str]] = []

    def grammar(self, start: str) -> str:
        """Return the whole grammar as JSON text."""
        lark = "\n".join(["%llguidance {}", f"start: {start}", *self._rules])
        return json.dumps({"grammars": [{"lark_grammar": lark}, *self._grammars]})

    def rule(self, body: str, attributes: str = "") -> str:
        """Add a rule; returns its name."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def later(self) -> str:
        """Return the name of a rule that is defined later, so that it may contain itself."""
        name = f"r{len(self._rules)}"
        self._rules.append("")
        return name

    def define(self, name: str, body: str) -> None:
        """Define a rule that ``later`` has named."""
        self._rules[int(name[1:])] = f"{name}: {body}"

    def literal(self, text: str) -> str:
        """Return an expression for a text; special tokens in it are tokens, not characters."""
        parts = []
        end = 0
        for match in self._special.finditer(text):
            parts += [
                _quoted(text[end : match.start()]),
                f"<[{self._special_token_ids[match[0]]}]>",
            ]
            end = match.end()
        return " ".join(filter(None, [*parts, _quoted(text[end:])]))

    def leading_special_token(self, text: str) -> str:
        """Return the special token with which a text begins; empty if it begins with none."""
        match = self._special.match(text)
        return "" if match is None else match[0]

    def choice(self, texts: Iterable[str]) -> str:
        """Return an expression for one of several texts, without special tokens."""
        return self.any_of(map(_quoted, texts))

    def any_of(self, expressions: Iterable[str]) -> str:
        """Return an expression for one of several expressions."""
        return self.rule(" | ".join(expressions))

    def text(self, *excluded: str, attributes: str = "") -> str:
        """Return an expression for any text in which no match of a regular expression begins."""
        pattern = ANY_TEXT
        for regex in excluded:
            pattern += f" & ~/{_escaped(regex)}/"
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {pattern}")
        return self.rule(name, attributes)

    def text_without(self, *texts: str, attributes: str = "") -> str:
        """Return an expression for any text that contains none of the given ones."""
        return self.text(*map(_containing, texts), attributes=attributes)

    def text_until(self, end: str, attributes: str = "", without: str = "") -> str:
        """Return an expression for any text up to the first place where a given one ends.

        Args:
            end: the text at the end.
            attributes: attributes of the rule for what is before a special token.
            without: a text that it may not contain; empty for none.
        """
        others = (without,) if without else ()
        if self.is_marked(end):
            before = self.text_without(end, *others, attributes=attributes)
            return self.rule(f"{before} {self.literal(end)}")
        # A lexeme that is not lazy would include the beginning of the end.
        pattern = f"{ANY_TEXT[:-1]}{_pattern(end)}/"
        if not without:
            return self.rule(pattern, "[lazy]")
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {pattern} & ~/{_escaped(_containing(without))}/")
        return self.rule(name, "[lazy]")

    def is_marked(self, text: str) -> bool:
        """Return True if a text has a special token, which other text cannot contain."""
        return self._special.search(text) is not None

    def json(self, schema: Mapping[str, Any], options: Mapping[str, Any]) -> str:
        """Return an expression for JSON by a schema that llguidance can enforce.

        Args:
            schema: a JSON schema.
            options: llguidance's options for the white space.
        """
        guidance = {**STRICT_OPTIONS, **options}
        return self.rule(f"%json {json.dumps({**schema, 'x-guidance': guidance})}")

    def regex(self, pattern: str) -> str:
        """Return an expression for a regular expression."""
        return self.rule(f"/{_escaped(pattern)}/")

    def lark(self, grammar: str) -> str:
        """Return an expression for a whole grammar in Lark's syntax."""
        name = f"g{len(self._grammars)}"
        self._grammars.append({"name": name, "lark_grammar": grammar})
        return self.rule(f"@{name}")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _containing(text: str) -> str:
    """Return a regular expression of texts that contain one."""
    return rf"(.|\n)*{_pattern(text)}(.|\n)*"


def _pattern(text: str) -> str:
    return "".join(f"\\x{{{ord(character):x}}}" for character in text)


def _escaped(pattern: str) -> str:
    """Escape the slashes that would end a regular expression."""
    return re.sub(r"\\.|/", lambda match: r"\/" if match[0] == "/" else match[0], pattern)
