"""The tensors that a checkpoint of a decoder holds, as its shape says."""

from __future__ import annotations

from collections.abc import Iterator

from paged_backend.checkpoint.latent import latent_tensors
from paged_backend.checkpoint.moe_tensors import moe_tensors
from paged_backend.checkpoint.shape import ModelShape, QKNormScope
from paged_backend.checkpoint.tensors import Role, Tensors, TensorSpec, linear_tensors


def decoder_tensors(shape: ModelShape) -> Tensors:
    """Return the tensors of a decoder, or of a stage of it."""
    table, stage = (shape.vocab_size, shape.hidden_size), shape.own_stage
    tensors: Tensors = {}
    reads_output_layer = stage.is_last and (shape.has_output_layer or shape.scores_by_tokens)
    if stage.is_first or (reads_output_layer and shape.tied_embeddings):
        tensors["model.embed_tokens.weight"] = TensorSpec(table, Role.EMBEDDING, shard=0)
    if reads_output_layer and not shape.tied_embeddings:
        tensors["lm_head.weight"] = TensorSpec(table, Role.HEAD, shard=0)
    if stage.is_last and shape.has_classifier:
        tensors["score.weight"] = TensorSpec((1, shape.hidden_size), Role.HEAD)
    if stage.is_last:
        tensors[f"{shape.final_norm}.weight"] = _norm(shape, shape.hidden_size)
    if shape.variant.layer_inputs is not None:
        tensors |= shape.variant.layer_inputs.model_tensors(shape.hidden_size, shape.num_layers)
    for index in stage.layers:
        for name, spec in _layer_tensors(shape, index):
            tensors[f"{shape.layer_name(index)}.{name}"] = spec
    if (names := shape.prediction) is not None:
        hidden = shape.hidden_size
        for norm in (names.embedding_norm, names.hidden_norm):
            tensors[f"{norm}.weight"] = _norm(shape, hidden)
        tensors[f"{names.projection}.weight"] = TensorSpec((hidden, 2 * hidden), Role.LINEAR)
    return tensors


def num_read_again(shape: ModelShape) -> int:
    """Return the number of weights of shared blocks that a step reads after their first use."""
    shared = shape.variant.shared_blocks
    if shared is None or not shared.layers:
        return 0
    first = shared.layers[0]
    sizes = shape.attention_sections(first), shape.sizes_of(first).intermediate_size
    return shared.num_read_again(shape.hidden_size, *sizes)


def _layer_tensors(shape: ModelShape, index: int) -> Iterator[tuple[str, TensorSpec]]:
    hidden = shape.hidden_size
    for norm in shape.variant.norms_of(index).names:
        yield f"{norm}.weight", _norm(shape, hidden)
    mixer = shape.variant.state_mixer_of(index)
    if mixer is not None:
        yield from ((f"{mixer.name}.{name}", spec) for name, spec in mixer.tensors())
    if shape.variant.shared_blocks is not None:
        if shape.variant.has_attention(index):
            sizes = shape.attention_sections(index), shape.sizes_of(index).intermediate_size
            yield from shape.variant.shared_blocks.tensors(index, hidden, *sizes)
    elif shape.variant.has_attention(index):
        module = shape.variant.names.attention
        yield from ((f"{module}.{name}", spec) for name, spec in _attention_tensors(shape, index))
    if shape.variant.layer_inputs is not None:
        yield from shape.variant.layer_inputs.layer_tensors(hidden)
    if shape.variant.layer_scalars:
        yield "layer_scalar", TensorSpec((1,), Role.NORM)
    if not shape.variant.has_mlp(index):
        return
    moe = shape.moe_of(index)
    if moe is not None:
        yield from moe_tensors(moe)
    if moe is None or moe.beside_mlp:
        yield from _mlp_tensors(shape, index)


def _attention_tensors(shape: ModelShape, index: int) -> Iterator[tuple[str, TensorSpec]]:
    hidden, biases = shape.hidden_size, shape.variant.biases
    if shape.variant.latent is not None:
        bias = biases.qkv
        yield from latent_tensors(shape.variant.latent, hidden, shape.num_heads, bias=bias)
        return
    for name, size in shape.attention_parts(index).items():
        sections = shape.attention_sections(index) if shape.variant.fused_qkv else ()
        yield from linear_tensors(name, hidden, size, biases.qkv, 0, sections)
    query = shape.attention_sections(index)[0]
    yield from linear_tensors(shape.variant.names.output, query, hidden, biases.output, shard=1)
    shard = 0 if shape.variant.qk_norm is QKNormScope.TOKEN else None
    for name, size in shape.qk_norm_sizes(index).items():
        yield f"{name}.weight", _norm(shape, size, shard)
    if shape.variant.sinks:
        yield "sinks", TensorSpec((shape.num_heads,), Role.SINKS, shard=0)


def _mlp_tensors(shape: ModelShape, index: int) -> Iterator[tuple[str, TensorSpec]]:
    hidden, inner = shape.hidden_size, shape.sizes_of(index).intermediate_size
    names, bias = shape.variant.names, shape.variant.biases.mlp
    for name, size in shape.mlp_parts(index).items():
        sections = (inner, inner) if shape.variant.fused_gate_up else ()
        yield from linear_tensors(f"{names.mlp}.{name}", hidden, size, bias, 0, sections)
    yield from linear_tensors(f"{names.mlp}.{names.down}", inner, hidden, bias, shard=1)


def _norm(shape: ModelShape, size: int, shard: int | None = None) -> TensorSpec:
    role = Role.OFFSET_NORM if shape.variant.unit_offset else Role.NORM
    return TensorSpec((size,), role, shard)
