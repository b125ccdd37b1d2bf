"""Reads the mixture-of-experts layers of the known families from config.json, without torch."""

from __future__ import annotations

from dataclasses import replace

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.limits import MAX_EXPERTS, MAX_HIDDEN_SIZE, MAX_INNER_SIZE
from paged_backend.checkpoint.moe import (
    DEEPSEEK_NAMES,
    GEGLU_TANH,
    GEMMA4_NAMES,
    GPT_OSS_NAMES,
    GRANITE_NAMES,
    JAMBA_NAMES,
    LFM2_NAMES,
    LLAMA4_NAMES,
    MIXTRAL_NAMES,
    NEMOTRON_NAMES,
    BesideNorms,
    ExpertGroups,
    ExpertNames,
    MoeShape,
    Routing,
    Scoring,
    SharedExpert,
    SwiGLU,
)

_SCORINGS = {scoring.value: scoring for scoring in (Scoring.SOFTMAX, Scoring.SIGMOID)}
# Two keys for the number of experts: transformers 5 renames Qwen's when it saves a model.
_NUM_EXPERTS = ("num_experts", "num_local_experts")


def read_qwen3_moe(config: ConfigFile) -> MoeShape:
    """Read the layers of Qwen3-MoE.

    Raises:
        ConfigError: a key is missing or wrong.
    """
    return MoeShape(
        hidden_size=config.integer("hidden_size"),
        num_experts=_num_experts(config),
        intermediate_size=config.integer("moe_intermediate_size"),
        routing=_routing(config, norm_topk_prob=config.flag("norm_topk_prob", False)),
    )


def read_qwen2_moe(config: ConfigFile) -> MoeShape:
    """Read the layers of Qwen2-MoE, which have a shared expert.

    Raises:
        ConfigError: a key is missing or wrong.
    """
    shared = SharedExpert(config.integer("shared_expert_intermediate_size"), gated=True)
    return replace(read_qwen3_moe(config), shared_expert=shared)


def read_olmoe(config: ConfigFile) -> MoeShape:
    """Read the layers of OLMoE.

    Raises:
        ConfigError: a key is missing or wrong.
    """
    return _plain(config, ExpertNames(), config.flag("norm_topk_prob", False))


def read_mixtral(config: ConfigFile) -> MoeShape:
    """Read the layers of Mixtral.

    Raises:
        ConfigError: a key is missing or wrong.
    """
    return _plain(config, MIXTRAL_NAMES, norm_topk_prob=True)


def read_gpt_oss(config: ConfigFile) -> MoeShape:
    """Read the layers of gpt-oss.

    Raises:
        ConfigError: a key is missing or wrong.
    """
    alpha, limit = config.number("swiglu_alpha", 1.702), config.number("swiglu_limit", 7.0)
    top_k = _num_experts_per_tok(config, _num_experts(config))
    return MoeShape(
        hidden_size=config.integer("hidden_size"),
        num_experts=_num_experts(config),
        intermediate_size=config.integer("intermediate_size"),
        routing=Routing(top_k, Scoring.SOFTMAX_OF_TOP),
        names=GPT_OSS_NAMES,
        activation=SwiGLU(alpha, limit, up_offset=1.0),
        bias=True,
    )


def read_deepseek_v2(config: ConfigFile) -> MoeShape:
    """Read the layers of DeepSeek V2.

    Raises:
        ConfigError: a key is missing or wrong, or has a value that only other code computes.
    """
    config.text("scoring_func", "softmax", ("softmax",))
    if config.flag("norm_topk_prob", False):  # transformers ignores it
        raise config.error("norm_topk_prob", "is true, which is not supported")
    method = config.text("topk_method", "greedy", ("greedy", "group_limited_greedy"))
    groups = None if method == "greedy" else _groups(config, num_scored=1)
    return _deepseek(config, Routing(_num_chosen(config, groups), groups=groups))


