"""The references of layers that keep a state per sequence, compared with transformers' functions.

Those compute in float32, one sequence at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from paged_kernels.reference.causal_conv import causal_conv
from paged_kernels.reference.gated_delta import gated_delta
from paged_kernels.reference.linear_attention import linear_attention
from paged_kernels.reference.mamba1_scan import mamba1_scan
from paged_kernels.reference.rg_lru import rg_lru
from paged_kernels.reference.selective_scan import selective_scan
from state_steps import NUM_SLOTS, RAGGED, step_of
from torch import Tensor
from torch.nn import functional as F
from transformers import MiniMaxConfig, RecurrentGemmaConfig
from transformers.models.jamba import modeling_jamba as jamba
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.minimax import modeling_minimax as minimax
from transformers.models.qwen3_next import modeling_qwen3_next as qwen
from transformers.models.recurrent_gemma import modeling_recurrent_gemma as gemma

ROWS = 9
LIMITS = (0.02, 0.3)


def random(*shape: int) -> Tensor:
    return torch.randn(shape)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def confirm(found: Tensor, wanted: Tensor) -> None:
    """Compare a reference with what transformers computes in float32."""
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, wanted.double(), rtol=2e-5, atol=2e-5)


def by_parts(whole: Callable[..., Tensor], pool: Tensor, *per_row: Tensor) -> tuple[Tensor, Tensor]:
    """Return the results of a text that is computed in three steps, and its state.

    It begins in slot 0, goes on from slot 2 to slot 1, and stays there.
    """
    outs, start = [], 0
    for length, source, target in ((4, 0, 2), (1, 2, 1), (ROWS - 5, 1, 1)):
        parts = (tensor[start : start + length] for tensor in per_row)
        outs.append(whole(*parts, pool, *step_of(length, source, target).tensors()))
        start += length
    return torch.cat(outs), pool[1]


class OpenGate(torch.nn.Module):
    """A gate that lets everything pass."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return torch.tensor(math.inf)


def pool_of(*shape: int) -> Tensor:
    """Return a pool in float64 that is NaN where nothing was written."""
    return torch.full((3, *shape), torch.nan, dtype=torch.float64)


@pytest.mark.parametrize("silu", [True, False])
def test_causal_conv(silu: bool) -> None:
    x, weight, bias = random(ROWS, 6), random(6, 4), random(6)

    def run(x: Tensor, *rest: Tensor) -> Tensor:
        return causal_conv(x, weight, bias, *rest, silu=silu)

    found, state = by_parts(run, pool_of(6, 3), x)
    activation = "silu" if silu else None
    wanted = qwen.causal_conv1d_fn(x.T[None], weight, bias, activation=activation)
    confirm(found, wanted[0].T)
    assert torch.equal(state, x[-3:].T.double())
    last_inputs = x[-4:-1].T[None].clone()
    decoded = qwen.causal_conv1d_update(x[-1:].T[None], last_inputs, weight, bias, activation)
    confirm(found[-1:], decoded[0].T)
    assert torch.equal(state, last_inputs[0].double())


def test_gated_delta() -> None:
    q, k, v = random(ROWS, 2, 8), random(ROWS, 2, 8), random(ROWS, 4, 6)
    g, beta = -random(ROWS, 4).abs(), random(ROWS, 4).sigmoid()
    found, state = by_parts(gated_delta, pool_of(4, 8, 6), q, k, v, g, beta)
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    for function in (qwen.torch_recurrent_gated_delta_rule, qwen.torch_chunk_gated_delta_rule):
        wanted, last = function(*(x[None] for x in (q, k, v, g, beta)), **options)
        confirm(found, wanted[0])
        confirm(state, last[0])


def test_gated_delta_with_a_decay_for_each_channel() -> None:
    q, k, v = random(ROWS, 3, 8), random(ROWS, 3, 8), random(ROWS, 3, 6)
    g, beta = -random(ROWS, 3, 8).abs(), random(ROWS, 3).sigmoid()
    found, state = by_parts(gated_delta, pool_of(3, 8, 6), q, k, v, g, beta)
    wanted, last = kimi.recurrent_kimi_delta_attention(
        *(x[None] for x in (q, k, v, g, beta)), None, True, use_qk_l2norm_in_kernel=True
    )
    confirm(found, wanted[0])
    confirm(state, last[0])


def test_selective_scan() -> None:
    x, dt = random(ROWS, 4, 6), random(ROWS, 4)
    a, b, c = -random(4).exp(), random(ROWS, 2, 8), random(ROWS, 2, 8)
    d, dt_bias = random(4), random(4)

    def run(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, *rest: Tensor) -> Tensor:
        return selective_scan(x, dt, a, b, c, d, dt_bias, *rest, dt_limits=LIMITS)

    found, state = by_parts(run, pool_of(4, 6, 8), x, dt, b, c)
    wanted, last = mamba2.mamba2_chunk_scan(
        *(x[None], dt[None], a, b[None], c[None]),
        chunk_size=4,
        D=d,
        dt_bias=dt_bias,
        dt_softplus=True,
        dt_limit=LIMITS,
        return_final_states=True,
    )
    confirm(found, wanted[0])
    confirm(state, last[0])


