"""The CPU's kernels of layers that keep a state per sequence, compared with their references."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from paged_kernels.reference.causal_conv import causal_conv as reference_conv
from paged_kernels.reference.gated_delta import gated_delta as reference_delta
from paged_kernels.reference.linear_attention import linear_attention as reference_linear
from paged_kernels.reference.mamba1_scan import mamba1_scan as reference_mamba
from paged_kernels.reference.rg_lru import rg_lru as reference_lru
from paged_kernels.reference.selective_scan import selective_scan as reference_ssd
from state_steps import NUM_SLOTS, RAGGED, Step, step_of
from torch import Tensor
from torch.nn import functional as F

from paged_backend.models.states import StateStep
from paged_backend.platforms.cpu.causal_conv import causal_conv
from paged_backend.platforms.cpu.delta_gates import delta_gates
from paged_backend.platforms.cpu.gated_delta import gated_delta
from paged_backend.platforms.cpu.linear_attention import linear_attention
from paged_backend.platforms.cpu.mamba1_scan import mamba1_scan
from paged_backend.platforms.cpu.rg_lru import rg_lru
from paged_backend.platforms.cpu.selective_scan import selective_scan
from paged_backend.platforms.portable.state_functions import delta_gates as reference_gates

DTYPES = [torch.float32, torch.bfloat16]


def state_step(step: Step) -> StateStep:
    """Return the rows of a step, each sequence with those of the step alone."""
    return StateStep(*step.tensors(), torch.tensor(step.lengths, dtype=torch.int32), 0)


@dataclass(frozen=True)
class Layer:
    """A kernel, and what describes its arguments.

    Attributes:
        kernel: (tensors of rows, parameters, pool, step), returns the results.
        reference: the same, in float64, with (slots, query_start_loc) in place of the step.
        rows: (number of rows), returns random tensors of rows.
        parameters: what all rows share.
        state: shape of a state.
        of_model: whether states have the dtype of the rows, not float32.
    """

    kernel: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    rows: Callable[[int], list[Tensor]]
    state: tuple[int, ...]
    parameters: tuple[Any, ...] = ()
    of_model: bool = False

    def pool(self, dtype: torch.dtype) -> Tensor:
        """Return random states; slot 0 has NaN, which stands for anything."""
        pool = torch.randn(NUM_SLOTS, *self.state)
        pool[0] = torch.nan
        return pool.to(dtype) if self.of_model else pool

    def run(self, rows: list[Tensor], pool: Tensor, step: Step) -> Tensor:
        """Compute a step with the kernel."""
        return self.kernel(*rows, *self.parameters, pool, state_step(step))

    def confirm(self, rows: list[Tensor], pool: Tensor, step: Step) -> None:
        """Compare results and states with the reference."""
        wanted_pool = pool.clone() if self.of_model else pool.double()
        wanted = self.reference(*rows, *self.parameters, wanted_pool, *step.tensors())
        found = self.run(rows, pool, step)
        dtype = rows[0].dtype
        assert found.dtype == dtype and found.shape == wanted.shape
        # States that are copied are exact.
        allowed = 0.0 if self.of_model else float(wanted_pool[1:].abs().max()) * 1e-6
        tolerance = {"rtol": 0.0, "atol": allowed}
        torch.testing.assert_close(pool[1:], wanted_pool[1:].to(pool.dtype), **tolerance)
        rounding = 2.0**-8 if dtype == torch.bfloat16 else 0.0
        allowed = wanted.abs() * rounding + wanted.abs().max() * 1e-6
        error = (found.double() - wanted).abs()
        assert (error <= allowed).all(), f"{(error / allowed).max():.3g} times the tolerance"


def conv(channels: int, width: int, *, silu: bool, bias: bool) -> Layer:
    parameters = torch.randn(channels, width), torch.randn(channels) if bias else None

    def with_activation(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args: function(*args, silu=silu)

    return Layer(
        with_activation(causal_conv),
        with_activation(reference_conv),
        lambda n: [torch.randn(n, channels + 3)[:, 2:-1]],
        (channels, width - 1),
        parameters,
        of_model=True,
    )


def delta(key_heads: int, heads: int, key_dim: int, value_dim: int, *, of_channels: bool) -> Layer:
    decays = (heads, key_dim) if of_channels else (heads,)

    def rows(n: int) -> list[Tensor]:
        """Queries, keys and values are parts of the same rows, as behind a convolution."""
        sizes = [key_heads * key_dim] * 2 + [heads * value_dim]
        q, k, v = torch.randn(n, sum(sizes)).split(sizes, dim=1)
        q, k = (x.unflatten(1, (key_heads, key_dim)) for x in (q, k))
        decay, beta = -torch.rand(n, *decays) * 3, torch.rand(n, heads)
        return [q, k, v.unflatten(1, (heads, value_dim)), decay, beta]

    return Layer(gated_delta, reference_delta, rows, (heads, key_dim, value_dim))


def ssd(groups: int, heads: int, head_dim: int, state_dim: int, *, plain: bool) -> Layer:
    def rows(n: int) -> list[Tensor]:
        """The inputs x, dt, b and c, which are parts of the same rows."""
        sizes = [heads * head_dim, heads, *[groups * state_dim] * 2]
        x, dt, b, c = torch.randn(n, sum(sizes)).split(sizes, dim=1)
        b, c = (part.unflatten(1, (groups, state_dim)) for part in (b, c))
        return [x.unflatten(1, (heads, head_dim)), dt * 3, b, c]

    a, d, dt_bias = -torch.rand(heads) * 4, torch.randn(heads), torch.randn(heads)

    def with_parameters(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, *state: Any) -> Tensor:
            if plain:
                return function(x, dt, a, b, c, None, None, *state)
            return function(x, dt, a, b, c, d, dt_bias, *state, dt_limits=(0.02, 0.9))

        return run

    functions = with_parameters(selective_scan), with_parameters(reference_ssd)
    return Layer(*functions, rows, (heads, head_dim, state_dim))


def lightning(heads: int, key_dim: int, value_dim: int) -> Layer:
    def rows(n: int) -> list[Tensor]:
        sizes = [key_dim, key_dim, value_dim]
        return [*torch.randn(n, heads, sum(sizes)).split(sizes, dim=2)]

    def with_slopes(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda q, k, v, *state: function(q, k, v, slopes, *state)

    slopes = torch.rand(heads)
    functions = with_slopes(linear_attention), with_slopes(reference_linear)
    return Layer(*functions, rows, (heads, key_dim, value_dim))


def lru(width: int) -> Layer:
    def rows(n: int) -> list[Tensor]:
        return [*(torch.randn(n, 3 * width) * 3).split(width, dim=1)]

    # From decays near 1 to those near 0.
    return Layer(rg_lru, reference_lru, rows, (width,), (torch.linspace(-14, 4, width),))


def mamba(inner: int, state_dim: int, *, plain: bool) -> Layer:
    a, d, dt_bias = -torch.rand(inner, state_dim) * 4, torch.randn(inner), torch.randn(inner)

    def rows(n: int) -> list[Tensor]:
        sizes = [inner, inner, state_dim, state_dim]
        return [*torch.randn(n, sum(sizes)).split(sizes, dim=1)]

    def with_parameters(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, *state: Any) -> Tensor:
            if plain:
                return function(x, dt, a, b, c, None, None, *state)
            return function(x, dt, a, b, c, d, dt_bias, *state)

        return run

    functions = with_parameters(mamba1_scan), with_parameters(reference_mamba)
    return Layer(*functions, rows, (inner, state_dim))


def layers() -> dict[str, Layer]:
    return {
        "conv": conv(300, 4, silu=True, bias=False),
        "conv_bias": conv(20, 3, silu=False, bias=True),
        "gated_delta": delta(2, 4, 32, 16, of_channels=False),
        "gated_delta_odd": delta(1, 3, 17, 200, of_channels=False),
        "selective_scan": ssd(2, 4, 64, 32, plain=False),
        "selective_scan_odd": ssd(1, 3, 7, 21, plain=True),
        "selective_scan_in_blocks": ssd(1, 1, 40, 256, plain=False),
        "linear_attention": lightning(3, 32, 32),
        "linear_attention_odd": lightning(2, 7, 21),
        "rg_lru": lru(300),
        "mamba1_scan": mamba(300, 16, plain=False),
        "mamba1_scan_odd": mamba(21, 5, plain=True),
        "gated_delta_of_channels": delta(2, 2, 8, 40, of_channels=True),
    }


with torch.random.fork_rng():
    torch.manual_seed(0)
    LAYERS = layers()


@pytest.fixture(params=LAYERS.values(), ids=LAYERS.keys())
def layer(request: pytest.FixtureRequest) -> Layer:
    torch.manual_seed(0)
    found: Layer = request.param
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_reference(layer: Layer, dtype: torch.dtype) -> None:
    rows = [x.to(dtype) for x in layer.rows(RAGGED.num_rows)]
    layer.confirm(rows, layer.pool(dtype), RAGGED)


def test_a_long_prompt_equals_the_reference(layer: Layer) -> None:
    layer.confirm(layer.rows(75), layer.pool(torch.float32), step_of(75, 3, 4))


def test_only_slots_of_the_step_are_written(layer: Layer) -> None:
    pool = layer.pool(torch.float32)
    before = pool.clone()
    layer.run(layer.rows(RAGGED.num_rows), pool, RAGGED)
    used = zip(RAGGED.targets, RAGGED.lengths, strict=True)
    written = {target for target, length in used if length} - {0}
    changed = {slot for slot in range(1, NUM_SLOTS) if not torch.equal(pool[slot], before[slot])}
    assert changed == written
    assert pool[0].isnan().all()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("cuts", [(1, 2, 70), (40, 33), (32, 1, 40), (73,)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_results_do_not_depend_on_cuts(
    layer: Layer, dtype: torch.dtype, cuts: tuple[int, ...]
) -> None:
    """Prompts, and decodes after them, from slot to slot or in place."""
    rows = [x.to(dtype) for x in layer.rows(76)]
    whole, pool = layer.pool(dtype), layer.pool(dtype)
    wanted = layer.run(rows, whole, step_of(76, 0, 1))
    outs, start, source = [], 0, 0
    for number, length in enumerate((*cuts, 1, 1, 1)):
        target = 1 + number % 2 if number < 3 else source
        parts = [x[start : start + length] for x in rows]
        outs.append(layer.run(parts, pool, step_of(length, source, target)))
        start, source = start + length, target
    assert torch.equal(torch.cat(outs), wanted)
    assert torch.equal(pool[source], whole[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_do_not_depend_on_other_sequences(layer: Layer, dtype: torch.dtype) -> None:
    rows = [x.to(dtype) for x in layer.rows(RAGGED.num_rows)]
    pool = layer.pool(dtype)
    alone, start = pool.clone(), 0
    together = layer.run(rows, pool, RAGGED)
    for length, source, target in zip(RAGGED.lengths, RAGGED.sources, RAGGED.targets, strict=True):
        if length:
            parts = [x[start : start + length] for x in rows]
            out = layer.run(parts, alone, step_of(length, source, target))
            assert torch.equal(out, together[start : start + length])
        start += length
    assert torch.equal(pool[1:], alone[1:])


def test_sequences_that_write_to_slot_0_do_not_meet(layer: Layer) -> None:
    step = Step([3] * 8, [0, 5] * 4, [0] * 8)
    layer.confirm(layer.rows(24), layer.pool(torch.float32), step)


def test_a_pool_of_another_dtype_is_refused(layer: Layer) -> None:
    pool = layer.pool(torch.float32).half()
    with pytest.raises(
        ValueError, match="^pool must be contiguous torch.float32, got torch.float16"
    ):
        layer.run(layer.rows(1), pool, step_of(1, 1, 1))


def test_time_steps_of_any_size() -> None:
    """A channel for each: its output is its time step."""
    dt = torch.linspace(-100, 100, 40_001)[None]
    channels, one = dt.shape[1], torch.ones(1, 1)
    pool, a = torch.zeros(2, channels, 1), torch.zeros(channels, 1)
    state = pool, state_step(step_of(1, 0, 1))
    found = mamba1_scan(torch.ones_like(dt), dt, a, one, one, None, None, *state)
    wanted = F.softplus(dt.double(), threshold=200)
    relative = torch.where(dt < -5, 4e-6, 5e-7)
    assert ((found.double() - wanted).abs() <= relative * wanted + 1e-37).all()


def test_gates_of_rows_that_are_apart() -> None:
    """Rates of channels, and shares of heads; no bit of a row depends on the number of rows."""
    both = 10 * torch.randn(5, 37 + 3)
    inputs = both[:, 37:], both[:, :37], -4 * torch.rand(37), torch.randn(37)
    decays, shares = delta_gates(*inputs)
    for found, wanted in zip(
        (decays, shares), reference_gates(*(x.double() for x in inputs)), strict=True
    ):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=0)
    alone = delta_gates(inputs[0][2:3], inputs[1][2:3], *inputs[2:])
    assert torch.equal(alone[0][0], decays[2])
    assert torch.equal(alone[1][0], shares[2])


def test_small_decays_of_an_lru() -> None:
    """The input's factor is the root of 1 - a^2, which would be lost where a is nearly 1."""
    width = 1000
    parameter, gates = torch.linspace(-30, 5, width), torch.zeros(1, width)
    pool = torch.zeros(2, width)
    rows = torch.ones(1, width), gates, gates, parameter
    found = rg_lru(*rows, pool, state_step(step_of(1, 1, 1)))
    wanted = reference_lru(*rows, torch.zeros(2, width).double(), *step_of(1, 1, 1).tensors())
    torch.testing.assert_close(found.double(), wanted, rtol=3e-6, atol=0)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="compiles for such a processor")
def test_results_compiled_for_processors_without_avx512() -> None:
    """The same tests in another process: LLVM makes other copies of loops for short vectors."""
    processor = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", __file__, "-k", "depend"]
    result = subprocess.run(command, env=os.environ | processor, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
