"""The grammar of one sequence, which the engine's thread or another one works on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from paged_backend.core.grammar import SLOW_S, Grammar
from paged_backend.core.grammar_budget import GrammarAccount, StepTime
from paged_backend.core.grammar_thread import GrammarThread, MaskJob
from paged_backend.values.errors import as_exception

_T = TypeVar("_T")


class GrammarWork:
    """What an engine's grammars share: the time of the engine's thread, and another thread.

    Attributes:
        time: how long the engine's thread may still work on grammars.
        thread: works on grammars aside.
    """

    def __init__(self) -> None:
        self.time = StepTime()
        self.thread = GrammarThread()
        self._failed: list[GrammarAccount] = []

    def begin_step(self) -> None:
        """Begin to measure the step, and to notice masks that are done."""
        self.time.begin_step()
        self.thread.begin_wait()

    def account(self, request_id: str) -> GrammarAccount:
        """Return an account for a new request."""
        return GrammarAccount(request_id, self._failed)

    def take_failed(self) -> list[GrammarAccount]:
        """Return the accounts of requests that must end, once each."""
        failed = list(self._failed)
        self._failed.clear()
        return failed


class SequenceGrammar:
    """A grammar, and the tokens that it has not accepted yet. Only the engine's thread uses it.

    The engine's thread works on the grammar itself as long as that takes little time. Where it does
    not, a job on another thread accepts the tokens and computes the next mask. The sequence is held
    meanwhile: it is in no step.

    Args:
        grammar: grammar at the start of the output.
        account: account of the request.
        work: the engine's work on grammars.
        token_ids: the output so far.
    """

    __slots__ = ("_along", "_grammar", "_job", "_mask", "_unaccepted", "_work", "account")

    def __init__(
        self,
        grammar: Grammar,
        account: GrammarAccount,
        work: GrammarWork,
        token_ids: Iterable[int] = (),
    ) -> None:
        self._grammar = grammar
        self._work = work
        self._unaccepted = list(token_ids)
        self._job: MaskJob | None = None
        self._mask = b""  # mask of the token to accept next, if it is known
        self._along: tuple[list[int], list[bytes]] = ([], [])  # drafts, and the first masks along
        self.account = account
        account.num_tokens += len(self._unaccepted)

    @property
    def goes_aside(self) -> bool:
        """True if another thread must compute the next mask, or does so."""
        grammar = self._grammar
        return (
            self._job is not None
            or bool(self._unaccepted)
            or grammar.lexer.num_aside > 0
            or grammar.is_stuck
        )

    @property
    def is_ready(self) -> bool:
        """True if the other thread has computed the next mask; its time is then charged."""
        job = self._job
        if job is None or not job.is_done:
            return False
        if job.seconds:
            self._grammar.lexer.note(job.seconds)
            self.account.charge(job.seconds)
            job.seconds = 0.0
        if job.problem:
            self.account.fail(job.problem)
        return not self.account.problem

    def start_aside(self) -> None:
        """Let the other thread accept the tokens and compute the next mask, unless it does so."""
        if self._job is None:
            self._job = MaskJob(self._grammar, self.account, self._unaccepted)
            self._unaccepted = []
            self._work.thread.submit(self._job)

    def masks(self, draft_token_ids: list[int], greedy_token_id: int | None) -> list[bytes] | None:
        """Return the masks of the next token, and of the token after each allowed draft.

        Returns:
            Nothing if the greedy token is allowed, None if the masks are not known now.
        """
        if self._job is not None:
            if not self.is_ready or draft_token_ids:
                return None
            self._mask, self._job = self._job.mask, None
            return [self._mask]
        if self.goes_aside:
            return None
        if not self._work.time.is_left:
            self._grammar.lexer.delay()
            return None
        masks = self._try(lambda: self._compute(draft_token_ids, greedy_token_id))
        if masks is None or self._grammar.is_stuck or self.account.problem:
            return None
        self._mask = masks[0] if masks and not draft_token_ids else b""
        return masks

    def num_allowed(self, draft_token_ids: list[int]) -> int:
        """Return the number of drafts before the first one that is known to be forbidden."""
        if self.goes_aside or not self._work.time.is_left:
            return len(draft_token_ids)
        number = self._try(lambda: self._grammar.num_allowed(draft_token_ids))
        return len(draft_token_ids) if number is None else number

    def mask_after(self, draft_token_ids: list[int]) -> bytes:
        """Return the mask of the token after drafts that follow each other in several calls.

        It is empty if the drafts are not allowed, or if there is no time for the mask now.
        """
        drafts, masks = self._along
        if drafts != draft_token_ids[:-1] or len(masks) != len(draft_token_ids):
            masks = []
        if self.goes_aside or not self._work.time.is_left:
            return b""
        more = self._try(lambda: self._grammar.masks_along(draft_token_ids, len(masks)))
        self._along = (list(draft_token_ids), masks + (more or []))
        return self._along[1][-1] if len(self._along[1]) > len(draft_token_ids) else b""

    def accept(self, token_ids: list[int]) -> bool:
        """Add tokens to the output; returns False if the grammar does not allow them."""
        mask, self._mask, self._along = self._mask, b"", ([], [])
        self.account.num_tokens += len(token_ids)
        if not self.goes_aside:
            is_accepted = self._try(lambda: self._grammar.accept(token_ids))
            if self.account.problem:
                return True  # the whole request ends, and is told why
            if is_accepted is not None:
                return is_accepted
        self._unaccepted += token_ids
        return not mask or bool(mask[token_ids[0] // 8] >> token_ids[0] % 8 & 1)

    def forced_token_ids(self) -> list[int]:
        """Return tokens that must follow; none if that is not known now, or if there is no time."""
        if self.goes_aside or not self._work.time.is_left:
            return []
        return self._try(self._grammar.forced_token_ids) or []

    def close(self) -> None:
        """Stop the work on another thread, because the sequence has ended."""
        if self._job is not None:
            self._job.cancel()

    def _compute(self, draft_token_ids: list[int], greedy_token_id: int | None) -> list[bytes]:
        # To ask about one token takes less time than to compute a mask of all tokens.
        grammar = self._grammar
        if not draft_token_ids and greedy_token_id is not None and grammar.allows(greedy_token_id):
            return []
        drafts, masks = self._along
        if (
            draft_token_ids
            and drafts == draft_token_ids[: len(drafts)]
            and len(masks) > len(drafts)
        ):
            if drafts == draft_token_ids:
                return masks
            return masks + grammar.masks_along(draft_token_ids, len(masks))
        return grammar.masks_along(draft_token_ids)

    def _try(self, act: Callable[[], _T]) -> _T | None:
        """Work on the grammar now; returns None if its lexer is in use, or if it fails."""
        lexer = self._grammar.lexer
        if not lexer.lock.acquire(blocking=False):
            return None
        started_s = time.perf_counter()
        try:
            result = act()
            if self._grammar.problem:
                self.account.fail(self._grammar.problem)
            return result
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in a Rust library is a BaseException only
            self.account.fail(f"failed ({type(as_exception(error)).__name__})")
            return None
        finally:
            lexer.lock.release()
            seconds = self._work.time.spend_since(started_s)
            if seconds > SLOW_S or lexer.num_after_delay:
                lexer.note(seconds)
            self.account.charge(seconds)