def test_selective_scan_of_decodes() -> None:
    """Without limits, which transformers does not know there."""
    x, dt = random(ROWS, 4, 6), random(ROWS, 4)
    a, b, c = -random(4).exp(), random(ROWS, 2, 8), random(ROWS, 2, 8)
    d, dt_bias, state = random(4), random(4), torch.zeros(1, 4, 6, 8)
    wanted = [
        mamba2.mamba2_selective_state_update(
            *(state, x[row, None], dt[row, None, :, None].expand(-1, -1, 6)),
            *(a[:, None, None].expand(-1, 6, 8), b[row, None], c[row, None]),
            *(d[:, None].expand(-1, 6), dt_bias[:, None].expand(-1, 6)),
            dt_softplus=True,
        )
        for row in range(ROWS)
    ]
    pool, place = pool_of(4, 6, 8), step_of(ROWS, 0, 1).tensors()
    found = selective_scan(x, dt, a, b, c, d, dt_bias, pool, *place)
    confirm(found, torch.cat(wanted))
    confirm(pool[1], state[0])


def test_mamba1_scan() -> None:
    x, dt = random(ROWS, 12), random(ROWS, 12)
    a, b, c = -random(12, 5).exp(), random(ROWS, 5), random(ROWS, 5)
    d, dt_bias = random(12), random(12)

    def run(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, *rest: Tensor) -> Tensor:
        return mamba1_scan(x, dt, a, b, c, d, dt_bias, *rest)

    found, state = by_parts(run, pool_of(12, 5), x, dt, b, c)
    wanted, last = jamba.mamba_selective_scan(
        *(x.T[None], dt.T[None], a, b.T[None], c.T[None], d),
        delta_bias=dt_bias,
        delta_softplus=True,
        return_last_state=True,
    )
    confirm(found, wanted[0].T)
    confirm(state, last[0])


def test_linear_attention() -> None:
    heads, dim = 3, 8
    config = MiniMaxConfig(
        hidden_size=heads * dim,
        num_attention_heads=heads,
        head_dim=dim,
        num_hidden_layers=2,
        block_size=4,
    )
    layer = minimax.MiniMaxLightningAttention(config, layer_idx=0)
    # Without what the layer does before and after.
    layer.act_fn = layer.norm = layer.out_proj = layer.qkv_proj = torch.nn.Identity()
    layer.output_gate = OpenGate()
    qkv = random(ROWS, heads, 3 * dim)
    position_embeddings = (random(1), random(1))
    wanted, last = layer(qkv.flatten(1)[None], position_embeddings, None)
    q, k, v = qkv.split(dim, dim=-1)
    slopes = layer.slope_rate.flatten()

    def run(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Tensor:
        return linear_attention(q, k, v, slopes, *rest)

    found, state = by_parts(run, pool_of(heads, dim, dim), q, k, v)
    confirm(found.flatten(1), wanted[0])
    confirm(state, last[0])


def test_rg_lru() -> None:
    width, heads = 12, 3
    layer = gemma.RecurrentGemmaRglru(
        RecurrentGemmaConfig(hidden_size=width, lru_width=width, num_attention_heads=heads)
    )
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = random(ROWS, width)
    gates = [
        (torch.einsum("thi,hij->thj", x.view(ROWS, heads, -1), weight) + bias).flatten(1)
        for weight, bias in (
            (layer.input_gate_weight, layer.input_gate_bias),
            (layer.recurrent_gate_weight, layer.recurrent_gate_bias),
        )
    ]
    with torch.no_grad():
        wanted = layer(x[None], torch.arange(ROWS)[None])

        def run(x: Tensor, input_gate: Tensor, recurrent_gate: Tensor, *rest: Tensor) -> Tensor:
            return rg_lru(x, input_gate, recurrent_gate, layer.recurrent_param, *rest)

        found, state = by_parts(run, pool_of(width), x, *gates)
    confirm(found, wanted[0])
    confirm(state, layer.recurrent_states[0])


def test_sequences_of_a_step_are_computed_alone() -> None:
    """The layout: the slots of each sequence, slot 0, and sequences without rows."""
    slots, starts = RAGGED.tensors()
    q, k, v = (random(RAGGED.num_rows, 2, 8) for _ in range(3))
    slopes, pool = random(2).abs(), random(NUM_SLOTS, 2, 8, 8).double()
    after = pool.clone()
    found = linear_attention(q, k, v, slopes, after, slots, starts)
    unchanged = set(range(1, NUM_SLOTS))
    for seq, (source, target) in enumerate(slots.tolist()):
        start, end = starts[seq : seq + 2].tolist()
        if start == end:
            continue
        state = pool[source] if source else torch.zeros_like(pool[0])
        for row in range(start, end):
            state = (-slopes).double().exp()[:, None, None] * state
            state = state + k[row].double()[:, :, None] * v[row].double()[:, None]
            torch.testing.assert_close(found[row], (q[row].double()[..., None] * state).sum(1))
        torch.testing.assert_close(after[target], state)
        unchanged -= {target}
    for slot in unchanged:
        assert torch.equal(after[slot], pool[slot])


def test_softplus_of_large_time_steps() -> None:
    """Softplus is the identity there, and its exponential would overflow."""
    x, b = torch.ones(1, 1, 1), torch.ones(1, 1, 1)
    dt, a = torch.full((1, 1), 800.0), torch.tensor([-1.0])
    pool = pool_of(1, 1, 1)
    found = selective_scan(x, dt, a, b, b, None, None, pool, *step_of(1, 0, 1).tensors())
    assert found.item() == F.softplus(dt).item() == 800
