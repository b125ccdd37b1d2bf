"""Translates the grammars that clients write into llguidance's Lark."""

from __future__ import annotations

from llguidance.gbnf_to_lark import gbnf_to_lark


def to_lark(grammar: str) -> str:
    """Return a grammar in Lark's syntax, from GBNF or from Lark.

    Raises:
        ValueError: it is not a GBNF grammar.
    """
    if "::=" not in grammar:
        return grammar
    try:
        return gbnf_to_lark(grammar)
    except (RecursionError, MemoryError):
        raise
    except Exception as error:  # llguidance raises plain exceptions
        raise ValueError(str(error)) from None
