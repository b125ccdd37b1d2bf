"""Runs the work before a request reaches the engine, and limits how much of it may wait.

Triton's thread admits every request of an instance, so only small requests are prepared on it.
There are three lanes of other threads. One prepares the requests with a constraint on their output,
one the other requests with chat messages, which need the chat template, and one the other large
requests. Each lane is fair among tenants.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from paged_backend.process.admission import PLACES_FOR_ONE_LEFT
from paged_backend.serving.contract import Array
from paged_backend.serving.fields import Tensors
from paged_backend.serving.requests.lane import Lane, Work
from paged_backend.serving.requests.parameters import SAMPLING, has_escapes, has_text
from paged_backend.values.errors import RequestRefused

# Maximum characters of a request that is prepared at once, which takes about a millisecond.
SMALL = 4096
# Estimated characters per token, before the text is tokenized.
CHARACTERS_PER_TOKEN = 4
MAX_SEARCHED = 2**22  # characters of parameters that are searched for the name of a constraint
_MAX_COUNTED = 256  # strings of a tensor that are measured; a request with more is not small
_RETRY_AFTER_S = 1

# Names in the parameters, or beginnings of names.
_CONSTRAINTS = ("structured_outputs", "response_format", "guided_", "thinking_token_budget")
_CONSTRAINING = ("guided_decoding_guide_type", "tools")  # tensors
_NAMES: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])

_thread = threading.local()


class MustWait(Exception):
    """The preparation of a request needs a helper process, and runs on the thread for all."""


def check_may_wait() -> None:
    """Refuse to wait for a helper process on the thread that admits all requests.

    `Load` sends each request that needs one to a lane. This holds if `Load` overlooks one.

    Raises:
        MustWait: this is that thread.
    """
    if getattr(_thread, "admits", False):
        raise MustWait


@contextlib.contextmanager
def _admitting() -> Iterator[None]:
    _thread.admits = True
    try:
        yield
    finally:
        _thread.admits = False


@dataclass(frozen=True, slots=True)
class Load:
    """The size of a request, and the helper processes that its preparation may need."""

    size: int  # characters and numbers
    needs_template: bool
    needs_grammar: bool = False
    is_slow: bool = False  # the tokenizer takes long, even for a short text

    @classmethod
    def of(cls, tensors: Tensors, parameters_json: str) -> Load:
        """Measure a request without looking at all of it."""
        size = len(parameters_json) + sum(map(_size, tensors.values()))
        return cls(size, "messages" in tensors, _may_need_grammar(tensors, parameters_json))

    @property
    def is_small(self) -> bool:
        """True if the request may be prepared on the thread that admits all requests."""
        needs_thread = self.needs_template or self.needs_grammar or self.is_slow
        return self.size <= SMALL and not needs_thread


def _may_need_grammar(tensors: Tensors, parameters_json: str) -> bool:
    """Return True if the request may have a constraint, without parsing its parameters."""
    if not tensors.keys().isdisjoint(_CONSTRAINING):
        return True
    sources: list[str | bytes] = [parameters_json]
    if SAMPLING in tensors:
        sources += tensors[SAMPLING].reshape(-1)[:1].tolist()
    return any(map(_may_have_constraint, sources))


def _may_have_constraint(source: str | bytes) -> bool:
    """Return True if parameters may have a constraint; True if they are too long to be searched."""
    if len(source) > MAX_SEARCHED or any(has_text(source, name) for name in _CONSTRAINTS):
        return True
    if not has_escapes(source):
        return False
    if len(source) > SMALL:
        return True
    try:
        return any(name.startswith(_CONSTRAINTS) for name in _NAMES.decode(source))
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return True


def _size(tensor: Array) -> int:
    if tensor.dtype != object:
        return tensor.size
    if tensor.size > _MAX_COUNTED:
        return SMALL + tensor.size
    return sum(map(len, tensor.reshape(-1).tolist()))


class Preparation:
    """Prepares requests: small requests at once, and the others on threads.

    Args:
        max_waiting_tokens: limit of the text that waits. Callers limit the number of requests.
    """

    def __init__(self, max_waiting_tokens: int) -> None:
        self._max_size = CHARACTERS_PER_TOKEN * max_waiting_tokens
        # A template or grammar that hangs must not delay requests that need none.
        self._templates = Lane("paged-templates")
        self._grammars = Lane("paged-grammars")
        self._texts = Lane("paged-texts")
        self._lanes = (self._templates, self._grammars, self._texts)

    @property
    def num_waiting(self) -> int:
        """The number of requests that have not been prepared yet."""
        return sum(lane.num_jobs for lane in self._lanes)

    def num_waiting_of(self, tenant: str) -> int:
        """Return the number of a tenant's requests that have not been prepared yet."""
        return sum(lane.share_of(tenant)[0] for lane in self._lanes)

    def run(self, load: Load, work: Work, tenant: str = "") -> None:
        """Prepare a request now if it is small, and otherwise in its turn.

        Args:
            load: size and needs of the request.
            work: prepares it; it must not raise, except for `MustWait`.
            tenant: the account that its preparation is charged to.

        Raises:
            RequestRefused: too much waits already; nothing was started.
            MustWait: the request is small, and cannot be prepared on this thread after all.
        """
        if load.is_small:
            with _admitting():
                work()
            return
        if load.size > SMALL:
            self._check_room(load.size, tenant)
        self._lane(load).put(work, load.size, tenant)

    def _check_room(self, size: int, tenant: str) -> None:
        """Refuse a large request if too much text waits, or too much of its tenant.

        As in the queue of the engine, a tenant can fill about 8/9 of the room.
        """
        waiting = sum(lane.size for lane in self._lanes)
        own = sum(lane.share_of(tenant)[1] for lane in self._lanes)
        left = self._max_size - waiting - size
        if waiting and left < 0:
            whose, length = "", waiting
        elif own and own + size > PLACES_FOR_ONE_LEFT * left:
            whose, length = " of this tenant", own
        else:
            return
        raise RequestRefused(
            "queue_full",
            f"{length} characters{whose} wait to be tokenized already (max_waiting_tokens); "
            f"retry after {_RETRY_AFTER_S} s",
        )

    def _lane(self, load: Load) -> Lane:
        if load.needs_grammar:
            return self._grammars
        return self._templates if load.needs_template else self._texts

    def close(self) -> None:
        """Prepare the waiting requests, and end the threads."""
        for lane in self._lanes:
            lane.close()
