"""Compiles the grammars of requests on a separate thread."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from paged_backend.core.grammar import Grammar, SharedLexer
from paged_backend.grammar.fair_thread import FairThread
from paged_backend.values.request import Request

if TYPE_CHECKING:  # imported with the vocabulary
    from llguidance import LLMatcher, LLTokenizer

MAX_SHARED = 32  # grammars with a matcher that is kept for later requests

Key = tuple[str, ...]
"""What requests that share a matcher have in common; the grammar is the last part."""


class LlguidanceCompiler:
    """Makes the matchers of one model's requests.

    Requests with the same grammar share a compiled matcher and its lexer. Most of the time for a
    mask goes into new states of the lexer. Requests with different salts share nothing: the time of
    a mask would tell one tenant what another one asks for.

    Args:
        tokenizer: folder or Hugging Face id.
        vocab_size: size of the model's vocabulary.
        eos_token_ids: end-of-sequence tokens of the model; the first one ends an output that
            nothing may follow.
    """

    def __init__(
        self, tokenizer: str | Path, vocab_size: int, eos_token_ids: Iterable[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._loaded: LLTokenizer | None = None
        self._thread = FairThread("grammars")
        self._shared = _SharedMatchers()

    def load(self) -> None:
        """Load the vocabulary now instead of with the first grammar.

        No other thread runs meanwhile, for about a second with 131,072 tokens.

        Raises:
            ConfigError: the tokenizer cannot be used for grammars.
        """
        self._vocabulary()

    def _vocabulary(self) -> LLTokenizer:
        from paged_backend.grammar.vocabulary import load_vocabulary

        if self._loaded is None:
            self._loaded = load_vocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids)
        return self._loaded

    def start(
        self, request: Request, progress: Collection[Collection[int] | None]
    ) -> Future[Mapping[int, Grammar]]:
        """Start to compile a request's grammar; a new request with a known grammar is ready.

        Args:
            request: a request with a grammar.
            progress: the tokens of each completion so far, None for one that has ended.

        Returns:
            A future of the matchers of the unfinished completions at the start of the output, by
            their index. It raises GrammarError if the grammar cannot be compiled.
        """
        shared = None if progress else self._shared.get(_key(request))
        if shared is None:
            return self._thread.submit(request.tenant, partial(self._compile, request, progress))
        ready: Future[Mapping[int, Grammar]] = Future()
        ready.set_result(self._matchers(shared, request, progress))
        return ready

    def _compile(
        self, request: Request, progress: Collection[Collection[int] | None]
    ) -> Mapping[int, Grammar]:
        return self._matchers(self._shared_matcher(_key(request)), request, progress)

    def _matchers(
        self,
        shared: _Shared,
        request: Request,
        progress: Collection[Collection[int] | None],
    ) -> Mapping[int, Grammar]:
        from paged_backend.grammar.matcher import Matcher

        params = request.params
        first = Matcher(
            shared.matcher,
            self._eos_token_ids,
            params.stop_token_ids,
            ignore_eos=params.ignore_eos,
            renew=partial(self._renew, _key(request)),
            lexer=shared.lexer,
        )
        return {
            index: first.copy()
            for index, token_ids in enumerate(progress or [()] * params.n)
            if token_ids is not None
        }

    def _shared_matcher(self, key: Key) -> _Shared:
        """Return the shared matcher of a grammar, at the start of the output."""
        from paged_backend.grammar.matcher import GrammarError

        shared = self._shared.get(key) or self._shared.get(key, True)
        if shared is not None:
            return shared
        for few_states in (True, False):
            with contextlib.suppress(GrammarError):  # its beginning may need more
                return self._share(key, few_states=few_states)
        return self._share(key, more_items=True)

    def _share(self, key: Key, *, few_states: bool = False, more_items: bool = False) -> _Shared:
        """Compile a grammar, and keep its matcher for later requests."""
        from paged_backend.grammar.limits import parser_limits
        from paged_backend.grammar.matcher import compile_grammar

        limits = parser_limits(few_states=few_states, few_items=not more_items)
        matcher = compile_grammar(self._vocabulary(), key[-1], limits)
        return self._shared.add(key, more_items, matcher)

    def _renew(self, key: Key, more_items: bool) -> tuple[LLMatcher, SharedLexer]:
        """Return a matcher with a lexer that is not full, and the lexer; any thread may call this.

        Args:
            key: key of the grammar.
            more_items: whether it needs more items than the engine's thread may work on.
        """
        if more_items:
            shared = self._shared.get(key, True) or self._share(key, more_items=True)
        else:
            shared = self._shared_matcher(key)
        copy = shared.matcher.deep_copy()
        with shared.lexer.lock:
            copy.compute_bitmask()
        if copy.is_error():
            shared = self._share(key, more_items=more_items)
            copy = shared.matcher.deep_copy()
        return copy, shared.lexer


class _Shared(NamedTuple):
    """A matcher that is copied and never moves, and the lexer of its copies."""

    matcher: LLMatcher
    lexer: SharedLexer


class _SharedMatchers:
    """The matchers of the grammars that were used last; any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_key: OrderedDict[tuple[Key, bool], _Shared] = OrderedDict()

    def get(self, key: Key, more_items: bool = False) -> _Shared | None:
        with self._lock:
            shared = self._by_key.get((key, more_items))
            if shared is not None:
                self._by_key.move_to_end((key, more_items))
            return shared

    def add(self, key: Key, more_items: bool, matcher: LLMatcher) -> _Shared:
        shared = _Shared(matcher, SharedLexer(always_aside=more_items))
        with self._lock:
            self._by_key[key, more_items] = shared
            if len(self._by_key) > MAX_SHARED:
                self._by_key.popitem(last=False)
        return shared


def _key(request: Request) -> Key:
    return (*request.cache_keys, request.grammar)
