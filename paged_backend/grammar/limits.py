"""Bounds the work of llguidance: the same where a grammar is checked and where it is used."""

from __future__ import annotations

from llguidance import LLParserLimits

# The work of a lexer is counted in "fuel", the work of a parser in items of Earley's algorithm. The
# limits are 4 times what the schemas in tests/grammar/data need: 24,500 of fuel, 1,520 items in a
# step and 299 in a row. The time of a mask grows with the square of the items: it can be 0.4 s.
STEP_LEXER_FUEL = 200_000
STEP_MAX_ITEMS = 6_100
MAX_ITEMS_IN_ROW = 1_200
# As long as these suffice, the engine's thread may compute a mask, which takes 0.03 s at most.
FEW_STEP_ITEMS = 1_600
FEW_ITEMS_IN_ROW = 500
MAX_GRAMMAR_SIZE = 100_000  # symbols
# A lexer finds its states as outputs need them; each takes 0.3 to 2 kB. Most grammars have fewer
# than the small number, which bounds the memory of the lexers that are kept for later requests.
LEXER_STATES = 250_000
FEW_LEXER_STATES = 20_000


def parser_limits(*, few_states: bool = False, few_items: bool = False) -> LLParserLimits:
    """Return the limits for a matcher. Its errors do not repeat the grammar or the output."""
    return LLParserLimits(
        max_lexer_states=FEW_LEXER_STATES if few_states else LEXER_STATES,
        step_lexer_fuel=STEP_LEXER_FUEL,
        step_max_items=FEW_STEP_ITEMS if few_items else STEP_MAX_ITEMS,
        max_items_in_row=FEW_ITEMS_IN_ROW if few_items else MAX_ITEMS_IN_ROW,
        max_grammar_size=MAX_GRAMMAR_SIZE,
        verbose_errors=False,
    )
