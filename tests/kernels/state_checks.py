"""What the tests of kernels with a state for each sequence share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from matmul_checks import between_nans
from paged_kernels.errors import ArgumentError
from state_steps import NUM_SLOTS, Step, step_of
from torch import Tensor

LONG = Step(lengths=[5, 43, 1, 0], sources=[0, 4, 7, 0], targets=[1, 4, 5, 0])
"""A new and a continued prompt, and a decode."""

CHUNKED = Step(lengths=[150, 1, 20, 0, 5], sources=[4, 7, 3, 0, 0], targets=[4, 5, 6, 0, 1])
"""Prompts that are computed in chunks, a decode, and a short prompt."""

CUT = Step(lengths=[70, 1], sources=[4, 7], targets=[4, 5])
"""A prompt of a chunk and a part of one, and a decode."""

TOLERANCES = {torch.float32: 3e-6, torch.float16: 2**-11 * 1.01, torch.bfloat16: 2**-8 * 1.01}
"""Relative errors of a result: one rounding of the type."""

SUM_ERRORS = {torch.float32: 4e-6, torch.float16: 4e-6, torch.bfloat16: 2e-5}
"""Errors of a sum, relative to the largest number of the same tensor."""


def pool_of(
    *sizes: int, dtype: torch.dtype = torch.float32, device: torch.device, scale: float = 1.0
) -> Tensor:
    """Return states between NaNs; slot 0 is NaN, because nobody may read it."""
    pool = scale * torch.randn(NUM_SLOTS, *sizes)
    pool[0] = torch.nan
    return between_nans(pool.to(device, dtype))


@dataclass(frozen=True)
class StateCall:
    """A call of a kernel and of its reference.

    Attributes:
        kernel: the wrapper.
        reference: the reference of the same name, with the same arguments.
        per_row: arguments with a first dimension of rows.
        others: all other arguments but those of a step.
        pool: the states before the call.
        chunked: whether the wrapper takes `seq_lens` and `num_decodes`.
    """

    kernel: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    per_row: Mapping[str, Tensor]
    others: Mapping[str, Any]
    pool: Tensor
    chunked: bool = False

    def arguments(
        self, step: Step, *, before: Sequence[int] | None = None, num_decodes: int = 0
    ) -> dict[str, Any]:
        """Return the arguments of the kernel, with a copy of the pool.

        Args:
            step: the sequences.
            before: the number of rows of each sequence in earlier steps; by default none if its
                state is read from slot 0, else 7.
            num_decodes: number of leading sequences without chunks.
        """
        slots, starts = step.tensors(self.pool.device)
        arguments: dict[str, Any] = {
            **self.per_row,
            **self.others,
            "pool": between_nans(self.pool),
            "slots": between_nans(slots),
            "query_start_loc": between_nans(starts),
        }
        if self.chunked:
            if before is None:
                before = [7 if source else 0 for source in step.sources]
            lengths = torch.tensor(step.lengths) + torch.tensor(before)
            arguments["seq_lens"] = between_nans(lengths.int().to(self.pool.device))
            arguments["num_decodes"] = num_decodes
        return arguments

    def rows(self, first: int, last: int) -> StateCall:
        """Return the same for some rows."""
        part = {name: rows[first:last].clone() for name, rows in self.per_row.items()}
        return replace(self, per_row=part)

    def confirm(self, step: Step, *, all_decodes: bool = False, **options: Any) -> None:
        """Compare results and all states with the reference.

        Args:
            step: the sequences.
            all_decodes: also compare the kernel with `num_decodes` of all sequences.
            options: options of `arguments`.
        """
        wanted = self.wanted(step)
        calls = [options, {"num_decodes": len(step.lengths)}] if all_decodes else [options]
        for given in calls:
            arguments = self.arguments(step, **given)
            found = self.kernel(**arguments)
            self.confirm_equal(step, found, arguments["pool"], *wanted)

    def confirm_results(self, step: Step, found: Tensor, pool: Tensor) -> None:
        """Compare these results, and states after the step, with the reference."""
        wanted, states = self.wanted(step)
        self.confirm_equal(step, found, pool, wanted, states)

    def wanted(self, step: Step) -> tuple[Tensor, Tensor]:
        """Return the results of the reference, and all states after it."""
        arguments = self.arguments(step)
        for name in ("seq_lens", "num_decodes"):
            arguments.pop(name, None)
        return self.reference(**arguments), arguments["pool"]

    def confirm_equal(
        self, step: Step, found: Tensor, pool: Tensor, wanted: Tensor, states: Tensor
    ) -> None:
        """Compare results and states with those of the reference, as `wanted` returns them."""
        assert found.shape == wanted.shape
        assert_close(found, wanted, found.dtype)
        for slot in range(1, NUM_SLOTS):
            if slot in step.targets:
                assert_close(pool[slot], states[slot].double(), found.dtype)
            else:
                assert torch.equal(pool[slot], self.pool[slot]), slot

    def confirm_cuts(self, step: Step, cuts: Sequence[int]) -> None:
        """Compute the longest sequence alone, and divided at these rows, with the same bits.

        Its rows before the step are a multiple of 64, so cuts at multiples of 64 divide no chunk.
        """
        seq = max(range(len(step.lengths)), key=lambda index: step.lengths[index])
        first = sum(step.lengths[:seq])
        length, source, target = (each[seq] for each in (step.lengths, step.sources, step.targets))
        before = 64 if source else 0
        all_before = [0] * len(step.lengths)
        all_before[seq] = before
        arguments = self.arguments(step, before=all_before)
        whole = self.kernel(**arguments)[first : first + length]
        state = arguments["pool"][target]
        for ends in ([], *([cut] for cut in cuts), list(cuts)):
            call, parts, start = self, [], 0
            for end in (*ends, length):
                part = call.rows(first + start, first + end)
                one = step_of(end - start, source if start == 0 else target, target)
                given = part.arguments(one, before=[before + start])
                parts.append(part.kernel(**given))
                call, start = replace(call, pool=given["pool"]), end
            assert torch.equal(torch.cat(parts), whole), ends
            assert torch.equal(call.pool[target], state), ends

    def confirm_padding(self, step: Step, rows: int = 19) -> None:
        """Rows after those of the sequences get zeros and change nothing."""
        padded = {
            name: torch.cat(
                (given, torch.full_like(given[:1], torch.nan).expand(rows, *given.shape[1:]))
            )
            for name, given in self.per_row.items()
        }
        arguments = replace(self, per_row=padded).arguments(step)
        found = self.kernel(**arguments)
        self.confirm_results(step, found[: step.num_rows], arguments["pool"])
        assert torch.equal(found[step.num_rows :], torch.zeros_like(found[step.num_rows :]))

    def confirm_differences(self, step: Step, names: Sequence[str]) -> None:
        """Change one number of each argument, and expect that the comparison fails."""
        wanted = self.wanted(step)
        for name in names:
            arguments = self.arguments(step)
            changed = arguments[name].clone()
            if name == "slots":
                changed[0, 0] = step.sources[0] + 1
            elif name == "pool":
                changed[step.sources[0]].view(-1)[0] += 1
            else:
                changed[(0,) * changed.dim()] += 1
            arguments[name] = changed
            found = self.kernel(**arguments)
            with pytest.raises(AssertionError):
                self.confirm_equal(step, found, arguments["pool"], *wanted)

    def confirm_bad_steps(self, step: Step) -> None:
        """Invalid slots and rows of sequences are refused by name."""
        good = self.arguments(step)
        bad: dict[str, list[Any]] = {
            "slots": [good["slots"].long(), good["slots"][:, :1].contiguous(), good["slots"][:0]],
            "query_start_loc": [good["query_start_loc"].long(), good["query_start_loc"][:-1]],
        }
        if self.chunked:
            bad["seq_lens"] = [good["seq_lens"].long(), good["seq_lens"][:-1]]
            bad["num_decodes"] = [-1, len(step.lengths) + 1]
        for name, values in bad.items():
            for value in values:
                with pytest.raises(ArgumentError, match=f"^{name} "):
                    self.kernel(**{**good, name: value})


def assert_close(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """Compare with the reference, for results of a kernel with inputs of a dtype."""
    largest = float(wanted.abs().max()) if wanted.numel() else 0.0
    rounding = TOLERANCES[found.dtype]
    torch.testing.assert_close(
        found.double(), wanted, rtol=rounding, atol=SUM_ERRORS[dtype] * largest + 1e-7
    )
