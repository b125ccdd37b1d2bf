"""The tensors that a checkpoint holds of a mixture-of-experts layer; see `checkpoint.tensors`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, replace

from paged_backend.checkpoint.moe import ExpertLayout, MoeShape
from paged_backend.checkpoint.tensors import Role, TensorSpec, linear_tensors


def moe_tensors(moe: MoeShape) -> Iterator[tuple[str, TensorSpec]]:
    """Yield the tensors of one layer, by their names relative to the decoder layer."""
    for name, spec in _tensors(moe):
        yield (f"{moe.names.module}.{name}" if moe.names.module else name), spec


def _tensors(moe: MoeShape) -> Iterator[tuple[str, TensorSpec]]:
    """Yield the tensors of one layer, by their names relative to its module."""
    hidden, router = moe.hidden_size, moe.names.router
    yield f"{router}.weight", TensorSpec((moe.num_experts, hidden), Role.ROUTER)
    if moe.bias:
        yield f"{router}.bias", TensorSpec((moe.num_experts,), Role.BIAS)
    if moe.routing.biased:
        yield moe.names.bias, TensorSpec((moe.num_experts,), Role.BIAS)
    if moe.routing.has_factors:
        yield moe.names.factors, TensorSpec((moe.num_experts,), Role.NORM)
    if moe.beside_norms is not None:
        for name in astuple(moe.beside_norms):
            yield name, TensorSpec((hidden,), Role.NORM)
    for name, spec in _experts(moe):
        yield f"experts.{name}", spec
    if moe.latent_size is not None:
        for name, sizes in latent_projections(moe).items():
            yield f"{name}.weight", TensorSpec((sizes[1], sizes[0]), Role.LINEAR)
            if moe.outer_bias:
                yield f"{name}.bias", TensorSpec((sizes[1],), Role.BIAS)
    if moe.shared_expert is not None:
        prefix, inner = moe.names.shared, moe.shared_expert.intermediate_size
        for part in ("up_proj",) if moe.plain else ("gate_proj", "up_proj"):
            yield from linear_tensors(f"{prefix}.{part}", hidden, inner, moe.outer_bias, shard=0)
        yield from linear_tensors(f"{prefix}.down_proj", inner, hidden, moe.outer_bias, shard=1)
        if moe.shared_expert.gated:
            yield f"{prefix}_gate.weight", TensorSpec((1, hidden), Role.ROUTER)


def latent_projections(moe: MoeShape) -> dict[str, tuple[int, int]]:
    """Return the layers before and after the experts, by name, each with inputs and outputs.

    The names are those of Nemotron-H.
    """
    hidden, latent = moe.hidden_size, moe.expert_size
    return {"fc1_latent_proj": (hidden, latent), "fc2_latent_proj": (latent, hidden)}


def _experts(moe: MoeShape) -> Iterator[tuple[str, TensorSpec]]:
    match moe.names.layout:
        case ExpertLayout.SEPARATE:
            return _separate_experts(moe)
        case ExpertLayout.TURNS:
            return _experts_in_turns(moe)
        case ExpertLayout.HALVES:
            return _experts_in_halves(moe)
        case ExpertLayout.COLUMNS:
            return _experts_in_columns(moe)


def _separate_experts(moe: MoeShape) -> Iterator[tuple[str, TensorSpec]]:
    hidden, inner, names = moe.expert_size, moe.intermediate_size, moe.names
    projections = {names.up: (hidden, inner, 0), names.down: (inner, hidden, 1)}
    if not moe.plain:
        projections = {names.gate: (hidden, inner, 0), **projections}
    for expert in range(moe.num_experts):
        for name, (inputs, outputs, shard) in projections.items():
            for part, spec in linear_tensors(name, inputs, outputs, moe.bias, shard):
                role = Role.EXPERT if spec.role is Role.LINEAR else spec.role
                yield (
                    f"{expert}.{part}",
                    replace(spec, role=role, experts=range(expert, expert + 1)),
                )


def _experts_in_halves(moe: MoeShape) -> Iterator[tuple[str, TensorSpec]]:
    count, hidden, inner = moe.num_experts, moe.hidden_size, moe.intermediate_size
    shape, experts = (count, 2 * inner, hidden), range(count)
    yield "gate_up_proj", TensorSpec(shape, Role.EXPERT, 1, (inner, inner), experts=experts)
    yield "down_proj", TensorSpec((count, hidden, inner), Role.EXPERT, 2, experts=experts)


def _experts_in_columns(moe: MoeShape) -> Iterator[tuple[str, TensorSpec]]:
    count, hidden, inner = moe.num_experts, moe.hidden_size, moe.intermediate_size
    shape, experts = (count, hidden, 2 * inner), range(count)
    yield "gate_up_proj", TensorSpec(shape, Role.EXPERT, 2, (inner, inner), experts=experts)
    yield "down_proj", TensorSpec((count, inner, hidden), Role.EXPERT, 1, experts=experts)


def _experts_in_turns(moe: MoeShape) -> Iterator[tuple[str, TensorSpec]]:
    count, hidden, inner = moe.num_experts, moe.hidden_size, moe.intermediate_size
    for name, spec in {
        "gate_up_proj": TensorSpec((count, hidden, 2 * inner), Role.EXPERT, 2),
        "down_proj": TensorSpec((count, inner, hidden), Role.EXPERT, 1),
        "gate_up_proj_bias": TensorSpec((count, 2 * inner), Role.BIAS, 1),
        "down_proj_bias": TensorSpec((count, hidden), Role.BIAS, is_added_once=True),
    }.items():
        if moe.bias or spec.role is Role.EXPERT:
            yield name, replace(spec, experts=range(count))
