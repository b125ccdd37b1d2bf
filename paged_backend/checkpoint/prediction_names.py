"""The names of the modules of an MTP layer."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from paged_backend.checkpoint.tensor_names import usual_name

# Modules with copies of the model's embedding and output layer, which files may have.
_COPIES = (".embed_tokens.", ".shared_head.head.")


@dataclass(frozen=True, slots=True)
class PredictionNames:
    """The names of the modules of an MTP layer in a checkpoint.

    Attributes:
        layer: a layer like those of the model.
        embedding_norm: the norm of the embeddings that it begins with.
        hidden_norm: the norm of hidden states that it begins with.
        projection: makes the layer's input of both.
        final_norm: the norm after the layer.
    """

    layer: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    final_norm: str

    @classmethod
    def after_layers(cls, number: int) -> PredictionNames:
        """Return the names that DeepSeek V3 uses: the layer has the next number."""
        layer = f"model.layers.{number}"
        norms = f"{layer}.enorm", f"{layer}.hnorm"
        return cls(layer, *norms, f"{layer}.eh_proj", f"{layer}.shared_head.norm")

    @classmethod
    def in_module(cls, name: str) -> PredictionNames:
        """Return the names that Qwen3-Next uses: everything is in one module."""
        norms = f"{name}.pre_fc_norm_embedding", f"{name}.pre_fc_norm_hidden"
        return cls(f"{name}.layers.0", *norms, f"{name}.fc", f"{name}.norm")

    def has(self, name: str) -> bool:
        """Return whether a tensor of the checkpoint belongs to one of the modules."""
        name, modules = usual_name(name), tuple(f"{module}." for module in astuple(self))
        return name.startswith(modules) and not any(copy in name for copy in _COPIES)
