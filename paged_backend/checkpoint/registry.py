"""The supported architectures, by the names that config.json gives them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.shape import Biases, ModelShape, Windows
from paged_backend.checkpoint.tensors import Tensors, decoder_tensors
from paged_backend.validation import shorten


def _no_biases(config: ConfigFile) -> Biases:
    return Biases()


def _no_windows(config: ConfigFile, num_layers: int) -> Windows:
    return (None,) * num_layers


@dataclass(frozen=True, slots=True)
class Architecture:
    """Describes how to read the checkpoints of a model family and how to build its models.

    Attributes:
        biases: reads which linear layers have a bias.
        windows: reads each layer's window, given the number of layers.
        qk_norm: whether queries and keys are normed head by head.
        head_dim: where config.json has none; None stands for hidden_size / num_heads.
        tensors: the tensors that a checkpoint of a shape holds.
        model: the class that implements :class:`~paged_backend.models.base.Model`, as
            ``module:Class``; it is imported when a model is loaded, as it needs torch.
    """

    biases: Callable[[ConfigFile], Biases] = _no_biases
    windows: Callable[[ConfigFile, int], Windows] = _no_windows
    qk_norm: bool = False
    head_dim: int | None = None
    tensors: Callable[[ModelShape], Tensors] = decoder_tensors
    model: str = "paged_backend.models.llama:LlamaModel"


def _llama_biases(config: ConfigFile) -> Biases:
    attention = config.flag("attention_bias", False)
    return Biases(qkv=attention, output=attention, mlp=config.flag("mlp_bias", False))


def _qwen3_biases(config: ConfigFile) -> Biases:
    attention = config.flag("attention_bias", False)
    return Biases(qkv=attention, output=attention)


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
    "LlamaForCausalLM": Architecture(_llama_biases),
    "MistralForCausalLM": Architecture(windows=_same_window),
    "Qwen2ForCausalLM": Architecture(lambda config: Biases(qkv=True), _windows_by_layer),
    "Qwen3ForCausalLM": Architecture(_qwen3_biases, _windows_by_layer, qk_norm=True, head_dim=128),
}


def register_architecture(name: str, architecture: Architecture) -> None:
    """Add a family of models, or replace one.

    Args:
        name: an entry of ``architectures`` in config.json.
        architecture: how checkpoints of the family are read and built.
    """
    ARCHITECTURES[name] = architecture


def find_architecture(config: ConfigFile) -> str:
    """Return the name of the first supported architecture that a config.json names.

    Raises:
        ConfigError: none is supported; the message lists the supported ones.
    """
    names = config.value("architectures")
    if isinstance(names, list):
        for name in names:
            if isinstance(name, str) and name in ARCHITECTURES:
                return name
    supported = ", ".join(ARCHITECTURES)
    raise config.error("architectures", f"must be one of {supported}; got {shorten(names)}")


def tensors_of(shape: ModelShape) -> Tensors:
    """Return the tensors that a checkpoint of this shape holds."""
    return ARCHITECTURES[shape.architecture].tensors(shape)
