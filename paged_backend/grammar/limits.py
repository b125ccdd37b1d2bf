"""Bounds the work of llguidance: the same where a grammar is checked and where it is used."""

from __future__ import annotations

from llguidance import LLParserLimits

# Work is counted in "fuel". One step of a hostile grammar takes a few milliseconds at most, in
# which the other sequences of the step wait.
STEP_LEXER_FUEL = 200_000
STEP_MAX_ITEMS = 20_000
MAX_GRAMMAR_SIZE = 100_000  # symbols


def parser_limits() -> LLParserLimits:
    """Return the limits for a matcher. Its errors do not repeat the grammar or the output."""
    return LLParserLimits(
        step_lexer_fuel=STEP_LEXER_FUEL,
        step_max_items=STEP_MAX_ITEMS,
        max_grammar_size=MAX_GRAMMAR_SIZE,
        verbose_errors=False,
    )
