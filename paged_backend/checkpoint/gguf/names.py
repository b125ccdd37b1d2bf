"""The names of tensors in GGUF files."""

from __future__ import annotations

import re

from paged_backend.checkpoint.gguf.header import GgufFile
from paged_backend.checkpoint.registry import tensors_of
from paged_backend.checkpoint.shape import ModelShape
from paged_backend.values.errors import ConfigError
from paged_backend.values.validation import shorten

ROPE_DIVISORS = "rope_freqs.weight"

_OF_MODEL = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
_OF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NAME = re.compile(r"(?:model\.)?(?:layers\.(\d+)\.)?(.+)\.(weight|bias)")


def gguf_name(name: str) -> str:
    """Return the name in GGUF files of a tensor that Hugging Face calls `name`."""
    match = _NAME.fullmatch(name)
    assert match is not None
    layer, module, suffix = match.groups()
    if layer is None:
        return f"{_OF_MODEL[module]}.{suffix}"
    return f"blk.{layer}.{_OF_LAYER[module]}.{suffix}"


def check_tensors(file: GgufFile, shape: ModelShape) -> None:
    """Check that a file holds the tensors of a model, with their shapes, and no others.

    Raises:
        ConfigError: naming the tensor.
    """
    specs = {gguf_name(name): spec for name, spec in tensors_of(shape).items()}
    for name, spec in specs.items():
        tensor = file.tensors.get(name)
        if tensor is None:
            raise ConfigError(f"{file.path}: tensor {name} is missing")
        if tensor.shape != spec.shape:
            raise ConfigError(
                f"{file.path}: tensor {name} has shape {list(tensor.shape)}, but the metadata ask "
                f"for {list(spec.shape)}"
            )
    for name in file.tensors:
        if name not in specs and name != ROPE_DIVISORS:
            raise ConfigError(
                f"{file.path}: tensor {shorten(name, 100, quote=False)} has no place in this "
                "architecture"
            )
