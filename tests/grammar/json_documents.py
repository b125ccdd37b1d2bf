"""Documents of JSON schemas: made by random walks, spelled in several ways, and validated."""

from __future__ import annotations

import decimal
import itertools
import json
import lzma
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llguidance import LLMatcher

from paged_backend.checkpoint.bundled import MODEL_DIR
from paged_backend.grammar.build import build_grammar
from paged_backend.grammar.matcher import compile_grammar
from paged_backend.grammar.vocabulary import load_vocabulary
from paged_backend.text.tokenizer import load_tokenizer
from paged_backend.values.output_constraint import OutputConstraint
from paged_backend.values.structured_outputs import StructuredOutputsParams

EOS = 1
TOKENIZER = load_tokenizer(MODEL_DIR)
VOCAB_SIZE = TOKENIZER.vocab_size
VOCABULARY = load_vocabulary(MODEL_DIR, VOCAB_SIZE, [EOS])
# Tokens that bring a document nearer to its end; without them, no string of a walk would end.
_PUNCTUATION = [
    token for token in range(VOCAB_SIZE) if TOKENIZER.decode([token]) in ('"', "}", "]", ",", ":")
]
_MAX_ORDERS = 24


def compile_schema(schema: Any) -> LLMatcher:
    """Return the matcher of a schema as the service makes it; ValueError if it is refused."""
    return compile_params(StructuredOutputsParams(json=json.dumps(schema)))


def compile_params(params: StructuredOutputsParams) -> LLMatcher:
    """Return the matcher of a constraint as the service makes it; ValueError if it is refused."""
    return compile_grammar(VOCABULARY, build_grammar(OutputConstraint(params), {}))


def accepts_text(matcher: LLMatcher, text: str) -> bool:
    """Return True if the tokens of a text are a complete output."""
    state = matcher.deep_copy()
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    return state.try_consume_tokens(tokens) == len(tokens) and state.is_accepting()


def accepts(matcher: LLMatcher, value: Any) -> bool:
    """Return True if any text of a JSON value is accepted, whatever the order of its properties."""
    return any(
        accepts_text(matcher, json.dumps(ordered, separators=separators, ensure_ascii=ascii))
        for ordered in _orders(value, _MAX_ORDERS)
        for separators in ((",", ":"), (", ", ": "))
        for ascii in (False, True)
    )


def _orders(value: Any, limit: int) -> Iterator[Any]:
    """Yield a value with its properties in different orders, at most ``limit`` of them."""
    found: Iterator[Any]
    if isinstance(value, Mapping):
        found = (
            dict(zip(names, values, strict=True))
            for names in itertools.permutations(value)
            for values in itertools.product(*(list(_orders(value[name], 2)) for name in names))
        )
    elif isinstance(value, list):
        found = map(list, itertools.product(*(list(_orders(item, 2)) for item in value)))
    else:
        found = iter([value])
    return itertools.islice(found, limit)


def random_document(matcher: LLMatcher, rng: random.Random, max_tokens: int) -> str | None:
    """Return the text of a walk over allowed tokens, None if it does not end."""
    state, token_ids = matcher.deep_copy(), []
    for _ in range(max_tokens):
        if state.is_stopped():
            break
        mask = state.compute_bitmask()
        allowed = [t for t in range(VOCAB_SIZE) if mask[t // 8] >> t % 8 & 1]
        ends = [token for token in _PUNCTUATION if token in allowed]
        token = rng.choice(ends if ends and rng.random() < 0.4 else allowed)
        if EOS in allowed and (token == EOS or rng.random() < 0.5):
            break
        if not state.consume_tokens([token]):  # the matcher has met a limit
            return None
        token_ids.append(token)
    return TOKENIZER.decode(token_ids) if state.is_accepting() else None


class ExactValidator:
    """Validates documents by jsonschema, with formats, and with numbers as they are written."""

    def __init__(self, schema: Any) -> None:
        exact = json.loads(json.dumps(schema), parse_float=_exact)
        # Imported by the process that uses it: that takes a second.
        from jsonschema import Draft202012Validator
        from jsonschema.validators import validator_for

        standard = validator_for(schema, default=Draft202012Validator)
        self._validator = standard(exact, format_checker=standard.FORMAT_CHECKER)

    def problem(self, text: str) -> str:
        """Return why a document is invalid, an empty string if it is valid."""
        document = json.loads(text, parse_float=_exact)
        with decimal.localcontext() as context:
            context.prec = 2000  # digits of the remainder, for multipleOf
            errors = [error.message for error in self._validator.iter_errors(document)]
        return "; ".join(errors)


def _exact(text: str) -> decimal.Decimal | float:
    """Return a number as it is written, unless its exponent is too large for that."""
    try:
        return decimal.Decimal(text)
    except decimal.InvalidOperation:
        return float(text)


@dataclass(frozen=True)
class Sample:
    """A schema of a corpus, with documents that are known to be valid or invalid."""

    name: str
    schema: Any
    tests: list[dict[str, Any]]


def load_samples(path: Path) -> list[Sample]:
    """Return the schemas of a file that ``draw_json_schemas.py`` wrote."""
    with lzma.open(path, "rt") as file:
        return [Sample(**json.loads(line)) for line in file]


def names_reason(problem: str, schema: Any) -> bool:
    """Return True if the reason of a refusal is a keyword of the schema, or another known one."""
    keywords = set(_keys([schema]))
    named = re.findall(r"[$\w]+", problem)
    return problem.startswith(_REASONS) or not keywords.isdisjoint(named)


def _keys(value: Any) -> Iterator[str]:
    """Yield the names of all properties in a JSON value."""
    if isinstance(value, Mapping):
        yield from value
    for item in value.values() if isinstance(value, Mapping) else value:
        if isinstance(item, (Mapping, list)):
            yield from _keys(item)


# Beginnings of the reasons that name no keyword, but what is wrong with its value.
_REASONS = (
    "Unknown format: ",
    "the format ",
    "Resource ",  # target of a $ref or $schema
    "regex parse error: ",
    "lookarounds not supported yet; ",
    "patternProperty regexes ",
    "circular references with sibling keys ",
    "Unsatisfiable schema: ",
    "must be a JSON object; false allows no output",
    "structured_outputs.json: must have 1 to ",
)
