"""The sizes of a decoder and the variants of its layers, as values; no tensors here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.factors import LayerFactors, QueryGrowth, ResidualFactors
from paged_backend.checkpoint.latent import LatentShape
from paged_backend.checkpoint.layer_sizes import LayerInputs, LayerSizes
from paged_backend.checkpoint.mixers import StateMixer
from paged_backend.checkpoint.moe import MoeShape
from paged_backend.checkpoint.prediction_names import PredictionNames
from paged_backend.checkpoint.shared_blocks import BLOCK, SharedBlocks
from paged_backend.checkpoint.stages import Stage, layer_of
from paged_backend.values.kv_cache_groups import KVSizes
from paged_backend.values.windows import Window

_KEYS_AND_VALUES = re.compile(r"\.self_attn\.[kv]_(proj|norm)\.")

Windows = tuple[Window | None, ...]
"""For each layer the positions that a token sees; None for all up to its own."""


@dataclass(frozen=True, slots=True)
class Biases:
    """The linear layers that have a bias."""

    qkv: bool = False
    output: bool = False  # output projection of the attention
    mlp: bool = False


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """The checkpoint's names of a layer's norms; None where a layer has no norm.

    Attributes:
        attention_input: norm on the hidden states that attention reads.
        attention_output: norm on the output of attention, before it is added to the hidden states.
        mlp_input: norm on the hidden states that the MLP reads.
        mlp_output: norm on the output of the MLP, before it is added to the hidden states.
    """

    attention_input: str | None = "input_layernorm"
    attention_output: str | None = None
    mlp_input: str | None = "post_attention_layernorm"
    mlp_output: str | None = None

    @property
    def names(self) -> list[str]:
        """The names of the norms that exist."""
        norms = self.attention_input, self.attention_output, self.mlp_input, self.mlp_output
        return [name for name in norms if name is not None]


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """The checkpoint's names of modules; those of layers are relative to a layer.

    Attributes:
        attention: the attention.
        output: the last linear layer of attention, there.
        q_norm: the norm of queries, there.
        k_norm: the norm of keys, there.
        mlp: the MLP.
        gate: its gate projection.
        up: its up projection.
        gate_up: both of these where one weight has them.
        down: its down projection.
        final_norm: the norm after the last layer, in ``model``.
    """

    attention: str = "self_attn"
    output: str = "o_proj"
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    mlp: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    gate_up: str = "gate_up_proj"
    down: str = "down_proj"
    final_norm: str = "norm"


class QKNormScope(Enum):
    """The numbers that share an RMS norm of the queries, or of the keys."""

    HEAD = "head"  # each head
    TOKEN = "token"  # all heads of a token together
    # each head, without a weight, in layers with a rotary embedding (Llama 4)
    ROTATED_HEAD = "rotated_head"


class Activation(Enum):
    """The function of the gate in the MLP, by its name in Hugging Face's configurations."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True)
