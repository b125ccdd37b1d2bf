"""Mixture-of-experts layers as values: sizes, routing and names; no tensors here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum


class Scoring(Enum):
    """The function that turns the logits of a router into the weights of experts."""

    SOFTMAX = "softmax"  # softmax of the logits of all experts
    SIGMOID = "sigmoid"  # sigmoid of each expert's logit
    SOFTMAX_OF_TOP = "softmax_of_top"  # softmax of the logits of the chosen experts only


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """Groups of consecutive experts, all of one size; a row chooses some groups first.

    DeepSeek-AI, "DeepSeek-V2" (2024), section 2.2.2, and "DeepSeek-V3 Technical Report" (2024),
    section 2.1.2.

    Attributes:
        count: the number of groups.
        chosen: the number of groups that a row chooses, those with the largest scores. It chooses
            its experts among theirs.
        num_scored: the score of a group is the sum of its experts' largest scores, this many.
    """

    count: int
    chosen: int
    num_scored: int


@dataclass(frozen=True, slots=True)
class Routing:
    """The choice of the experts of a row, which are those with the largest scores.

    A score is the weight that an expert would have, plus its bias if the router has biases. Without
    biases and groups, the experts with the largest scores are those with the largest logits.

    Attributes:
        num_experts_per_tok: the number of chosen experts.
        scoring: computes their weights.
        norm_topk_prob: whether the weights are divided by their sum.
        scale: factor on the weights, after that.
        biased: whether the router has a bias for each expert, which is added to scores only.
        groups: None if a row chooses among all experts.
        norm_offset: added to the sum of the weights.
        has_factors: whether each expert has a factor on its weights, after all that.
        of_inputs: the weights are factors on what the experts read, instead of their outputs.
    """

    num_experts_per_tok: int
    scoring: Scoring = Scoring.SOFTMAX
    norm_topk_prob: bool = False
    scale: float = 1.0
    biased: bool = False
    groups: ExpertGroups | None = None
    norm_offset: float = 0.0
    has_factors: bool = False
    of_inputs: bool = False


@dataclass(frozen=True, slots=True)
class SwiGLU:
    """The activation (up + up_offset) * gate * sigmoid(alpha * gate + cubic * gate ** 3).

    Shazeer, "GLU Variants Improve Transformer" (2020), equation 5; gpt-oss sets the parameters.

    Attributes:
        alpha: factor in the sigmoid.
        limit: gate is at most this, and up is between its negative and this; None for no limit.
        up_offset: added to up.
        cubic: factor of the cube in the sigmoid.
    """

    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0
    cubic: float = 0.0


_TWICE_ROOT = 2 * math.sqrt(2 / math.pi)
GEGLU_TANH = SwiGLU(_TWICE_ROOT, cubic=0.044715 * _TWICE_ROOT)
"""up * gelu(gate), with GELU approximated by a hyperbolic tangent: (1 + tanh(x)) / 2 is the sigmoid
of 2x. Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016), section 2."""


class ExpertLayout(Enum):
    """The tensors of experts as a checkpoint stores them.

    Tensors of all experts are ``gate_up_proj`` and ``down_proj``.
    """

    SEPARATE = "separate"  # a tensor for each projection of each expert
    TURNS = "turns"  # [num_experts, inputs, outputs], with gate and up in turns
    HALVES = "halves"  # [num_experts, outputs, inputs], with gate before up
    COLUMNS = "columns"  # [num_experts, inputs, outputs], with gate before up

    @property
    def has_halves(self) -> bool:
        """True if gate comes before up."""
        return self in (ExpertLayout.HALVES, ExpertLayout.COLUMNS)

    @property
    def inputs_first(self) -> bool:
        """True if the inputs of a tensor of all experts come before its outputs."""
        return self in (ExpertLayout.TURNS, ExpertLayout.COLUMNS)


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The names of modules and tensors in the checkpoints of a family.

    Attributes:
        module: the layer's module; empty if the layer itself has the tensors.
        router: the router in it.
        gate: the gate projection of an expert.
        up: its up projection.
        down: its down projection.
        shared: the shared expert.
        bias: the biases of the scores of experts.
        factors: the factors on the weights of experts.
        layout: how the tensors of the experts are stored.
    """

    module: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_expert"
    bias: str = "gate.e_score_correction_bias"
    factors: str = "router.per_expert_scale"
    layout: ExpertLayout = ExpertLayout.SEPARATE

    @property
    def is_fused(self) -> bool:
        """True if one tensor holds a projection of all experts."""
        return self.layout is not ExpertLayout.SEPARATE


