"""The metadata of a GGUF file as the values of a config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.gguf.header import GgufFile, read_header
from paged_backend.checkpoint.gguf.names import ROPE_DIVISORS, check_tensors
from paged_backend.checkpoint.gguf.values import read_values
from paged_backend.checkpoint.gguf.vocabulary import end_tokens, read_tokens
from paged_backend.checkpoint.shape_reader import read_shape
from paged_backend.values.validation import shorten

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_WINDOWED = {"llama": "MistralForCausalLM"}  # what has a window in each layer

_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
}
# Settings that no family implements, each with the values that mean "off".
_OFF: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "attention.causal": (True,),
    **dict.fromkeys(("attention.scale", "attention.clamp_kqv"), (0,)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), (0,)),
    **dict.fromkeys(("logit_scale", "embedding_scale", "residual_scale"), (0, 1)),
    **dict.fromkeys(("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"), (1,)),
    "rope.scaling.yarn_ext_factor": (-1, 1),
    **dict.fromkeys(("rope.scaling.yarn_log_multiplier", "rope.scaling.alpha"), (0,)),
}
_SCALINGS = ("none", "linear", "yarn")
_YARN = {
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
_MAX_DIVISORS_BYTES = 2**14


def read_gguf_config(path: Path) -> ConfigFile:
    """Read a GGUF file's metadata as a config.json, and check them against the file's tensors.

    Raises:
        ConfigError: a key or tensor is missing or wrong, or the model is not supported.
    """
    file = read_header(path)
    config = gguf_config(file)
    check_tensors(file, read_shape(config))
    return config


GGUF_POOLING = "gguf_pooling_type"
"""Our name for the key that says how a file's model makes embeddings, a number."""


def gguf_config(file: GgufFile) -> ConfigFile:
    """Convert the metadata of a file to the values of a config.json.

    Raises:
        ConfigError: a key is missing or wrong, or the model is not supported.
    """
    metadata = file.metadata
    name = metadata.text("general.architecture", "", _ARCHITECTURES)
    keys = _keys_of(file, name)
    _check_off(keys)
    _check_num_layers(keys, file)
    values: dict[str, Any] = {ours: keys.integer(theirs) for theirs, ours in _SIZES.items()}
    values |= {
        "architectures": [_architecture(keys, name)],
        "vocab_size": len(read_tokens(metadata)) or keys.integer("vocab_size"),
        "num_key_value_heads": keys.value("attention.head_count_kv"),
        "head_dim": _head_dim(keys),
        "sliding_window": keys.value("attention.sliding_window") or None,
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.value("rope.freq_base"),
        "rope_scaling": _rope_scaling(file, keys),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "dtype": _dtype(file),
        "eos_token_id": list(end_tokens(metadata)),
        "quantization_config": {"quant_method": "gguf"},
        GGUF_POOLING: keys.value("pooling_type"),
    }
    return ConfigFile(values, str(file.path))


def _keys_of(file: GgufFile, name: str) -> ConfigFile:
    """Return the keys that begin with a name, without it."""
    metadata, prefix = file.metadata, f"{name}."
    values = {
        key.removeprefix(prefix): metadata.value(key)
        for key in metadata.keys()
        if key.startswith(prefix)
    }
    return ConfigFile(values, f"{file.path}: {name}")


def _check_off(keys: ConfigFile) -> None:
    for key, off in _OFF.items():
        if keys.value(key) not in (None, *off):
            raise keys.error(key, f"is {shorten(keys.value(key))}, which is not supported")


def _check_num_layers(keys: ConfigFile, file: GgufFile) -> None:
    """Check that the last layer is there, before something is made for each of them."""
    num_layers = keys.integer("block_count")
    last = f"blk.{num_layers - 1}.attn_norm.weight"
    if last not in file.tensors:
        raise keys.error("block_count", f"is {num_layers}, but {last} is missing")


def _architecture(keys: ConfigFile, name: str) -> str:
    if not keys.value("attention.sliding_window"):
        return _ARCHITECTURES[name]
    if name not in _WINDOWED:
        raise keys.error("attention.sliding_window", f"is not supported for {name}")
    return _WINDOWED[name]


def _head_dim(keys: ConfigFile) -> int:
    num_heads, hidden_size = keys.integer("attention.head_count"), keys.integer("embedding_length")
    head_dim = keys.integer("attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.integer(key, head_dim) != head_dim:
            raise keys.error(key, f"must be the {head_dim} of a head, got {keys.value(key)}")
    return head_dim


def _rope_scaling(file: GgufFile, keys: ConfigFile) -> dict[str, Any] | None:
    factor = keys.value("rope.scaling.factor") or keys.value("rope.scale_linear")
    kind = keys.text("rope.scaling.type", "linear" if factor else "none", _SCALINGS)
    divisors = file.tensors.get(ROPE_DIVISORS)
    if divisors is None:
        if kind == "none":
            return None
        others = {ours: keys.value(f"rope.scaling.{theirs}") for theirs, ours in _YARN.items()}
        return {"rope_type": kind, "factor": factor, **others}
    if kind != "none":
        raise keys.error("rope.scaling.type", f"must be none beside {ROPE_DIVISORS}, got {kind}")
    if divisors.num_bytes > _MAX_DIVISORS_BYTES:
        raise keys.error(ROPE_DIVISORS, f"has {divisors.num_bytes} bytes, too many")
    values = read_values(file.path, divisors)
    return {"rope_type": "divided", "divisors": values.flatten().tolist()}


def _dtype(file: GgufFile) -> str:
    """Return the dtype of the original weights, as far as the file shows it."""
    kinds = {tensor.kind.name for tensor in file.tensors.values()}
    if kinds <= {"F32"}:
        return "float32"
    return "float16" if kinds <= {"F32", "F16"} else "bfloat16"
