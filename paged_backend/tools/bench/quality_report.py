"""The report of `bench quality`: the formats, the answers, the divergences, and the machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from paged_backend.executor.base import WorkerInfo
from paged_backend.tools.bench.divergence import DivergenceFigures
from paged_backend.values.json_file import write_json


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """The number formats of an engine, as it has resolved its options."""

    dtype: str  # number format of linear layers that are not quantized
    quantization: str | None  # method for the weights
    kv_cache: str

    @classmethod
    def of(cls, info: WorkerInfo) -> NumberFormat:
        """Return the figures of a worker."""
        return cls(info.number_format, info.quantization, info.kv_cache)

    def __str__(self) -> str:
        quantization = "" if self.quantization is None else f", quantization {self.quantization}"
        return f"dtype {self.dtype}{quantization}, KV cache in {self.kv_cache}"


@dataclass(frozen=True, slots=True)
class AnswerFigures:
    """The greedy answers of both engines."""

    num_tokens: int  # length of the reference's answers, with their end-of-sequence tokens
    num_equal: int  # answers that are the reference's, token for token
    num_right: int | None  # None: nobody knows the right answers
    num_right_of_reference: int | None


@dataclass(frozen=True, slots=True)
class QualityReport:
    """The figures of one run, and the environment in which they were measured."""

    command: str
    model: str
    tested: NumberFormat
    reference: NumberFormat
    num_prompts: int
    num_prompt_tokens: int
    answers: AnswerFigures
    divergence: (
        DivergenceFigures  # D(reference || tested), at each token of the reference's answers
    )
    environment: dict[str, str]

    def print(self) -> None:
        """Write the table to the terminal."""
        table = Table(title=f"bench quality: {self.model}", show_header=False)
        table.add_column()
        table.add_column(overflow="fold")
        for name, value in self._rows():
            table.add_row(name, value)
        Console().print(table)

    def save(self, path: Path) -> None:
        """Write everything as JSON."""
        write_json(path, asdict(self), indent=2)

    def _rows(self) -> Iterator[tuple[str, str]]:
        answers, divergence = self.answers, self.divergence
        yield "tested", str(self.tested)
        yield "reference", str(self.reference)
        yield "prompts", f"{self.num_prompts} with {self.num_prompt_tokens} tokens"
        yield "tokens of the reference's answers", str(answers.num_tokens)
        yield "answers equal to the reference's", self._of_prompts(answers.num_equal)
        if answers.num_right is not None:
            yield "right answers", self._of_prompts(answers.num_right)
        if answers.num_right_of_reference is not None:
            yield "right answers of the reference", self._of_prompts(answers.num_right_of_reference)
        yield "KL divergence, mean", f"{divergence.mean_kl:.3g} nats"
        yield "KL divergence, 99th percentile", f"{divergence.p99_kl:.3g} nats"
        yield "KL divergence, maximum", f"{divergence.max_kl:.3g} nats"
        yield "positions with the same argmax", f"{divergence.equal_argmax_share:.2%}"
        facts = self.environment
        yield "processor", f"{facts['device']}: {facts['cpu_flags']}"
        yield "threads", facts["threads"]

    def _of_prompts(self, count: int) -> str:
        return f"{count} of {self.num_prompts} ({count / self.num_prompts:.1%})"
