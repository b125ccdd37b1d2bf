"""Bounds the work of llguidance: the same where a grammar is checked and where it is used."""

from __future__ import annotations

from llguidance import LLParserLimits

# Work is counted in "fuel". One step of a hostile grammar takes a few milliseconds at most, in
# which the other sequences of the step wait.
STEP_LEXER_FUEL = 200_000
STEP_MAX_ITEMS = 20_000
MAX_GRAMMAR_SIZE = 100_000  # symbols
# States are made as they are needed and take 0.3 to 2 kB each.
LEXER_STATES = 250_000  # of one completion
SHARED_LEXER_STATES = 20_000  # of all completions that share a lexer


def parser_limits(max_lexer_states: int = LEXER_STATES) -> LLParserLimits:
    """Return the limits for a matcher. Its errors do not repeat the grammar or the output."""
    return LLParserLimits(
        max_lexer_states=max_lexer_states,
        step_lexer_fuel=STEP_LEXER_FUEL,
        step_max_items=STEP_MAX_ITEMS,
        max_grammar_size=MAX_GRAMMAR_SIZE,
        verbose_errors=False,
    )
