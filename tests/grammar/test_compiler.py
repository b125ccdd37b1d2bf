"""Matchers that share a lexer, and a lexer that has no room for more states."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial

import pytest
from llguidance import LLMatcher

from paged_backend.checkpoint.bundled import MODEL_DIR
from paged_backend.core.compiling import CompilingRequest, CompilingRequests
from paged_backend.core.grammar import Grammar, SharedLexer
from paged_backend.grammar import limits
from paged_backend.grammar.build import build_grammar
from paged_backend.grammar.compiler import MAX_SHARED, LlguidanceCompiler
from paged_backend.grammar.fair_thread import FairThread
from paged_backend.grammar.matcher import MAX_FORCED_TOKENS, Matcher, compile_grammar
from paged_backend.grammar.vocabulary import load_vocabulary
from paged_backend.text.tokenizer import load_tokenizer
from paged_backend.values.errors import ConfigError
from paged_backend.values.output_constraint import OutputConstraint
from paged_backend.values.request import Request
from paged_backend.values.sampling_params import SamplingParams
from paged_backend.values.structured_outputs import StructuredOutputsParams

EOS, VOCAB_SIZE = 1, 2048
TOKENIZER = load_tokenizer(MODEL_DIR)
VOCABULARY = load_vocabulary(MODEL_DIR, VOCAB_SIZE, [EOS])


def grammar_of(**constraint: object) -> str:
    params = StructuredOutputsParams.of(constraint)
    return build_grammar(OutputConstraint(params), {})


MANY_STATES = grammar_of(regex="(.{0,40}a.{0,12}b)*")
"""Every hundred random tokens need about a thousand new states of the lexer."""


@pytest.fixture
def compiler() -> LlguidanceCompiler:
    return LlguidanceCompiler(MODEL_DIR, VOCAB_SIZE, [EOS])


def request(grammar: str, n: int = 1) -> Request:
    return Request("r", [5], SamplingParams(n=n), grammar=grammar)


def matcher(compiler: LlguidanceCompiler, grammar: str) -> Matcher:
    (found,) = compiler.start(request(grammar), ()).result().values()
    assert isinstance(found, Matcher)
    return found


def allowed(mask: bytes) -> list[int]:
    return [token for token in range(8 * len(mask)) if mask[token // 8] >> token % 8 & 1]


def recover(state: Matcher) -> None:
    """Do what the engine lets another thread do."""
    if state.is_stuck:
        for _ in state.recover():
            assert state.lexer.lock.acquire(blocking=False)
            state.lexer.lock.release()
    assert not state.is_stuck


def burn(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_a_tenant_waits_for_no_queue_of_another():
    thread = FairThread("grammars")
    begin = threading.Event()
    order: list[str] = []

    def job(name: str) -> Callable[[], None]:
        def work() -> None:
            order.append(name)
            burn(0.02)

        return work

    thread.submit("mallory", begin.wait)
    futures = [thread.submit("mallory", job(f"m{number}")) for number in range(6)]
    futures += [thread.submit("alice", job(f"a{number}")) for number in range(3)]
    assert futures[2].cancel()
    begin.set()
    wait([*futures[:2], *futures[3:]])
    assert sorted(order[:6]) == ["a0", "a1", "a2", "m0", "m1", "m3"]
    assert [name for name in order if name[0] == "m"] == ["m0", "m1", "m3", "m4", "m5"]


def test_a_tenant_that_was_away_has_saved_up_no_time():
    thread = FairThread("grammars")
    thread.submit("alice", lambda: None).result()
    thread.submit("mallory", lambda: burn(0.2)).result()
    thread.submit("mallory", lambda: None).result()
    order: list[str] = []
    begin = threading.Event()

    def job(name: str) -> None:
        order.append(name)
        burn(0.02)

    thread.submit("carol", begin.wait)
    names = ["alice"] * 3 + ["mallory"] * 3
    futures = [thread.submit(name, partial(job, name)) for name in names]
    begin.set()
    wait(futures)
    assert "mallory" in order[:2]


def test_a_request_that_is_ready_need_not_wait_for_the_first_one():
    waiting = CompilingRequests()
    slow: Future[Mapping[int, Grammar]] = Future()
    ready: Future[Mapping[int, Grammar]] = Future()
    for name, future in (("slow", slow), ("ready", ready)):
        one = Request(name, [5], SamplingParams(), grammar="x")
        waiting.add(CompilingRequest(one, (), future))
    assert list(waiting.take_ready(wait=True)) == []  # after a moment: messages may have arrived
    threading.Timer(0.1, ready.set_result, [{}]).start()
    found: list[str] = []
    deadline = time.monotonic() + 60
    while not found and time.monotonic() < deadline:
        found = [one.request.request_id for one in waiting.take_ready(wait=True)]
    assert found == ["ready"]


def test_completions_that_fill_a_lexer_together_go_on_with_another(compiler, monkeypatch):
    """Their masks, with drafts and without, are those of a matcher of their own."""
    renewed: list[str] = []
    renew = LlguidanceCompiler._renew

    def counted(
        self: LlguidanceCompiler, grammar: str, more_items: bool
    ) -> tuple[LLMatcher, SharedLexer]:
        renewed.append(grammar)
        return renew(self, grammar, more_items)

    monkeypatch.setattr(LlguidanceCompiler, "_renew", counted)
    rng = random.Random(0)
    for _ in range(4):
        several = [matcher(compiler, MANY_STATES) for _ in range(4)]
        alone = [
            Matcher(compile_grammar(VOCABULARY, MANY_STATES), (EOS,)) for _ in range(len(several))
        ]
        for _ in range(80):
            for state, other in zip(several, alone, strict=True):
                expected = other.mask()
                drafts = [rng.choice(allowed(expected)) for _ in range(2)]
                masks = state.masks_along(drafts)
                if state.is_stuck:
                    recover(state)
                    masks = state.masks_along(drafts)
                    recover(state)  # the drafts may fill the new lexer
                assert masks == other.masks_along(drafts)[: len(masks)]
                assert state.mask() == expected
                token = rng.choice([token for token in allowed(expected) if token != EOS])
                assert state.accept([token]) and other.accept([token])
                recover(state)
                assert state.forced_token_ids() == other.forced_token_ids()
    assert renewed


def test_a_grammar_that_needs_too_many_states_alone_allows_no_token(compiler, monkeypatch):
    monkeypatch.setattr(limits, "FEW_LEXER_STATES", 2_500)
    monkeypatch.setattr(limits, "LEXER_STATES", 2_500)
    state = matcher(compiler, MANY_STATES)
    rng = random.Random(0)
    while any(mask := state.mask()) or state.is_stuck:
        if state.is_stuck:
            recover(state)
        else:
            assert state.accept([rng.choice([token for token in allowed(mask) if token != EOS])])
    assert state.problem
    assert not state.accept([40]) and state.forced_token_ids() == []


def test_a_step_that_needs_more_items_goes_on_aside(compiler):
    """The masks are those of a matcher with room for all of them."""
    grammar = grammar_of(grammar='start: s\ns: s s | s s s | s s s s | "a" | "b" | ""')
    state = matcher(compiler, grammar)
    other = Matcher(compile_grammar(VOCABULARY, grammar), (EOS,))
    token = TOKENIZER.encode("a", add_special_tokens=False)
    for _ in range(45):
        mask = state.mask()
        if state.is_stuck:
            recover(state)
            mask = state.mask()
        assert mask == other.mask() and any(mask)
        assert state.accept(token) and other.accept(token)
    assert state.lexer.is_always_aside
    assert not matcher(compiler, grammar).lexer.is_always_aside  # the next request's


def test_a_grammar_whose_first_step_needs_more_items_is_always_aside(compiler):
    rules = 'x: "a" | "b" | x x'
    state = matcher(compiler, grammar_of(grammar=f"start: {'x? ' * 300}\n{rules}"))
    assert any(state.mask()) and state.lexer.is_always_aside and state.lexer.num_aside > 0
    state.lexer.note(0.0)
    assert state.lexer.num_aside > 0


def test_long_forced_text_is_appended_in_pieces(compiler):
    text = "the same again " * 200
    state = matcher(compiler, grammar_of(choice=[text + "x"]))
    token_ids: list[int] = []
    while forced := state.forced_token_ids():
        assert len(forced) <= MAX_FORCED_TOKENS and state.allows(forced[0]) == (forced != [EOS])
        if forced == [EOS]:
            break
        assert state.accept(forced)
        token_ids += forced
    assert TOKENIZER.decode(token_ids) == text + "x"
    assert len(token_ids) > MAX_FORCED_TOKENS


def test_a_token_that_is_not_allowed_is_refused_once_and_for_all(compiler):
    state = matcher(compiler, grammar_of(choice=["abc"]))
    assert not state.accept([VOCAB_SIZE - 1])
    assert not state.accept([VOCAB_SIZE - 1])


def test_a_known_grammar_is_ready_at_once(compiler):
    first = compiler.start(request(MANY_STATES, n=2), ())
    assert set(first.result()) == {0, 1}
    again = compiler.start(request(MANY_STATES, n=2), ())
    assert again.done()
    states = [*first.result().values(), *again.result().values()]
    assert len({id(state) for state in states}) == 4
    before = states[0].masks_along([])
    assert states[3].accept([40])
    assert [state.masks_along([]) for state in states[:3]] == [before] * 3


def test_grammars_that_were_not_used_for_long_are_forgotten(compiler):
    others = [grammar_of(choice=[str(number)]) for number in range(MAX_SHARED)]
    for grammar in (MANY_STATES, *others[:-1], MANY_STATES, others[-1]):
        compiler.start(request(grammar), ()).result()
    assert compiler.start(request(MANY_STATES), ()).done()
    assert compiler._shared.get(("", others[0])) is None


def test_requests_with_other_salts_share_no_matcher(compiler):
    """Or a tenant learns from the time of an answer what another one asks for."""
    compiler.start(replace(request(MANY_STATES), cache_salt="alice"), ()).result()
    over = threading.Event()
    compiler._thread.submit("", over.wait)  # so that what must be compiled is not done
    try:
        again, *others = (
            compiler.start(replace(request(MANY_STATES), cache_salt=salt), ())
            for salt in ("alice", "bob", "")
        )
        assert again.done() and not any(other.done() for other in others)
    finally:
        over.set()


def test_the_vocabulary_can_be_loaded_before_the_first_grammar(compiler, tmp_path):
    compiler.load()
    assert compiler._loaded is not None
    with pytest.raises(ConfigError):
        LlguidanceCompiler(tmp_path, VOCAB_SIZE, [EOS]).load()
