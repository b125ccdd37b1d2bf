from __future__ import annotations

import itertools

import pytest
from effort import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sample_tokenizers import CORPUS

from paged_backend.text.detokenizer import Detokenizer
from paged_backend.text.stop_strings import StopAutomaton
from paged_backend.text.text_stream import TextDelta, TextStream
from paged_backend.text.tokenizer import Tokenizer
from paged_backend.values.outputs import FinishReason
from paged_backend.values.sampling_params import MAX_STOP_STRINGS, SamplingParams

LENGTH, STOP, ABORT = FinishReason.LENGTH, FinishReason.STOP, FinishReason.ABORT


def whole(
    tokenizer: Tokenizer, token_ids: list[int], reason: FinishReason, params: SamplingParams
) -> TextDelta:
    """What the deltas of an answer must add up to, from its whole text."""
    hides_last = reason is STOP and not params.include_stop_str_in_output
    shown = token_ids[:-1] if hides_last else token_ids
    text = tokenizer.decode(shown, skip_special_tokens=params.skip_special_tokens)
    lengths = certain_lengths(tokenizer, shown, params) + [(len(token_ids), len(text))]
    for end in range(1, len(text) + 1):
        count = next(count for count, length in lengths if length >= end)
        found = [stop for stop in params.stop if text[:end].endswith(stop)]
        if found and count > params.min_tokens:
            cut = end if params.include_stop_str_in_output else end - max(map(len, found))
            return TextDelta(text[:cut], token_ids[:count], STOP)
    return TextDelta(text, token_ids, reason)


