"""The newest answers of each tenant, as a source of guesses for its later requests."""

from __future__ import annotations

from collections import OrderedDict, deque

from paged_backend.core.sequence import Sequence
from paged_backend.speculation.token_index import SEPARATOR, TokenIndex
from paged_backend.values.request import Request

WINDOW = 2**16  # tokens that are kept for a tenant, which take a MiB
_MAX_OWNERS = 64  # tenants for which answers are kept
_MAX_ANSWER = 2**13  # tokens of an answer that are kept
_MAX_PENDING = 256  # answers that are not read yet
# Tokens that an answer counts as at least, because the first one of a tenant takes a table.
_MIN_COST = 2**9

Owner = tuple[str, ...]


class Answers:
    """Earlier answers. Requests share them only if tenant and cache salt are equal.

    Args:
        max_requests: number of answers that are kept for a tenant; 0 for none.
        key_length: number of tokens that a match has at least.
    """

    def __init__(self, max_requests: int, key_length: int) -> None:
        self._max_requests = max_requests
        self._key_length = key_length
        self._by_owner: OrderedDict[Owner, _AnswersOfOwner] = OrderedDict()
        self._pending: deque[tuple[Owner, list[int]]] = deque(maxlen=_MAX_PENDING)

    def index(self, request: Request) -> TokenIndex | None:
        """Return the index of the answers that a request may use; None without any."""
        found = self._by_owner.get(_owner(request))
        return None if found is None else found.index

    def add(self, seq: Sequence) -> None:
        """Keep the answer of a sequence that has ended, as soon as it is read.

        If too many end at once, the oldest of them are dropped.
        """
        end = seq.num_known_tokens
        start = max(seq.num_prompt_tokens, end - _MAX_ANSWER)
        if self._max_requests and end - start > self._key_length:
            self._pending.append((_owner(seq.request), seq.token_ids[start:end]))

    def read(self, limit: int) -> int:
        """Read the next answers, until at least `limit` tokens are read; return their number.

        The answers of the tenant that had none for longest may be dropped.
        """
        num_read = 0
        while self._pending and num_read < limit:
            owner, token_ids = self._pending.popleft()
            self._of(owner).add(token_ids, self._max_requests)
            num_read += max(len(token_ids), _MIN_COST)
        return num_read

    def _of(self, owner: Owner) -> _AnswersOfOwner:
        answers = self._by_owner.get(owner)
        if answers is None:
            answers = self._by_owner[owner] = _AnswersOfOwner(self._key_length)
            if len(self._by_owner) > _MAX_OWNERS:
                self._by_owner.popitem(last=False)
        self._by_owner.move_to_end(owner)
        return answers


class _AnswersOfOwner:
    def __init__(self, key_length: int) -> None:
        self.index = TokenIndex(WINDOW, key_length)
        self._starts: deque[int] = deque()

    def add(self, token_ids: list[int], max_requests: int) -> None:
        self._starts.append(self.index.num_tokens)
        self.index.extend([SEPARATOR, *token_ids])
        if len(self._starts) > max_requests:
            self._starts.popleft()
            self.index.forget_before(self._starts[0])


def _owner(request: Request) -> Owner:
    return (request.tenant, *request.cache_keys)
