"""The functions on rows of hidden states in plain torch, for any device and dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_backend.checkpoint.moe import ExpertGroups, Routing, Scoring
from paged_backend.checkpoint.shape import Activation
from paged_backend.models.linear import LinearMethod, RowFunction


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row of `x` [rows, size] to a root mean square of 1, then by `weight` [size].

    The weight has the dtype of `x` or is float32.
    """
    return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Bring each row of `x` [rows, size] to a mean of 0 and a variance of 1, then scale and shift.

    `weight` and `bias` [size] have the dtype of `x`.
    """
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def add_norm(
    hidden: Tensor,
    linear: RowFunction,
    x: Tensor,
    weight: Tensor,
    eps: float,
    reader: LinearMethod | None = None,
) -> Tensor:
    """Add `linear(x)` to `hidden` [rows, size] in place; returns the norm of the sum."""
    linear.add_to(hidden, x)
    return rms_norm(hidden, weight, eps)


def norm_heads(qkv: Tensor, weight: Tensor, eps: float) -> None:
    """Apply the RMS norm to each query and key head of `qkv`, in place.

    `qkv` [rows, size] has the query heads, the key heads and the value heads of each token, with
    `head_dim` values each. `weight` [num_heads, head_dim] has a row for each query and key head.
    """
    num_heads, head_dim = weight.shape
    heads = qkv.view(len(qkv), qkv.shape[1] // head_dim, head_dim)[:, :num_heads]
    torch.mul(F.rms_norm(heads, (head_dim,), None, eps), weight, out=heads)


def gated(linear: RowFunction, x: Tensor, activation: Activation) -> Tensor:
    """Compute activation(gate) * up for the two halves of each row of `linear(x)`."""
    return _ACTIVATIONS[activation](linear(x))


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for the two halves of each row of `gate_up` [rows, 2 * size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """The same with GELU, approximated by a hyperbolic tangent, instead of SiLU."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


_ACTIVATIONS = {Activation.SILU: silu_and_mul, Activation.GELU_TANH: gelu_tanh_and_mul}


def gelu(x: Tensor) -> Tensor:
    """Compute x times the cumulative distribution of the normal distribution at x."""
    return F.gelu(x)


def add_gated(out: Tensor, x: Tensor, gate: Tensor) -> None:
    """Add x * sigmoid(gate) to `out` in place; both are [rows, size], `gate` is [rows, 1]."""
    out += x * _sigmoid(gate.float()).to(x.dtype)


def add(out: Tensor, x: Tensor) -> None:
    """Add `x` to `out` in place; both are [rows, size]."""
    out += x


def multiply_silu(out: Tensor, gate: Tensor) -> None:
    """Multiply `out` by silu(gate) in place; both are [rows, size]."""
    out *= F.silu(gate)


def multiply_sigmoid(out: Tensor, gate: Tensor) -> None:
    """Multiply `out` by sigmoid(gate) in place; both are [rows, size]."""
    out *= gate.sigmoid()


def choose_experts(
    logits: Tensor, routing: Routing, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the experts of each row, for `logits` [rows, num_experts].

    They are the ids int32 and weights float32, [rows, num_experts_per_tok] each. The expert with
    the largest score comes first; of equal ones, the expert with the lowest id does. A score is the
    expert's weight plus its `bias` [num_experts] float32, if there is one.
    """
    if bias is not None or routing.groups is not None:
        ids, weights = _choose_by_score(logits.float(), routing, bias)
    else:
        ids, weights = _choose_by_logit(logits.float(), routing)
    if routing.norm_topk_prob:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return ids.int(), weights if routing.scale == 1 else weights * routing.scale


def _choose_by_score(
    logits: Tensor, routing: Routing, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    is_sigmoid = routing.scoring is Scoring.SIGMOID
    weights = _sigmoid(logits) if is_sigmoid else logits.softmax(dim=-1)
    scores = weights if bias is None else weights + bias
    if routing.groups is not None:
        scores = scores.masked_fill(~_in_chosen_groups(scores, routing.groups), -torch.inf)
    ids = scores.sort(dim=-1, descending=True, stable=True)[1][:, : routing.num_experts_per_tok]
    return ids, weights.gather(1, ids)


def _in_chosen_groups(scores: Tensor, groups: ExpertGroups) -> Tensor:
    """Return whether each expert is in one of its row's groups, [rows, num_experts] bool."""
    rows, num_experts = scores.shape
    members = scores.view(rows, groups.count, num_experts // groups.count)
    totals = members.topk(groups.num_scored, dim=-1)[0].sum(dim=-1)
    chosen = totals.sort(dim=-1, descending=True, stable=True)[1][:, : groups.chosen]
    is_chosen = torch.zeros_like(totals, dtype=torch.bool).scatter(1, chosen, True)
    return is_chosen.unsqueeze(2).expand_as(members).flatten(1)


def _choose_by_logit(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    top_k = routing.num_experts_per_tok
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    chosen, ids = ordered[:, :top_k], ids[:, :top_k]
    if routing.scoring is Scoring.SOFTMAX_OF_TOP:
        weights = chosen.softmax(dim=-1)
    elif routing.scoring is Scoring.SIGMOID:
        weights = _sigmoid(chosen)
    else:
        weights = logits.softmax(dim=-1).gather(1, ids)
    return ids, weights


def multiply_heads(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """Multiply `x` [rows, heads, inputs] by `weight` [heads, inputs, outputs], head by head.

    The products are written to `out` [rows, heads, outputs].
    """
    torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))


def _sigmoid(x: Tensor) -> Tensor:
    """Compute the sigmoid as a softmax: its bits do not depend on a number's place in memory."""
    return torch.stack((x, torch.zeros_like(x)), dim=-1).softmax(dim=-1)[..., 0]