def certain_lengths(
    tokenizer: Tokenizer, token_ids: list[int], params: SamplingParams
) -> list[tuple[int, int]]:
    """Pairs of a number of tokens and of characters that are certain after them."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
    lengths = itertools.accumulate(len(detokenizer.append([id_])) for id_ in token_ids)
    return list(enumerate(lengths, 1))


def joined(deltas: list[TextDelta]) -> TextDelta:
    return TextDelta(
        "".join(delta.text for delta in deltas),
        [token_id for delta in deltas for token_id in delta.token_ids],
        deltas[-1].finish_reason,
    )


@st.composite
def answers(draw: st.DrawFn, tokenizer: Tokenizer) -> tuple[list[int], SamplingParams]:
    """Token ids, and stop strings of which most occur in their text or nearly do."""
    ids = st.integers(0, tokenizer.vocab_size - 1)
    lines = st.sampled_from(CORPUS).map(tokenizer.encode)
    token_ids = draw(st.one_of(st.lists(ids, max_size=20), lines))
    text = tokenizer.decode(token_ids) or "x"
    stops = []
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(text) - 1))
        stop = text[start : start + draw(st.integers(1, 6))]
        stops.append(stop + draw(st.sampled_from(["", "", "a", " "])))
    params = SamplingParams(
        stop=tuple(stops),
        max_tokens=None,
        min_tokens=draw(st.sampled_from([0, 0, 1, 3, 10])),
        include_stop_str_in_output=draw(st.booleans()),
        skip_special_tokens=draw(st.booleans()),
    )
    return token_ids, params


@settings(
    max_examples=examples(150),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data(), reason=st.sampled_from([LENGTH, STOP, ABORT]))
def test_deltas_add_up_to_the_whole_however_the_tokens_are_grouped(
    tokenizer: Tokenizer, data: st.DataObject, reason: FinishReason
) -> None:
    token_ids, params = data.draw(answers(tokenizer))
    stream = TextStream(tokenizer, params)
    deltas = []
    rest = token_ids
    while len(rest) > 1 and (size := data.draw(st.integers(0, len(rest) - 1))):
        deltas.append(stream.append(rest[:size], None))
        rest = rest[size:]
        if stream.stopped:
            break
    else:
        deltas.append(stream.append(rest, reason))
    expected = whole(tokenizer, token_ids, reason, params)
    assert joined(deltas) == expected
    if reason is not STOP:
        assert stream.stopped == (expected.finish_reason is STOP)


def run(
    tokenizer: Tokenizer, text: str, reason: FinishReason | None = LENGTH, **params: object
) -> list[str]:
    """The texts of the deltas when each character is a token."""
    stream = TextStream(tokenizer, SamplingParams.from_mapping({"max_tokens": 99, **params}))
    token_ids = [tokenizer.encode(character)[0] for character in text]
    reasons = [None] * (len(token_ids) - 1) + [reason]
    pairs = zip(token_ids, reasons, strict=True)
    return [stream.append([token_id], reason).text for token_id, reason in pairs]


def test_without_stop_strings_nothing_waits(byte_level: Tokenizer) -> None:
    assert run(byte_level, "abc", None) == ["a", "b", "c"]


def test_what_may_become_a_stop_string_waits_until_it_is_clear(byte_level: Tokenizer) -> None:
    assert run(byte_level, "xaabaac", stop=["aac"]) == ["x", "", "", "aab", "", "", ""]
    assert run(byte_level, "xaaba", stop=["aac"]) == ["x", "", "", "aab", "a"]


def test_a_kept_stop_string_need_not_wait(byte_level: Tokenizer) -> None:
    texts = run(byte_level, "xaac!", stop=["aac"], include_stop_str_in_output=True)
    assert texts == ["x", "a", "a", "c", ""]


def test_the_match_that_ends_first_wins_and_of_those_the_longest(byte_level: Tokenizer) -> None:
    assert "".join(run(byte_level, "uvwxyz", stop=["vwxy", "w"])) == "uv"
    assert "".join(run(byte_level, "uvwxyz", stop=["x", "vwx", "wx"])) == "u"


def test_a_stop_string_within_min_tokens_is_text(byte_level: Tokenizer) -> None:
    assert "".join(run(byte_level, "a.b.c.", stop=["."], min_tokens=2)) == "a.b"
    assert "".join(run(byte_level, "a.b", stop=["."], min_tokens=1)) == "a"


def test_a_match_begun_within_min_tokens_counts_if_it_ends_after(byte_level: Tokenizer) -> None:
    assert "".join(run(byte_level, "abcd", stop=["bc"], min_tokens=2)) == "a"


def test_tokens_after_the_match_are_dropped(byte_level: Tokenizer) -> None:
    stream = TextStream(byte_level, SamplingParams(stop=("b",)))
    a, b, c = (byte_level.encode(character)[0] for character in "abc")
    assert stream.append([a, b, c]) == TextDelta("a", [a, b], STOP)
    assert stream.stopped
    assert stream.append([c], LENGTH) == TextDelta("", [], STOP)


@pytest.mark.parametrize(("keep", "text"), [(False, "ab"), (True, "abc")])
def test_the_token_that_ended_the_sequence_is_no_text_unless_asked_for(
    byte_level: Tokenizer, keep: bool, text: str
) -> None:
    params = SamplingParams(include_stop_str_in_output=keep)
    token_ids = [byte_level.encode(character)[0] for character in "abc"]
    delta = TextStream(byte_level, params).append(token_ids, STOP)
    assert delta == TextDelta(text, token_ids, STOP)


def test_what_was_held_back_comes_with_the_end(byte_level: Tokenizer) -> None:
    stream = TextStream(byte_level, SamplingParams(stop=("abc",)))
    token_ids = [byte_level.encode(character)[0] for character in "ab"]
    assert stream.append(token_ids).text == ""
    assert stream.append([], ABORT) == TextDelta("ab", [], ABORT)


def test_text_that_nearly_matches_all_the_time_flows(byte_level: Tokenizer) -> None:
    stops = [("a" * 255 + chr(0x4E00 + n))[:256] for n in range(16)]
    stream = TextStream(byte_level, SamplingParams(stop=tuple(stops)))
    token_id = byte_level.encode("a")[0]
    deltas = [stream.append([token_id]) for _ in range(2000)]
    assert "".join(delta.text for delta in deltas) == "a" * (2000 - 255)


@settings(
    max_examples=examples(150),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data(), reason=st.sampled_from([LENGTH, STOP, ABORT]))
def test_a_stream_that_is_resumed_for_each_piece_says_the_same(
    tokenizer: Tokenizer, data: st.DataObject, reason: FinishReason
) -> None:
    token_ids, params = data.draw(answers(tokenizer))
    stream = TextStream(tokenizer, params)
    state = stream.state
    for count, token_id in enumerate(token_ids, 1):
        ends = reason if count == len(token_ids) else None
        once = TextStream.resume(tokenizer, params, stream.state)
        expected = stream.append([token_id], ends)
        assert once.append([token_id], ends) == expected
        each_time = TextStream.resume(tokenizer, params, state)
        assert each_time.append([token_id], ends) == expected
        state = each_time.state
        if stream.stopped:
            break


def test_the_state_of_a_stream_stays_small(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, SamplingParams(stop=("never there",), max_tokens=None))
    sizes = []
    for token_id in tokenizer.encode(" ".join(CORPUS) * 5):
        stream.append([token_id])
        sizes.append(len(stream.state.context_ids))
    assert max(sizes) < 40


def test_the_state_of_a_stream_whose_text_is_never_decided_stays_small(
    byte_level: Tokenizer,
) -> None:
    a, special = *byte_level.encode("a"), min(byte_level.special_token_ids)
    for stop, size in (("ab", 1), ("aaaab", 4)):
        stream = TextStream(byte_level, SamplingParams(stop=(stop,), max_tokens=None))
        for _ in range(100):
            stream.append([a, special])
            assert len(stream.state.context_ids) <= size
            assert stream.state.num_tokens % 2 == 0


@pytest.mark.parametrize("keep", [False, True])
def test_stop_strings_match_hidden_special_tokens(byte_level: Tokenizer, keep: bool) -> None:
    """If they should: as the only part, the last and the first."""
    special = min(byte_level.special_token_ids)
    name = byte_level.token(special)
    token_ids = [*byte_level.encode("abc"), special, *byte_level.encode("def")]

    def text(*stop: str, wanted: bool = True) -> str:
        params = SamplingParams(
            stop=stop, stop_special_tokens=wanted, include_stop_str_in_output=keep
        )
        stream = TextStream(byte_level, params)
        deltas = [stream.append([token_id]) for token_id in token_ids]
        assert stream.stop_string in ("", *stop)
        deltas.append(stream.append([], LENGTH))
        again, state = "", TextStream(byte_level, params).state
        for token_id in token_ids:
            resumed = TextStream.resume(byte_level, params, state)
            again += resumed.append([token_id]).text
            state = resumed.state
            if resumed.stopped:
                break
        else:
            again += TextStream.resume(byte_level, params, state).append([], LENGTH).text
        assert again == joined(deltas).text
        return again

    assert text(f"{name}", wanted=False) == "abcdef"
    assert text(f"{name}") == "abc"
    assert text(f"c{name}") == ("abc" if keep else "ab")
    assert text(f"bc{name}de") == ("abcde" if keep else "a")
    assert text("bcd", f"x{name}", f"{name}{name}") == "abcdef"


def test_bytes_before_a_special_token_that_stops_are_not_lost(byte_fallback: Tokenizer) -> None:
    special = min(byte_fallback.special_token_ids)
    params = SamplingParams(stop=(str(byte_fallback.token(special)),), stop_special_tokens=True)
    token_ids = byte_fallback.encode("a\N{MUSICAL SYMBOL G CLEF}", add_special_tokens=False)
    expected = byte_fallback.decode(token_ids)
    assert TextStream(byte_fallback, params).append([*token_ids, special]).text == expected


def test_most_and_longest_stop_strings_need_little_memory() -> None:
    stops = [chr(0x4E00 + number) + "a" * 255 for number in range(MAX_STOP_STRINGS)]
    assert StopAutomaton(stops).num_bytes <= 16 * (1 + 256 * 256)


@pytest.mark.parametrize("is_last", [True, False])
def test_a_stream_that_is_resumed_within_a_long_run_of_byte_tokens_says_the_same(
    byte_fallback: Tokenizer, is_last: bool
) -> None:
    """Also if a special token that may be part of a stop string comes within it."""
    special = min(byte_fallback.special_token_ids)
    name = byte_fallback.token(special)
    stops = (f"never{name}",) if is_last else (f"never{name}", f"{name}never")
    params = SamplingParams(stop=stops, stop_special_tokens=True, max_tokens=None)
    run = byte_fallback.encode("\N{MUSICAL SYMBOL G CLEF}" * 100, add_special_tokens=False)
    token_ids = [*run, special, *run, *byte_fallback.encode("the end", add_special_tokens=False)]
    stream = TextStream(byte_fallback, params)
    state = stream.state
    for token_id in token_ids:
        resumed = TextStream.resume(byte_fallback, params, state)
        assert resumed.append([token_id]) == stream.append([token_id])
        state = resumed.state
