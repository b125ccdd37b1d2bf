"""Which architectures the decoder covers, and in what each differs from Llama."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.validation import shorten

Windows = tuple[int | None, ...]
"""For each layer the number of positions a token sees, its own included; None for all."""


@dataclass(frozen=True, slots=True)
class Biases:
    """Which linear layers add a bias."""

    qkv: bool = False
    output: bool = False  # of the attention
    mlp: bool = False


@dataclass(frozen=True, slots=True)
class Architecture:
    """How to read from config.json what differs between architectures."""

    biases: Callable[[ConfigFile], Biases]
    windows: Callable[[ConfigFile, int], Windows]  # of so many layers
    qk_norm: bool = False
    head_dim: int | None = None  # where config.json has none; None: hidden_size / num_heads


def _llama_biases(config: ConfigFile) -> Biases:
    attention = config.flag("attention_bias", False)
    return Biases(qkv=attention, output=attention, mlp=config.flag("mlp_bias", False))


def _qwen3_biases(config: ConfigFile) -> Biases:
    attention = config.flag("attention_bias", False)
    return Biases(qkv=attention, output=attention)


def _no_windows(config: ConfigFile, num_layers: int) -> Windows:
    return (None,) * num_layers


def _same_window(config: ConfigFile, num_layers: int) -> Windows:
    # An absent key means Mistral 7B's window, null means none.
    if "sliding_window" in config and config.value("sliding_window") is None:
        return (None,) * num_layers
    return (config.integer("sliding_window", 4096),) * num_layers


def _windows_by_layer(config: ConfigFile, num_layers: int) -> Windows:
    if not config.flag("use_sliding_window", False):
        return (None,) * num_layers
    window = config.integer("sliding_window", 4096)
    kinds = config.value("layer_types")
    if kinds is None:
        first = config.integer("max_window_layers", 28, low=0)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    known = {"full_attention": None, "sliding_attention": window}
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise config.error("layer_types", f"must be a list of {num_layers} strings")
    for kind in kinds:
        if kind not in known:
            raise config.error("layer_types", f"holds {shorten(kind)}; known: {', '.join(known)}")
    return tuple(known[kind] for kind in kinds)


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(_llama_biases, _no_windows),
    "MistralForCausalLM": Architecture(lambda config: Biases(), _same_window),
    "Qwen2ForCausalLM": Architecture(lambda config: Biases(qkv=True), _windows_by_layer),
    "Qwen3ForCausalLM": Architecture(_qwen3_biases, _windows_by_layer, qk_norm=True, head_dim=128),
}


def find_architecture(config: ConfigFile) -> Architecture:
    """The architecture that a config.json names.

    Raises:
        ConfigError: the decoder does not cover it; the message lists those it covers.
    """
    names = config.value("architectures")
    if isinstance(names, list):
        for name in names:
            if isinstance(name, str) and name in ARCHITECTURES:
                return ARCHITECTURES[name]
    covered = ", ".join(ARCHITECTURES)
    raise config.error("architectures", f"must be one of {covered}; got {shorten(names)}")
