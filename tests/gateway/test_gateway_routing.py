"""The choice of a server, without servers."""

from __future__ import annotations

import time
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paged_client.routing import (
    MAX_PIECES,
    PIECE_CHARACTERS,
    PIECE_TOKENS,
    SLACK,
    PrefixRouter,
    prefix_hashes,
)

SERVERS = ("a", "b", "c")
IDLE = dict.fromkeys(SERVERS, 0)


def hashes(prompt, model="m", salt=""):
    return prefix_hashes(model, salt, prompt)


def chat(*texts, **options):
    messages = [{"role": "user", "content": text} for text in texts]
    return {"messages": messages, **options}


@given(
    st.integers(0, 3 * PIECE_CHARACTERS),
    st.text(max_size=2 * PIECE_CHARACTERS),
    st.text(max_size=2 * PIECE_CHARACTERS),
)
def test_texts_share_the_hashes_of_their_common_whole_pieces(length, one, other):
    begin = "x" * length
    shared = [a == b for a, b in zip(hashes(begin + one), hashes(begin + other), strict=False)]
    assert all(shared[: length // PIECE_CHARACTERS])
    assert shared == sorted(shared, reverse=True)  # once apart, apart for good
    assert len(hashes(begin + one)) == len(begin + one) // PIECE_CHARACTERS


def test_ids_are_cut_into_blocks():
    ids = array("i", range(100))
    assert len(hashes(ids)) == 100 // PIECE_TOKENS
    assert hashes(ids)[:3] == hashes(ids[: 3 * PIECE_TOKENS] + array("i", [7] * 50))[:3]
    assert hashes(array("i", range(1, 101)))[0] != hashes(ids)[0]


def test_the_next_turn_of_a_conversation_begins_like_the_last():
    first = chat("a" * 300)
    second = chat("a" * 300, "b" * 300)
    assert hashes(second)[: len(hashes(first))] == hashes(first)


def test_what_is_cached_apart_is_hashed_apart():
    prompt = "x" * 2 * PIECE_CHARACTERS
    other_kinds = [
        hashes(prompt, model="other"),
        hashes(prompt, salt="s"),
        hashes(chat(prompt)),
        hashes(chat(prompt, chat_template_kwargs={"thinking": True})),
    ]
    found = [kind[0] for kind in [hashes(prompt), *other_kinds]]
    assert len(set(found)) == len(found)


def test_long_prompts_are_hashed_in_part():
    assert len(hashes("x" * 10**6)) == MAX_PIECES
    assert len(hashes(array("i", [1]) * 10**6)) == MAX_PIECES
    assert hashes("\ud800" * PIECE_CHARACTERS)  # what is no Unicode is refused elsewhere


DEEP: list[object] = [0] * 2**16
for _ in range(30):
    DEEP = [DEEP]
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "x" * 10**6}}


@pytest.mark.parametrize(
    "prompt",
    [
        chat("x", chat_template_kwargs={"a": "é" * 10**6}),
        chat("x", chat_template_kwargs={"é" * 10**6: 1}),
        chat("x", chat_template_kwargs={"a": DEEP}),
        chat("x", documents=[{"text": "x" * 1000}] * 1024),
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [CALL] * 9}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 2**16}]},
    ],
    ids=["a text", "a name", "a deep list", "documents", "calls", "parts"],
)
def test_no_client_chooses_how_long_hashing_takes(prompt):
    """It is done on the event loop, so that all requests wait."""
    used = []
    for _ in range(3):
        start = time.thread_time()
        hashes(prompt)
        used.append(time.thread_time() - start)
    assert min(used) < 0.01


@pytest.mark.parametrize(
    ("one", "other"),
    [([[1], 2], [1, [], 2]), ([[1], 2], [[1, 2]]), ({"a": []}, {"a": {}}), ("1", 1), (1, True)],
)
def test_other_options_are_hashed_apart(one, other):
    text = "x" * PIECE_CHARACTERS
    first = hashes(chat(text, chat_template_kwargs={"a": one}))
    assert first[0] != hashes(chat(text, chat_template_kwargs={"a": other}))[0]


def test_new_prompts_go_to_the_idlest_in_turn():
    router = PrefixRouter()
    assert {router.choose(hashes(str(n) * 100), IDLE).server for n in range(3)} == set(SERVERS)
    assert router.choose([], {"a": 5, "b": 1, "c": 3}) == ("b", False)


def test_a_repeated_beginning_goes_where_it_was():
    router = PrefixRouter()
    prompts = [str(n) * 200 for n in range(6)]
    first = [router.choose(hashes(prompt), IDLE).server for prompt in prompts]
    again = [router.choose(hashes(prompt + "more" * 40), IDLE) for prompt in prompts]
    assert again == [(server, True) for server in first]


def test_the_longest_beginning_counts():
    router = PrefixRouter()
    short, long = hashes("x" * 70), hashes("x" * 70 + "y" * 130)
    router.choose(short, {"a": 0})
    router.choose(long, {"b": 0})
    assert router.choose(hashes("x" * 70 + "z" * 130), IDLE).server == "b"  # the last with it
    router.choose(short, {"a": 0})
    assert router.choose(long, IDLE).server == "b"


@pytest.mark.parametrize(("load", "stays"), [(SLACK, True), (SLACK + 1, False)])
def test_a_server_that_is_much_busier_is_left(load, stays):
    router = PrefixRouter()
    piece = hashes("x" * 100)
    router.choose(piece, {"a": 0})
    assert router.choose(piece, {"a": load, "b": 0}) == (("a", True) if stays else ("b", False))
    # From then on the other one has the blocks, too.
    assert router.choose(piece, {"a": 0, "b": 0}).server == ("a" if stays else "b")


def test_a_server_that_is_not_there_is_not_chosen_for_what_it_has():
    router = PrefixRouter()
    piece = hashes("x" * 100)
    router.choose(piece, {"a": 0})
    assert router.choose(piece, {"b": 9}) == ("b", False)


Requests = st.lists(
    st.tuples(
        st.text("ab", max_size=4),
        st.dictionaries(st.sampled_from(SERVERS), st.integers(0, 40), min_size=1),
    ),
    max_size=40,
)


@given(Requests, st.integers(1, 8))
def test_any_history_of_choices_keeps_the_rules(requests, capacity):
    router = PrefixRouter(capacity)
    for letters, loads in requests:
        pieces = hashes("".join(letter * PIECE_CHARACTERS for letter in letters))
        remembered = dict(router._servers)
        server, by_prefix = router.choose(pieces, loads)
        least = min(loads.values())
        assert server in loads
        if by_prefix:
            assert server in {remembered.get(piece) for piece in pieces}
            assert loads[server] <= 1.5 * least + SLACK
        else:
            assert loads[server] == least
        assert len(router._servers) <= capacity
        if pieces:
            assert router._servers[pieces[0]] == server
