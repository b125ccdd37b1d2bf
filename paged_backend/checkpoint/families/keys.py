"""Keys of config.json that several families read."""

from __future__ import annotations

from typing import Any, NamedTuple

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.limits import MAX_WINDOW
from paged_backend.checkpoint.shape import Biases, Rotary, Windows
from paged_backend.values.validation import shorten

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
CHUNKED, CONVOLUTION = "chunked_attention", "conv"


class ActivationKey(NamedTuple):
    """The key of config.json with the activation of the MLP, and its names that we implement.

    They are names in transformers of one function, with implementations that round differently.
    """

    key: str
    names: tuple[str, ...]

    def is_computed(self, config: ConfigFile) -> bool:
        """Return whether a file names an activation that we implement, or none."""
        return config.value(self.key) in (None, *self.names)


SILU = ActivationKey("hidden_act", ("silu", "swish"))
GELU = ActivationKey("hidden_act", ("gelu",))
RELU2 = ActivationKey("mlp_hidden_act", ("relu2",))
GELU_TANH = ActivationKey(
    "hidden_activation",
    ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate", "gelu_python_tanh"),
)
# Keys of the rotary embedding that files may have outside of its section.
_OUTER_ROPE_KEYS = "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"


def attention_biases(config: ConfigFile) -> Biases:
    """Read the flag for biases of queries, keys, values and the output of attention."""
    attention = config.flag("attention_bias", False)
    return Biases(qkv=attention, output=attention)


def all_biases(config: ConfigFile) -> Biases:
    """Read the flags for biases in attention and in the MLP."""
    attention = config.flag("attention_bias", False)
    return Biases(qkv=attention, output=attention, mlp=config.flag("mlp_bias", False))


def layer_types(
    config: ConfigFile, default: tuple[str, ...], known: tuple[str, ...] = (FULL, SLIDING)
) -> tuple[str, ...]:
    """Read each layer's kind of attention.

    Args:
        config: the file.
        default: the kind of each layer, if the file does not say.
        known: the kinds that the family has.
    """
    kinds = config.value("layer_types")
    if kinds is None:
        return default
    if not isinstance(kinds, list) or len(kinds) != len(default):
        raise config.error("layer_types", f"must be a list of {len(default)} strings")
    for kind in kinds:
        if kind not in known:
            names = ", ".join(known)
            raise config.error("layer_types", f"holds {shorten(kind)}; known: {names}")
    return tuple(kinds)


def last_of_each(period: int, num_layers: int) -> tuple[str, ...]:
    """Return kinds of layers of which the last one of each period has full attention."""
    return tuple(FULL if layer % period == period - 1 else SLIDING for layer in range(num_layers))


def windows_of(config: ConfigFile, kinds: tuple[str, ...], default: int | None = None) -> Windows:
    """Return the window of each layer: ``sliding_window`` where its kind is `SLIDING`."""
    if SLIDING not in kinds:
        return (None,) * len(kinds)
    window = config.integer("sliding_window", default, high=MAX_WINDOW)
    return tuple(window if kind == SLIDING else None for kind in kinds)


def one_window(config: ConfigFile, num_layers: int, default: int | None = None) -> Windows:
    """Read a window of all layers; null in the file means none, a missing key the default."""
    if "sliding_window" in config and config.value("sliding_window") is None:
        return (None,) * num_layers
    if "sliding_window" not in config and default is None:
        return (None,) * num_layers
    return (config.integer("sliding_window", default, high=MAX_WINDOW),) * num_layers


def rotated_layers(config: ConfigFile, num_layers: int) -> tuple[bool, ...]:
    """Read which layers have a rotary embedding; despite its name, the list has 1 for those."""
    flags = config.value("no_rope_layers")
    if flags is None:
        interval = config.integer("no_rope_layer_interval", 4)
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    is_list = isinstance(flags, list) and len(flags) >= num_layers
    if not is_list or not all(flag in (0, 1) for flag in flags):
        problem = f"must be a list of {num_layers} numbers, 0 or 1, got {shorten(flags)}"
        raise config.error("no_rope_layers", problem)
    return tuple(bool(flag) for flag in flags[:num_layers])


def rope_section(config: ConfigFile, **defaults: Any) -> ConfigFile:
    """Return the keys of the rotary embedding, from either form that transformers writes.

    Version 5 writes ``rope_parameters``; older files have ``rope_scaling`` next to the other keys.

    Args:
        config: the file.
        defaults: values of keys that both forms lack.
    """
    section = config.section("rope_scaling") or config.section("rope_parameters")
    outer = {key: config.value(key) for key in _OUTER_ROPE_KEYS if config.value(key) is not None}
    return (section or config.with_only()).with_defaults(**defaults | outer)


def rotary_by_kind(
    config: ConfigFile, kinds: tuple[str, ...], older: dict[str, ConfigFile]
) -> Rotary:
    """Read a rotary embedding for each kind of attention.

    transformers 5 writes an object for each kind into ``rope_parameters``.

    Args:
        config: the file.
        kinds: the kind of each layer.
        older: the keys of each kind in files of older versions.
    """
    parameters = config.section("rope_parameters")
    if parameters is None or not any(kind in parameters for kind in older):
        return Rotary(tuple(older[kind] for kind in kinds))
    sections = {}
    for kind, keys in older.items():
        section = parameters.section(kind) or parameters.with_only()
        sections[kind] = section.with_defaults(rope_theta=keys.value("rope_theta"))
    return Rotary(tuple(sections[kind] for kind in kinds))


def rotary_dim(config: ConfigFile, head_dim: int, default: float = 1.0) -> int:
    """Read how many dimensions of a head are rotated.

    Args:
        config: the file.
        head_dim: size of a head.
        default: the part of a head, if the file does not say.
    """
    section = rope_section(config, partial_rotary_factor=default)
    dim = int(head_dim * section.number("partial_rotary_factor"))
    if not 2 <= dim <= head_dim or dim % 2:
        raise section.error(
            "partial_rotary_factor", f"must give an even number from 2 to {head_dim}, got {dim}"
        )
    return dim
