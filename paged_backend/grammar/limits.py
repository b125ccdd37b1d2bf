"""Bounds the work of llguidance: the same where a grammar is checked and where it is used."""

from __future__ import annotations

from llguidance import LLParserLimits

# Work is counted in "fuel". One step of a hostile grammar takes a few milliseconds at most, in
# which the other sequences of the step wait.
STEP_LEXER_FUEL = 200_000
STEP_MAX_ITEMS = 20_000
MAX_GRAMMAR_SIZE = 100_000  # symbols
# A lexer finds its states as outputs need them; each takes 0.3 to 2 kB. Most grammars have fewer
# than the small number, which bounds the memory of the lexers that are kept for later requests.
LEXER_STATES = 250_000
FEW_LEXER_STATES = 20_000


def parser_limits(max_lexer_states: int | None = None) -> LLParserLimits:
    """Return the limits for a matcher. Its errors do not repeat the grammar or the output."""
    return LLParserLimits(
        max_lexer_states=max_lexer_states or LEXER_STATES,
        step_lexer_fuel=STEP_LEXER_FUEL,
        step_max_items=STEP_MAX_ITEMS,
        max_grammar_size=MAX_GRAMMAR_SIZE,
        verbose_errors=False,
    )