class Rotary:
    """The rotary position embedding of the layers.

    Attributes:
        sections: the keys that describe the embedding of each layer; None for a layer without one.
            Empty if config.json itself has the keys for all layers.
        dim: the first dimensions of a head that are rotated; None for the whole head.
        interleaved: pairs are neighbors (2i, 2i + 1) instead of (i, i + dim / 2).
        within_positions: scaling does not extend ``max_position_embeddings``, which includes it.
    """

    sections: tuple[ConfigFile | None, ...] = ()
    dim: int | None = None
    interleaved: bool = False
    within_positions: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Everything but sizes in which decoders differ; the defaults are Llama's.

    Attributes:
        biases: the linear layers that have a bias.
        windows: window of each layer; empty if no layer has a window.
        norms: the norms of each layer.
        layer_norms: the norms of each layer where they differ; empty if all layers have `norms`.
        names: the names of modules.
        unit_offset: the weights of norms are stored minus 1.
        qk_norm: the norm of queries and keys; None for no norm.
        activation: activation of the MLP.
        rotary: the rotary position embedding.
        query_growth: factors on the queries; None for no factors.
        fused_qkv: the checkpoint stores the weights of queries, keys and values as ``qkv_proj``.
        fused_gate_up: the checkpoint stores the weights of gate and up as ``gate_up_proj``.
        sinks: each head of the queries has a score for an extra key without a value.
        latent: sizes of latent attention; None for attention with keys and values of each head.
        embedding_scale: factor on the embeddings.
        residual_scale: factor on the output of attention and MLP.
        attention_scale: factor on the scores; None for head_dim ** -0.5.
        attention_softcap: scores become cap * tanh(score / cap); None for no limit.
        logits_scale: factor on the logits.
        logits_softcap: logits become cap * tanh(logit / cap), after the factor; None for no limit.
        moe: the mixture-of-experts layers in place of MLPs; None if there are none.
        moe_layers: whether each layer is one of these; empty if all are.
        state_mixers: what each layer has in place of attention or beside it, None for attention
            only; empty if all layers have attention only.
        parallel_mixers: a layer with one of these has attention, too, and their sum counts.
        factors: factors on inputs and outputs of the parts of a layer.
        residual_factors: factors for residuals that are taken after the norm; None if hidden states
            are added to as they are.
        only_mlp: whether each layer is only an MLP, and all others have none; empty if all layers
            have both attention, or what is in its place, and an MLP.
        plain_mlp: the MLP has no gate: down(max(up(x), 0) ** 2).
        gated_attention: the rows of ``q_proj`` are, for each head, its query and a gate, and the
            result of attention is multiplied by the sigmoid of the gates.
        layers: the sizes of each layer; empty if all layers are alike.
        value_norm: each head of the values has an RMS norm without a weight.
        layer_inputs: inputs of layers; None for none.
        layer_scalars: each layer has a factor on the hidden states after it, ``layer_scalar``.
        shared_blocks: blocks of attention and an MLP that some layers use; None for none.
        prediction_layers: number of MTP layers in the checkpoint, which are not part of the model.
        prediction_module: module of the MTP layers; None if they are stored after the last layer.
    """

    biases: Biases = Biases()
    windows: Windows = ()
    norms: LayerNorms = LayerNorms()
    layer_norms: tuple[LayerNorms, ...] = ()
    names: ModuleNames = ModuleNames()
    unit_offset: bool = False
    qk_norm: QKNormScope | None = None
    activation: Activation = Activation.SILU
    rotary: Rotary = Rotary()
    query_growth: QueryGrowth | None = None
    fused_qkv: bool = False
    fused_gate_up: bool = False
    sinks: bool = False
    latent: LatentShape | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logits_scale: float = 1.0
    logits_softcap: float | None = None
    moe: MoeShape | None = None
    moe_layers: tuple[bool, ...] = ()
    state_mixers: tuple[StateMixer | None, ...] = ()
    parallel_mixers: bool = False
    factors: LayerFactors = LayerFactors()
    residual_factors: ResidualFactors | None = None
    only_mlp: tuple[bool, ...] = ()
    plain_mlp: bool = False
    gated_attention: bool = False
    layers: tuple[LayerSizes, ...] = ()
    value_norm: bool = False
    layer_inputs: LayerInputs | None = None
    layer_scalars: bool = False
    shared_blocks: SharedBlocks | None = None
    prediction_layers: int = 0
    prediction_module: str | None = None

    def norms_of(self, layer: int) -> LayerNorms:
        """Return the norms of a layer."""
        return self.layer_norms[layer] if self.layer_norms else self.norms

    def state_mixer_of(self, layer: int) -> StateMixer | None:
        """Return what a layer has in place of attention or beside it; None for attention only."""
        return self.state_mixers[layer] if self.state_mixers else None

    def is_rotated(self, layer: int) -> bool:
        """Return whether a layer has a rotary embedding."""
        return not self.rotary.sections or self.rotary.sections[layer] is not None

    def has_attention(self, layer: int) -> bool:
        """Return whether a layer has attention."""
        if self.only_mlp and self.only_mlp[layer]:
            return False
        if self.shared_blocks is not None:
            return layer in self.shared_blocks.layers
        return self.parallel_mixers or self.state_mixer_of(layer) is None

    def has_mlp(self, layer: int) -> bool:
        """Return whether a layer has an MLP, or experts."""
        return not self.only_mlp or self.only_mlp[layer]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes and variant of one decoder."""

    architecture: str  # a key of `registry.ARCHITECTURES`
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int  # tokens of prompt and output, after the scaling of rope
    default_max_model_len: int  # where no option sets it; at most `max_position_embeddings`
    tied_embeddings: bool  # the output layer's weight is the embedding's
    has_output_layer: bool  # False: the model is loaded for its hidden states only
    variant: Variant
    has_classifier: bool = False  # the checkpoint has a head that scores
    scores_by_tokens: bool = False  # a head that scores is made of rows of the output layer
    stage: Stage | None = None  # the part of the model that a rank computes; None for all of it
    prediction: PredictionNames | None = None  # names of the MTP layer, if this is its shape

    @property
    def own_stage(self) -> Stage:
        """The part of the model that a rank computes; a single stage if it is the whole model."""
        return self.stage or Stage(range(self.num_layers), self.num_layers)

    def needs(self, name: str) -> bool:
        """Return False for a tensor that files may have, and that the model does without.

        Such tensors belong to MTP layers, or are keys and values of a layer that reads those of
        another layer. The shape of an MTP layer needs only the tensors of that layer.
        """
        layer = layer_of(name)
        if self.prediction is not None:
            return self.prediction.has(name)
        if layer is None:
            return True
        shared = self.variant.shared_blocks
        if shared is not None and f".{BLOCK}." in name:
            return layer in shared.owners
        if layer < self.num_layers:
            return self.sizes_of(layer).shared_with is None or not _KEYS_AND_VALUES.search(name)
        numbered = 0 if self.variant.prediction_module else self.variant.prediction_layers
        return layer >= self.num_layers + numbered

    def layer_name(self, layer: int) -> str:
        """Return the checkpoint's name of a layer."""
        if self.prediction is not None and layer == self.num_layers - 1:
            return self.prediction.layer
        return f"model.layers.{layer}"

    @property
    def final_norm(self) -> str:
        """The checkpoint's name of the norm after the last layer."""
        if self.prediction is not None:
            return self.prediction.final_norm
        return f"model.{self.variant.names.final_norm}"

    def sizes_of(self, layer: int) -> LayerSizes:
        """Return the sizes of a layer."""
        if self.variant.layers:
            return self.variant.layers[layer]
        return LayerSizes(self.num_kv_heads, self.head_dim, self.intermediate_size)

    def kept_of(self, layer: int) -> KVSizes:
        """Return what a layer keeps for a token in the KV cache, or reads of another layer."""
        if self.variant.latent is not None:
            return KVSizes(1, self.variant.latent.row_size, 0)
        sizes = self.sizes_of(layer)
        return KVSizes(sizes.num_kv_heads, sizes.head_dim, sizes.head_dim)

    @property
    def windows(self) -> Windows:
        """The window of each layer."""
        return self.variant.windows or (None,) * self.num_layers

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The numbers of the layers that have attention."""
        return tuple(filter(self.variant.has_attention, range(self.num_layers)))

    @property
    def attention_windows(self) -> Windows:
        """The windows of the layers that have attention."""
        return tuple(self.windows[layer] for layer in self.attention_layers)

    @property
    def keeping_layers(self) -> tuple[int, ...]:
        """The numbers of the layers that keep something for tokens themselves."""
        layers = self.attention_layers
        return tuple(layer for layer in layers if self.sizes_of(layer).shared_with is None)

    @property
    def moe(self) -> MoeShape | None:
        """The mixture-of-experts layers; None if there are none."""
        return self.variant.moe

    def moe_of(self, layer: int) -> MoeShape | None:
        """Return the mixture of experts of a layer; None if it has an MLP."""
        has_experts = not self.variant.moe_layers or self.variant.moe_layers[layer]
        return self.variant.moe if has_experts else None

    def attention_parts(self, layer: int) -> dict[str, int]:
        """Return the names of the weights of queries, keys and values, and their sizes."""
        sections, sizes = self.attention_sections(layer), self.sizes_of(layer)
        if self.variant.fused_qkv:
            return {"qkv_proj": sum(sections)}
        parts = dict(zip(("q_proj", "k_proj", "v_proj"), sections, strict=True))
        if sizes.shared_with is not None:
            return {"q_proj": sections[0]}
        if sizes.keys_as_values:
            del parts["v_proj"]
        if self.variant.gated_attention:
            parts["q_proj"] *= 2
        return parts

    def attention_sections(self, layer: int) -> tuple[int, int, int]:
        """Return the sizes of queries, keys and values."""
        sizes = self.sizes_of(layer)
        key = sizes.num_kv_heads * sizes.head_dim
        return self.num_heads * sizes.head_dim, key, key

    def mlp_parts(self, layer: int) -> dict[str, int]:
        """Return the names of the weights that an MLP's input is read by, and their sizes."""
        inner = self.sizes_of(layer).intermediate_size
        if self.variant.fused_gate_up:
            return {self.variant.names.gate_up: 2 * inner}
        if self.variant.plain_mlp:
            return {self.variant.names.up: inner}
        return {self.variant.names.gate: inner, self.variant.names.up: inner}

    def qk_norm_sizes(self, layer: int) -> dict[str, int]:
        """Return the sizes of the norms of queries and keys, by name; empty if there are none."""
        match self.variant.qk_norm:
            case None | QKNormScope.ROTATED_HEAD:
                return {}
            case QKNormScope.HEAD:
                heads = 1, 1
            case QKNormScope.TOKEN:
                heads = self.num_heads, self.num_kv_heads
        names, sizes = self.variant.names, self.sizes_of(layer)
        norms = {names.q_norm: heads[0] * sizes.head_dim}
        if sizes.shared_with is None:
            norms[names.k_norm] = heads[1] * sizes.head_dim
        return norms
