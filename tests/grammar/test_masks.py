"""Masks against decisions made token by token, and against another library's partial matches."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import regex
from effort import ALL

from paged_backend.checkpoint.bundled import MODEL_DIR
from paged_backend.grammar import limits
from paged_backend.grammar.build import build_grammar
from paged_backend.grammar.matcher import Matcher, compile_grammar
from paged_backend.grammar.vocabulary import load_vocabulary
from paged_backend.text.tokenizer import load_tokenizer
from paged_backend.values.output_constraint import OutputConstraint
from paged_backend.values.structured_outputs import StructuredOutputsParams

VOCAB_SIZE = 2100  # more than the tokenizer has, as in models with a padded vocabulary
EOS = 1
TOKENIZER = load_tokenizer(MODEL_DIR)
VOCABULARY = load_vocabulary(MODEL_DIR, VOCAB_SIZE, [EOS])
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bc", None, 1.5]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
CONSTRAINTS = {
    "json": {"json": PERSON},
    "json_object": {"json_object": True},
    "regex": {"regex": r"[a-c]{2,5}(-[0-9]+)?"},
    "choice": {"choice": ["yes", "yesterday", "no", "naïve", "two\nlines", 'a "quote"']},
    "gbnf": {"grammar": 'root ::= item ("," item)*\nitem ::= [a-z]+ "=" [0-9]+'},
    "lark": {"grammar": 'start: "<" /[a-z]+/ ">" start? "</>"'},
}


def matcher(constraint: dict[str, object], **options: object) -> Matcher:
    grammar = build_grammar(OutputConstraint(StructuredOutputsParams.of(constraint)), {})
    return Matcher(compile_grammar(VOCABULARY, grammar), (EOS,), **options)


def allowed(mask: bytes) -> set[int]:
    return {token for token in range(8 * len(mask)) if mask[token // 8] >> token % 8 & 1}


def walk(start: Matcher, rng: random.Random, length: int) -> Iterator[tuple[Matcher, list[int]]]:
    """Follow random allowed tokens; yields the state before each of them."""
    state, token_ids = start.copy(), []
    for _ in range(length):
        yield state, token_ids
        token = rng.choice(sorted(allowed(state.mask())))
        if token == EOS:
            return
        assert state.accept([token])
        token_ids = [*token_ids, token]


@pytest.mark.parametrize("kind", CONSTRAINTS)
def test_each_bit_is_the_decision_about_its_token(kind):
    """Where the text is forced, only its canonical tokenization is allowed."""
    rng = random.Random(kind)
    start = matcher(CONSTRAINTS[kind])
    for _ in range(2):
        for state, _ in walk(start, rng, 8):
            forced = set(state.forced_token_ids()[:1])
            tokens = forced | {EOS, *rng.sample(range(VOCAB_SIZE), 400 if ALL else 120)}
            decided = {token for token in tokens if state.copy().accept([token])}
            assert forced <= decided
            assert state.mask() == state.copy().mask()  # which does not know the forced text
            mask = allowed(state.mask()) & tokens
            assert mask == (forced or decided)
            assert {token for token in tokens if state.allows(token)} == mask - {EOS}


@pytest.mark.parametrize("kind", ["regex"])
def test_masks_agree_with_another_library(kind):
    """A token is allowed if the text with it is the beginning of a match."""
    rng = random.Random(kind)
    pattern = regex.compile(CONSTRAINTS[kind]["regex"])
    texts = {token: TOKENIZER.decode([token]) for token in range(TOKENIZER.vocab_size)}
    plain = [t for t in texts if texts[t].isascii() and t not in TOKENIZER.special_token_ids]
    start = matcher(CONSTRAINTS[kind])
    for _ in range(10):
        for state, token_ids in walk(start, rng, 12):
            text = "".join(texts[token] for token in token_ids)
            mask = allowed(state.mask())
            if state.forced_token_ids():
                continue
            for token in plain:
                matches = pattern.fullmatch(text + texts[token], partial=True) is not None
                assert (token in mask) == matches, (text, texts[token])
            assert (EOS in mask) == (pattern.fullmatch(text) is not None)


def test_tokens_beyond_the_tokenizer_are_never_allowed():
    state = matcher({"regex": "(.|\n)*"})
    assert max(allowed(state.mask())) < TOKENIZER.vocab_size


def test_where_an_output_may_end():
    regular = {"regex": "(ab)+"}
    token_ids = TOKENIZER.encode("ab", add_special_tokens=False)
    default, ignoring, stopping = (
        matcher(regular),
        matcher(regular, ignore_eos=True),
        matcher(regular, stop_token_ids=(7, 2099)),
    )
    for state in (default, ignoring, stopping):
        assert EOS not in allowed(state.mask()) and 7 not in allowed(state.mask())
        assert state.accept(token_ids)
        assert state.may_end and not state.is_finished
    assert EOS in allowed(default.mask())
    assert EOS not in allowed(ignoring.mask())
    assert {EOS, 7, 2099} <= allowed(stopping.mask())
    assert not any(stopping.allows(token) for token in (EOS, 7, 2099))
    finished = matcher({"choice": ["ab"]}, ignore_eos=True)
    assert finished.accept(token_ids) and finished.is_finished
    assert allowed(finished.mask()) == {EOS}
    assert finished.forced_token_ids() == [EOS]
    assert not finished.allows(EOS) and not finished.allows(token_ids[0])


def test_masks_along_drafts_leave_the_state_as_it_was():
    state = matcher({"choice": ["yes", "yesterday"]})
    right = TOKENIZER.encode("yesterday", add_special_tokens=False)
    wrong = TOKENIZER.encode("no", add_special_tokens=False)
    before = state.mask()
    masks = state.masks_along([*right, EOS])
    assert masks[0] == before == state.mask()
    assert len(masks) >= len(right) + 1
    other = state.copy()
    for token, mask in zip(right, masks, strict=False):
        assert other.mask() == mask
        assert other.accept([token])
    assert state.masks_along(wrong) == [before]
    assert state.mask() == before


@pytest.mark.parametrize("kind", CONSTRAINTS)
def test_forced_tokens_are_the_only_ones_allowed(kind):
    """And they are the canonical tokenization: the tokens of the text are the same again."""
    rng = random.Random(kind)
    start, num_forced = matcher(CONSTRAINTS[kind]), 0
    for _ in range(5):
        for state, _ in walk(start, rng, 12):
            forced, follower = state.forced_token_ids(), state.copy()
            for token in forced:
                assert follower.accept([token])
            text = TOKENIZER.decode(forced, skip_special_tokens=False)
            if text.isascii() and forced != [EOS]:
                assert TOKENIZER.encode(text, add_special_tokens=False) == forced
            num_forced += len(forced)
    assert num_forced > 0 or kind in ("json_object", "gbnf", "regex")


@pytest.mark.parametrize(
    "constraint",
    [{"json": {"$ref": "#"}}, {"regex": "["}, {"grammar": "start: missing"}, {"json": False}],
)
def test_constraints_without_an_output_are_refused(constraint):
    with pytest.raises(ValueError):
        matcher(constraint)


def test_a_grammar_that_fails_allows_no_token(monkeypatch):
    """Not even one that ends the output, which would seem to be complete."""
    monkeypatch.setattr(limits, "STEP_LEXER_FUEL", 50_000)
    state = matcher({"json": {"type": "object", "patternProperties": {"^.{1,255}$": {}}}})
    for token in TOKENIZER.encode('{"a', add_special_tokens=False):
        state.accept([token])
        mask = state.mask()
    assert not any(mask)
    assert not any(map(state.allows, range(VOCAB_SIZE)))
    assert state.forced_token_ids() == []
    assert not state.may_end
