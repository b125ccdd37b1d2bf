"""Keeps what is made from objects of requests from one step to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Owner = TypeVar("Owner")
Value = TypeVar("Value")

# Steps without use after which a value may be dropped. A sequence that is decoded uses its values
# in each step.
STEPS_KEPT = 16


class Recent(Generic[Owner, Value]):
    """One value for each object (not for equal ones) that recent steps used.

    A value and its owner are dropped after `STEPS_KEPT` to twice as many steps without use.
    """

    def __init__(self) -> None:
        # By the owner's id. The owner is kept, so that no other object gets its id.
        self._used: dict[int, tuple[Owner, Value]] = {}
        self._unused: dict[int, tuple[Owner, Value]] = {}
        self._num_steps = 0

    def __len__(self) -> int:
        return len(self._used) + len(self._unused)

    def begin_step(self) -> None:
        """Count a step, and drop what has not been used for long."""
        self._num_steps += 1
        if self._num_steps % STEPS_KEPT == 0:
            self._used, self._unused = {}, self._used

    def of(self, owner: Owner, make: Callable[[], Value]) -> Value:
        """Return the value of an owner; if there is none, make it."""
        key = id(owner)
        found = self._used.get(key)
        if found is None:
            found = self._unused.pop(key, None) or (owner, make())
            self._used[key] = found
        return found[1]
