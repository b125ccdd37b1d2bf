"""Structured outputs of a part of a workload's requests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paged_backend.grammar.client import GrammarChecker
from paged_backend.values.output_constraint import OutputConstraint
from paged_backend.values.structured_outputs import StructuredOutputsParams


@dataclass(frozen=True, slots=True)
class Constraint:
    """One constraint for a part of the requests.

    Raises:
        InvalidRequest: ``structured_outputs`` is not a constraint.
    """

    structured_outputs: str  # JSON, as in the request field of that name
    ratio: float  # share of the requests that are constrained

    def __post_init__(self) -> None:
        StructuredOutputsParams.of(self.structured_outputs)

    @property
    def kind(self) -> str:
        """The name of the constraint, such as ``json``."""
        return StructuredOutputsParams.of(self.structured_outputs).kind

    def grammars(self, num_requests: int, tokenizer: str | Path, vocab_size: int) -> list[str]:
        """Return the grammar of each request, empty for a request without constraint.

        The constrained requests are spread evenly.

        Raises:
            InvalidRequest: the constraint cannot be enforced.
        """
        params = StructuredOutputsParams.of(self.structured_outputs)
        grammar = GrammarChecker(tokenizer, vocab_size).grammar(OutputConstraint(params))
        ranks = [int(index * self.ratio + 1e-9) for index in range(num_requests + 1)]
        return [grammar if ranks[i] < ranks[i + 1] else "" for i in range(num_requests)]