QWEN_NAMES = ExpertNames()
MIXTRAL_NAMES = ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2")
DEEPSEEK_NAMES = ExpertNames(shared="shared_experts")
JAMBA_NAMES = ExpertNames("feed_forward", router="router")
KIMI_NAMES = ExpertNames("block_sparse_moe", "gate", "w1", "w3", "w2", "shared_experts")
LFM2_NAMES = ExpertNames("feed_forward", gate="w1", up="w3", down="w2", bias="expert_bias")
GEMMA4_NAMES = ExpertNames("", router="router.proj", layout=ExpertLayout.HALVES)
GPT_OSS_NAMES = ExpertNames(router="router", layout=ExpertLayout.TURNS)
LLAMA4_NAMES = ExpertNames("feed_forward", router="router", layout=ExpertLayout.COLUMNS)
GRANITE_NAMES = ExpertNames("block_sparse_moe", router="router", layout=ExpertLayout.HALVES)
NEMOTRON_NAMES = ExpertNames("mixer", shared="shared_experts")


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An MLP that every row passes through, besides the chosen experts.

    Attributes:
        intermediate_size: size of a row between the projections of this MLP.
        gated: whether its output is multiplied by the sigmoid of one more linear layer.
    """

    intermediate_size: int
    gated: bool = False


@dataclass(frozen=True, slots=True)
class BesideNorms:
    """The names of norms around an MLP and experts beside it, which read hidden states (Gemma 4).

    Attributes:
        mlp_input: norm on what the MLP reads.
        mlp_output: norm on its output.
        experts_input: norm on what the experts read.
        experts_output: norm on the sum of their outputs.
        router: norm on what the router reads, of which the checkpoint has the weight times the
            root of its size.
    """

    mlp_input: str = "pre_feedforward_layernorm.weight"
    mlp_output: str = "post_feedforward_layernorm_1.weight"
    experts_input: str = "pre_feedforward_layernorm_2.weight"
    experts_output: str = "post_feedforward_layernorm_2.weight"
    router: str = "router.scale"


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeShape:
    """Sizes and variants of the mixture-of-experts layers of a decoder.

    Attributes:
        hidden_size: size of a row.
        num_experts: number of experts, without the shared one.
        intermediate_size: size of a row between the projections of an expert.
        routing: how the experts of a row are chosen.
        names: names of the tensors.
        activation: activation between the projections of an expert.
        bias: whether the router and the projections of the experts have biases.
        shared_expert: None if there is none.
        plain: no expert has a gate projection, nor has the shared one, and the activation is
            max(up, 0) ** 2 in place of `activation`.
        latent_size: size of the rows that the experts read and return, which two linear layers
            project from rows and to rows; None for that of a row. The shared expert reads rows.
        outer_bias: whether these layers and the shared expert have biases.
        beside_mlp: the layer has its MLP, too, and the sum of both outputs counts.
        beside_norms: the norms of both, if each has them; None if the layer has one for both.
    """

    hidden_size: int
    num_experts: int
    intermediate_size: int
    routing: Routing
    names: ExpertNames = QWEN_NAMES
    activation: SwiGLU = SwiGLU()
    bias: bool = False
    shared_expert: SharedExpert | None = None
    plain: bool = False
    latent_size: int | None = None
    outer_bias: bool = False
    beside_mlp: bool = False
    beside_norms: BesideNorms | None = None

    @property
    def expert_size(self) -> int:
        """The size of the rows that the experts read and return."""
        return self.latent_size or self.hidden_size

    def share_of_experts(self, num_tokens: float) -> float:
        """The share of the experts that some tokens choose on average, if none is preferred."""
        missed: float = (1 - self.routing.num_experts_per_tok / self.num_experts) ** num_tokens
        return 1 - missed
