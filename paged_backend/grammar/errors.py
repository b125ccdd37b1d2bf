"""The errors of constraints."""

from __future__ import annotations


class ConstraintError(ValueError):
    """A part of a constraint that cannot be enforced.

    Attributes:
        field: the client's name for it.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(problem)
        self.field = field
