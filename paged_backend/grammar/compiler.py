"""Compiles the grammars of requests on a separate thread."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from paged_backend.core.grammar import Grammar
from paged_backend.request import Request

if TYPE_CHECKING:  # loaded with the first grammar, as most deployments need none
    from llguidance import LLTokenizer


class GrammarCompiler:
    """Makes the matchers of one model's requests.

    The vocabulary is loaded when the first grammar is compiled.

    Args:
        tokenizer: folder or Hugging Face id.
        vocab_size: of the model.
        eos_token_ids: of the model; the first one ends an output that nothing may follow.
    """

    def __init__(
        self, tokenizer: str | Path, vocab_size: int, eos_token_ids: Iterable[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._thread = ThreadPoolExecutor(1, "grammars")

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        from paged_backend.grammar.vocabulary import load_vocabulary

        return load_vocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids)

    def start(
        self, request: Request, progress: Collection[Collection[int] | None]
    ) -> Future[Mapping[int, Grammar]]:
        """Start to compile a request's grammar.

        Args:
            request: a request with a grammar.
            progress: the tokens of each completion so far, None for one that has ended.

        Returns:
            A future of the matchers of the unfinished completions, by their index. It raises
            GrammarError if the grammar cannot be compiled or does not allow the tokens so far.
        """
        return self._thread.submit(self._compile, request, progress)

    def _compile(
        self, request: Request, progress: Collection[Collection[int] | None]
    ) -> Mapping[int, Grammar]:
        from paged_backend.grammar.matcher import Matcher, compile_grammar

        params = request.params
        first = Matcher(
            compile_grammar(self._vocabulary, request.grammar),
            self._eos_token_ids,
            params.stop_token_ids,
            ignore_eos=params.ignore_eos,
        )
        matchers: dict[int, Grammar] = {}
        for index, token_ids in enumerate(progress or [()] * params.n):
            if token_ids is not None:
                matchers[index] = first.copy()
                matchers[index].accept(token_ids)
        return matchers
