"""The names that tools give to the same tensor; docs/quantization.md has them as a table."""

from __future__ import annotations

import re
from collections.abc import Container

# Tensors of a checkpoint that a model may not need: a tied output layer, rotary tables, and
# MiniMax's decays, which depend on nothing but the layer and the head.
_IGNORED = (
    *("lm_head.weight", "rotary_emb.inv_freq", ".self_attn.slope_rate"),
    *(f".self_attn.{part}_decay" for part in ("query", "key", "diagonal")),
)
# How the names of modules begin that a text model does without: those for images, videos and
# sounds, and MTP layers.
_OTHER_PARTS = (
    *("vision_tower.", "vision_model.", "visual.", "multi_modal_projector.", "embed_vision."),
    *("connector.", "image_newline", "audio_tower.", "embed_audio.", "mtp."),
)
# How names begin in checkpoints that leave out the prefix.
_BASE_NAMES = (
    *("embed_tokens.", "layers.", "norm.", "embed_tokens_per_layer.", "per_layer_"),
    *("embedding_norm.", "final_layernorm.", "final_norm.", "norm_f."),  # families' last norms
)
# Other prefixes, of text models beside others, of Mamba and Nemotron-H, and names of modules, of
# OLMo Hybrid and Granite's experts. The MLPs of Kimi Linear are renamed by transformers 5 when it
# saves a model.
_OTHER_PREFIXES = {
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "backbone.embeddings.": "model.embed_tokens.",
    "backbone.embedding.": "model.embed_tokens.",  # older files of Mamba
    "embeddings.weight": "model.embed_tokens.weight",
    "backbone.": "model.",
}
_OTHER_MODULES = {
    ".attention_layer_norm.": ".input_layernorm.",
    ".feedforward_layer_norm.": ".post_attention_layernorm.",
    ".block_sparse_moe.input_linear.weight": ".block_sparse_moe.experts.gate_up_proj",
    ".block_sparse_moe.output_linear.weight": ".block_sparse_moe.experts.down_proj",
    ".block_sparse_moe.router.layer.": ".block_sparse_moe.router.",
    **{f".block_sparse_moe.{part}_proj.": f".mlp.{part}_proj." for part in ("gate", "up", "down")},
}
# Names of modules in classes of transformers that save them by other names (Kimi Linear).
_RENAMED_MODULES = {".mlp.shared_experts.": ".block_sparse_moe.shared_experts."}
_QUERY_SCALES = re.compile(
    r".*\.self_attn\.(?:q_proj\.(?:output|q)_scale|(?:attn\.)?(?:q|prob|prob_output)_scale|q\.scale)"
)
# The scales of keys, of values, or of both.
_KV_SCALES = (
    re.compile(r"(?P<layer>.*\.self_attn)\.(?:attn\.)?(?P<kind>k|v|kv)_scale"),
    re.compile(r"(?P<layer>.*\.self_attn)\.(?P<kind>[kv])_proj\.(?:output|[kv])_scale"),
    re.compile(r"(?P<layer>.*\.self_attn)\.(?:qkv|qkqkv)_proj\.(?P<kind>[kv])_scale"),
    re.compile(r"(?P<layer>.*\.self_attn)\.(?P<kind>[kv])_cache\.scale"),
)
_SYNONYMS = {
    "weight_scale": "weight_scale_inv",
    "weight_scale_inv": "weight_scale",
    **dict.fromkeys(("activation_scale", "act_scale", "input_scale_inv"), "input_scale"),
}


def usual_name(name: str) -> str:
    """Return a tensor's name with the prefix ``model.``, added if it is missing.

    Checkpoints of models without an output layer leave the prefix out. A few families have another
    prefix, or other names of norms.
    """
    for module, usual in _OTHER_MODULES.items():
        name = name.replace(module, usual)
    for prefix, usual in _OTHER_PREFIXES.items():
        if name.startswith(prefix):
            return usual + name[len(prefix) :]
    return f"model.{name}" if name.startswith(_BASE_NAMES) else name


def module_name(name: str, known: Container[str]) -> str:
    """Return the name of a module as checkpoints have it, given as adapters name it.

    They have the names of the class in transformers, which may differ.

    Args:
        name: the name in an adapter.
        known: the names of the model's modules.
    """
    name = usual_name(name)
    for part, stored in _RENAMED_MODULES.items():
        if name not in known and name.replace(part, stored) in known:
            return name.replace(part, stored)
    return name


def targets(name: str, known: Container[str]) -> list[str]:
    """Return which known tensors a tensor of a checkpoint stands for.

    Args:
        name: the name in the checkpoint.
        known: the names of the model's tensors, as transformers or compressed-tensors spell them.

    Returns:
        Both scales of a layer for one scale of keys and values; empty if no known tensor is meant.
    """
    name = usual_name(name)
    layer, _, suffix = name.rpartition(".")
    names = [name], [f"{layer}.{_SYNONYMS.get(suffix, suffix)}"], _kv_scales(name)
    return next((found for found in names if found and all(one in known for one in found)), [])


def is_ignored(name: str) -> bool:
    """Return whether a model may do without a tensor of a checkpoint."""
    name = usual_name(name)
    if name.removeprefix("model.").startswith(_OTHER_PARTS):
        return True
    is_scale = _QUERY_SCALES.fullmatch(name) is not None or bool(_kv_scales(name))
    return is_scale or name.endswith(_IGNORED)


def _kv_scales(name: str) -> list[str]:
    match = next(filter(None, (pattern.fullmatch(name) for pattern in _KV_SCALES)), None)
    return [] if match is None else [f"{match['layer']}.{kind}_scale" for kind in match["kind"]]