def read_deepseek_v3(config: ConfigFile) -> MoeShape:
    """Read the layers of DeepSeek V3, whose router has biases.

    Raises:
        ConfigError: a key is missing or wrong, or has a value that only other code computes.
    """
    config.text("scoring_func", "sigmoid", ("sigmoid",))
    config.text("topk_method", "noaux_tc", ("noaux_tc",))
    groups = _groups(config, num_scored=2)
    normed = config.flag("norm_topk_prob", True)
    routing = Routing(_num_chosen(config, groups), Scoring.SIGMOID, normed, groups=groups)
    return _deepseek(config, replace(routing, biased=True))


def read_jamba(config: ConfigFile) -> MoeShape:
    """Read the layers of Jamba.

    Raises:
        ConfigError: a key is missing or wrong.
    """
    return _plain(config, JAMBA_NAMES, norm_topk_prob=False)


def read_lfm2_moe(config: ConfigFile) -> MoeShape:
    """Read the layers of LFM2 with experts.

    Raises:
        ConfigError: a key is missing or wrong.
    """
    routing = Routing(
        _num_experts_per_tok(config, _num_experts(config)),
        Scoring.SIGMOID,
        norm_topk_prob=config.flag("norm_topk_prob", True),
        norm_offset=1e-6,
        scale=config.number("routed_scaling_factor", 1.0),
        biased=config.flag("use_expert_bias", True),
    )
    return MoeShape(
        hidden_size=config.integer("hidden_size"),
        num_experts=_num_experts(config),
        intermediate_size=config.integer("moe_intermediate_size"),
        routing=routing,
        names=LFM2_NAMES,
    )


def read_llama4(config: ConfigFile) -> MoeShape:
    """Read the layers of Llama 4 with experts, and one that every row passes through.

    Raises:
        ConfigError: a key is missing or wrong.
    """
    num_experts = config.integer("num_local_experts", 16, high=MAX_EXPERTS)
    inner = config.integer("experts_intermediate_size", high=MAX_INNER_SIZE)
    top_k = config.integer("num_experts_per_tok", 1, high=num_experts)
    return MoeShape(
        hidden_size=config.integer("hidden_size"),
        num_experts=num_experts,
        intermediate_size=inner,
        routing=Routing(top_k, Scoring.SIGMOID, of_inputs=True),
        names=LLAMA4_NAMES,
        shared_expert=SharedExpert(inner),
    )


def read_gemma4(config: ConfigFile) -> MoeShape:
    """Read the experts of Gemma 4, which are beside an MLP.

    Raises:
        ConfigError: a key is missing or wrong.
    """
    num_experts = config.integer("num_experts", high=MAX_EXPERTS)
    top_k = config.integer("top_k_experts", high=num_experts)
    return MoeShape(
        hidden_size=config.integer("hidden_size"),
        num_experts=num_experts,
        intermediate_size=config.integer("moe_intermediate_size", high=MAX_INNER_SIZE),
        routing=Routing(top_k, norm_topk_prob=True, has_factors=True),
        names=GEMMA4_NAMES,
        activation=GEGLU_TANH,
        beside_mlp=True,
        beside_norms=BesideNorms(),
    )


def read_granite(config: ConfigFile) -> MoeShape | None:
    """Read the experts of Granite 4, which are beside an MLP; None for none.

    Raises:
        ConfigError: a key is missing or wrong.
    """
    num_experts = config.integer("num_local_experts", 8, low=0, high=MAX_EXPERTS)
    if not num_experts:
        return None
    top_k = config.integer("num_experts_per_tok", 2, high=num_experts)
    return MoeShape(
        hidden_size=config.integer("hidden_size"),
        num_experts=num_experts,
        intermediate_size=config.integer("experts_intermediate_size", high=MAX_INNER_SIZE),
        routing=Routing(top_k, Scoring.SOFTMAX_OF_TOP),
        names=GRANITE_NAMES,
        beside_mlp=True,
    )


