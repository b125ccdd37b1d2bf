"""The tensors that a checkpoint holds of a mixture-of-experts layer; see `checkpoint.tensors`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from paged_backend.checkpoint.moe import MoeShape
from paged_backend.checkpoint.tensors import Role, TensorSpec, linear_tensors


def moe_tensors(moe: MoeShape) -> Iterator[tuple[str, TensorSpec]]:
    """Yield the tensors of one layer, by their names relative to the decoder layer."""
    module, hidden = moe.names.module, moe.hidden_size
    router = f"{module}.{moe.names.router}"
    yield f"{router}.weight", TensorSpec((moe.num_experts, hidden), Role.ROUTER)
    if moe.bias:
        yield f"{router}.bias", TensorSpec((moe.num_experts,), Role.BIAS)
    if moe.routing.biased:
        yield f"{router}.{moe.names.bias}", TensorSpec((moe.num_experts,), Role.BIAS)
    experts = _fused_experts(moe) if moe.names.fused else _separate_experts(moe)
    for name, spec in experts:
        yield f"{module}.experts.{name}", spec
    if moe.shared_expert is not None:
        prefix, inner = f"{module}.{moe.names.shared}", moe.shared_expert.intermediate_size
        for part in ("gate_proj", "up_proj"):
            yield from linear_tensors(f"{prefix}.{part}", hidden, inner, False, shard=0)
        yield from linear_tensors(f"{prefix}.down_proj", inner, hidden, False, shard=1)
        if moe.shared_expert.gated:
            yield f"{prefix}_gate.weight", TensorSpec((1, hidden), Role.ROUTER)


def _separate_experts(moe: MoeShape) -> Iterator[tuple[str, TensorSpec]]:
    hidden, inner, names = moe.hidden_size, moe.intermediate_size, moe.names
    projections = {
        names.gate: (hidden, inner, 0),
        names.up: (hidden, inner, 0),
        names.down: (inner, hidden, 1),
    }
    for expert in range(moe.num_experts):
        for name, (inputs, outputs, shard) in projections.items():
            for part, spec in linear_tensors(name, inputs, outputs, moe.bias, shard):
                role = Role.EXPERT if spec.role is Role.LINEAR else spec.role
                yield (
                    f"{expert}.{part}",
                    replace(spec, role=role, experts=range(expert, expert + 1)),
                )


def _fused_experts(moe: MoeShape) -> Iterator[tuple[str, TensorSpec]]:
    count, hidden, inner = moe.num_experts, moe.hidden_size, moe.intermediate_size
    for name, spec in {
        "gate_up_proj": TensorSpec((count, hidden, 2 * inner), Role.EXPERT, 2),
        "down_proj": TensorSpec((count, inner, hidden), Role.EXPERT, 1),
        "gate_up_proj_bias": TensorSpec((count, 2 * inner), Role.BIAS, 1),
        "down_proj_bias": TensorSpec((count, hidden), Role.BIAS, is_added_once=True),
    }.items():
        if moe.bias or spec.role is Role.EXPERT:
            yield name, replace(spec, experts=range(count))
