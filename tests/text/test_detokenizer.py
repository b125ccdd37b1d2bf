from __future__ import annotations

from collections.abc import Sequence

import pytest
from effort import examples
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sample_tokenizers import CORPUS, KINDS
from tokenizers import Tokenizer as Backend
from tokenizers import decoders

from paged_backend.text.detokenizer import Detokenizer
from paged_backend.text.tokenizer import Tokenizer

# The fixtures hand out immutable tokenizers, so one may serve all examples.
examples = settings(
    max_examples=examples(200),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def pieces_of(tokenizer: Tokenizer, token_ids: list[int], skip: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    pieces = [detokenizer.append([token_id]) for token_id in token_ids]
    return [*pieces, detokenizer.finish()]


def spell(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    ids = {tokenizer.token(id_): id_ for id_ in range(tokenizer.vocab_size)}
    return [ids[token] for token in tokens]


@examples
@given(data=st.data(), skip=st.booleans())
def test_joined_pieces_are_the_decode_of_any_ids(
    tokenizer: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    ids = st.integers(0, tokenizer.vocab_size + 3)  # a few beyond the vocabulary
    token_ids = data.draw(st.lists(ids, max_size=40))
    expected = tokenizer.decode(token_ids, skip_special_tokens=skip)
    assert "".join(pieces_of(tokenizer, token_ids, skip)) == expected


@examples
@given(text=st.text(max_size=30), skip=st.booleans())
@example(text="👩‍👩‍👧 and 日本 in one", skip=True)
def test_joined_pieces_are_the_decode_of_text(tokenizer: Tokenizer, text: str, skip: bool) -> None:
    token_ids = tokenizer.encode(text)
    expected = tokenizer.decode(token_ids, skip_special_tokens=skip)
    assert "".join(pieces_of(tokenizer, token_ids, skip)) == expected


@examples
@given(data=st.data())
def test_joined_pieces_are_the_decode_of_byte_runs(
    byte_fallback: Tokenizer, data: st.DataObject
) -> None:
    some = ["<0xE2>", "<0x82>", "<0xAC>", "<0xFF>", "<0x41>", "a", "▁", "�", "", "</s>"]
    token_ids = spell(byte_fallback, *data.draw(st.lists(st.sampled_from(some), max_size=12)))
    assert "".join(pieces_of(byte_fallback, token_ids, True)) == byte_fallback.decode(token_ids)


@examples
@given(data=st.data())
def test_joined_pieces_are_the_decode_of_broken_utf8(
    byte_level: Tokenizer, data: st.DataObject
) -> None:
    some = spell(byte_level, *"âĤ¬ÿíłðŁĺĢĠa", "<tool call>", "</s>")
    token_ids = data.draw(st.lists(st.sampled_from(some), max_size=12))
    assert "".join(pieces_of(byte_level, token_ids, True)) == byte_level.decode(token_ids)


@pytest.mark.parametrize("line", CORPUS)
def test_no_piece_shows_half_a_character(tokenizer: Tokenizer, line: str) -> None:
    token_ids = tokenizer.encode(line)
    assert "�" not in "".join(pieces_of(tokenizer, token_ids, True))


def test_a_character_comes_with_its_last_byte(byte_level: Tokenizer) -> None:
    euro_then_a = spell(byte_level, "â", "Ĥ", "¬", "a")
    assert pieces_of(byte_level, euro_then_a, True) == ["", "", "€", "a", ""]


def test_bytes_that_never_become_a_character_are_shown_as_soon_as_that_is_certain(
    byte_level: Tokenizer,
) -> None:
    assert pieces_of(byte_level, spell(byte_level, "ÿ", "â", "a"), True) == ["�", "", "�a", ""]
    assert pieces_of(byte_level, spell(byte_level, "â", "Ĥ"), True) == ["", "", "�"]


def test_a_run_of_byte_tokens_waits_for_its_end_because_one_bad_byte_spoils_it(
    byte_fallback: Tokenizer,
) -> None:
    good = spell(byte_fallback, "<0xE2>", "<0x82>", "<0xAC>", "a")
    assert pieces_of(byte_fallback, good, True) == ["", "", "", "€a", ""]
    bad = spell(byte_fallback, "<0xE2>", "<0x82>", "<0xAC>", "<0xFF>")
    assert pieces_of(byte_fallback, bad, True) == ["", "", "", "", "����"]


def test_words_come_at_once(byte_fallback: Tokenizer) -> None:
    words = spell(byte_fallback, "▁the", "▁an", "</s>", "▁the")
    assert pieces_of(byte_fallback, words, True) == ["the", " an", "", " the", ""]


def test_a_long_run_of_byte_tokens_comes_in_parts(byte_fallback: Tokenizer) -> None:
    for text in ("a" + "\N{EURO SIGN}" * 1000, "\N{MUSICAL SYMBOL G CLEF}" * 200):
        tokens = [f"<0x{byte:02X}>" for byte in text.encode()]
        pieces = pieces_of(byte_fallback, spell(byte_fallback, *tokens, "▁the"), True)
        assert "".join(pieces) == text + " the"
        assert max(map(len, pieces)) <= 257


def test_one_bad_byte_spoils_a_run_up_to_a_length_and_then_only_its_part(
    byte_fallback: Tokenizer,
) -> None:
    run = ["<0xFF>", *["<0x41>"] * 255]
    assert pieces_of(byte_fallback, spell(byte_fallback, *run), True)[-1] == "�" * 256
    pieces = pieces_of(byte_fallback, spell(byte_fallback, *run, *["<0x41>"] * 256), True)
    assert "".join(pieces) == "�" * 257 + "A" * 255


def byte_level_and_more(*others: decoders.Decoder) -> Backend:
    """A byte-level tokenizer whose decoder has other steps too."""
    tokenizer = KINDS["byte_level"]()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), *others])
    return tokenizer


@examples
@given(data=st.data())
def test_joined_pieces_are_the_decode_of_broken_utf8_with_several_decoders(
    data: st.DataObject,
) -> None:
    tokenizer = Tokenizer(byte_level_and_more(decoders.Fuse()))
    some = spell(tokenizer, *"âĤ¬ÿíłðŁĺĢĠaï¿½", "<tool call>", "</s>")
    token_ids = data.draw(st.lists(st.sampled_from(some), max_size=60))
    assert "".join(pieces_of(tokenizer, token_ids, True)) == tokenizer.decode(token_ids)


class Counting(Tokenizer):
    num_decoded = 0

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self.num_decoded += len(token_ids)
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_no_token_is_decoded_more_than_a_few_times(kind: str) -> None:
    tokenizer = Counting(KINDS[kind]())
    token_ids = tokenizer.encode(" ".join(CORPUS)) * 20
    Detokenizer(tokenizer).append(token_ids)
    assert tokenizer.num_decoded <= 5 * len(token_ids)


def test_the_cost_of_a_token_does_not_grow_while_no_text_comes() -> None:
    tokenizer = Counting(byte_level_and_more(decoders.Fuse()))
    for token, most in (("ÿ", 40), ("â", 40)):
        (token_id,) = spell(tokenizer, token)
        assert tokenizer.some_word_id
        tokenizer.num_decoded = 0
        detokenizer = Detokenizer(tokenizer)
        for _ in range(2000):
            detokenizer.append([token_id])
            assert len(detokenizer.context_ids) <= 40
        assert tokenizer.num_decoded <= most * 2000


def test_a_run_of_byte_tokens_keeps_few(byte_fallback: Tokenizer) -> None:
    detokenizer = Detokenizer(byte_fallback)
    for token_id in spell(byte_fallback, "<0xE2>", "<0x82>", "<0xAC>", "<0xFF>") * 500:
        detokenizer.append([token_id])
        assert len(detokenizer.context_ids) <= 2 * 257