def read_nemotron_h(config: ConfigFile) -> MoeShape:
    """Read the layers of Nemotron-H with experts, which have no gates.

    Raises:
        ConfigError: a key is missing or wrong.
    """
    groups = _groups(config, num_scored=2)
    has_latent = config.value("moe_latent_size") is not None
    shared = config.integer("moe_shared_expert_intermediate_size", 7688, high=MAX_INNER_SIZE)
    return MoeShape(
        hidden_size=config.integer("hidden_size"),
        num_experts=config.integer("n_routed_experts", high=MAX_EXPERTS),
        intermediate_size=config.integer("moe_intermediate_size", 7688, high=MAX_INNER_SIZE),
        routing=Routing(
            _num_chosen(config, groups),
            Scoring.SIGMOID,
            config.flag("norm_topk_prob", True),
            config.number("routed_scaling_factor", 1.0),
            biased=True,
            groups=groups,
        ),
        names=NEMOTRON_NAMES,
        shared_expert=SharedExpert(shared),
        plain=True,
        latent_size=config.integer("moe_latent_size", high=MAX_HIDDEN_SIZE) if has_latent else None,
        outer_bias=config.flag("mlp_bias", False),
    )


def _deepseek(config: ConfigFile, routing: Routing) -> MoeShape:
    inner = config.integer("moe_intermediate_size", high=MAX_INNER_SIZE)
    num_shared = config.integer("n_shared_experts", high=MAX_EXPERTS)
    return MoeShape(
        hidden_size=config.integer("hidden_size"),
        num_experts=config.integer("n_routed_experts", high=MAX_EXPERTS),
        intermediate_size=inner,
        routing=replace(routing, scale=config.number("routed_scaling_factor", 1.0)),
        names=DEEPSEEK_NAMES,
        shared_expert=SharedExpert(num_shared * inner),
    )


def _groups(config: ConfigFile, num_scored: int) -> ExpertGroups | None:
    """Read the groups of experts; None for one group."""
    num_experts = config.integer("n_routed_experts", high=MAX_EXPERTS)
    count = config.integer("n_group", high=num_experts)
    if num_experts % count or num_experts // count < num_scored:
        raise config.error(
            "n_group",
            f"must divide n_routed_experts ({num_experts}) into groups of {num_scored} or more, "
            f"got {count}",
        )
    chosen = config.integer("topk_group", high=count)
    return None if chosen == count else ExpertGroups(count, chosen, num_scored)


def _num_chosen(config: ConfigFile, groups: ExpertGroups | None) -> int:
    num_experts = config.integer("n_routed_experts", high=MAX_EXPERTS)
    if groups is not None:
        num_experts = num_experts // groups.count * groups.chosen
    return config.integer("num_experts_per_tok", high=num_experts)


def _plain(config: ConfigFile, names: ExpertNames, norm_topk_prob: bool) -> MoeShape:
    return MoeShape(
        hidden_size=config.integer("hidden_size"),
        num_experts=_num_experts(config),
        intermediate_size=config.integer("intermediate_size"),
        routing=_routing(config, norm_topk_prob),
        names=names,
    )


def _routing(config: ConfigFile, norm_topk_prob: bool) -> Routing:
    top_k = _num_experts_per_tok(config, _num_experts(config))
    scoring = _SCORINGS[config.text("scoring_func", "softmax", _SCORINGS)]
    return Routing(top_k, scoring, norm_topk_prob)


def _num_experts(config: ConfigFile) -> int:
    """Read the number of experts, which is required."""
    for key in _NUM_EXPERTS:
        if key in config:
            return config.integer(key)
    return config.integer(_NUM_EXPERTS[0])


def _num_experts_per_tok(config: ConfigFile, num_experts: int) -> int:
    return config.integer("num_experts_per_tok", high=num_experts)
