"""Tiny checkpoints with random weights, made by transformers: one for each family it covers."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
)
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

_SIZES = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.15,
    "eos_token_id": 2,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
_LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

_LOCAL_ROPE = {"rope_type": "default", "rope_theta": 100.0}
_GROWING_ROPE = {**_YARN_ROPE, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.4}
_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 512,
    "short_factor": [1.0, 1.2, 1.3, 1.5, 2.0, 2.5],
    "long_factor": [2.0, 2.2, 2.3, 2.5, 3.0, 3.5],
}


def _heads(queries: int, keys: int, **others: Any) -> dict[str, Any]:
    return {"num_attention_heads": queries, "num_key_value_heads": keys, **others}


_EXPERTS = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "shared_intermediate_size": 32,
}
_HEADS = {"head_dim": 16}
_LLAMA4 = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "intermediate_size": 40,
    "intermediate_size_mlp": 112,
    "num_local_experts": 4,
    "attention_chunk_size": 20,
    "no_rope_layers": [1, 1, 0, 1],
    "floor_scale": 16,
    "attn_scale": 0.4,
    "pad_token_id": 0,
}
_MIXED = {
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}


_LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "tie_word_embeddings": False,
}
_GROUPS = {
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.7,
}
_DEEPSEEK_ROPE = {**_YARN_ROPE, "mscale": 0.8, "mscale_all_dim": 0.6}


# Full attention has larger heads; two layers read what the last of their kind before them keeps.
_GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "num_hidden_layers": 5,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 199,
    "final_logit_softcapping": 20.0,
    "sliding_window": 20,
    "layer_types": [
        "sliding_attention",
        "sliding_attention",
        "full_attention",
        "sliding_attention",
        "full_attention",
    ],
    "pad_token_id": 0,
}
# One key head for two value heads; the values of a head are longer than its keys.
_DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}


# transformers 5.17, which a machine with a GPU may have, norms all groups of a family together.
_NUM_GROUPS = 2 if "group_size" in inspect.signature(MambaRMSNormGated.__init__).parameters else 1
# Groups of heads; the values have another size than the hidden states.
_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": _NUM_GROUPS,
    "mamba_d_state": 24,
    "pad_token_id": 0,
    "time_step_limit": [0.1, 1.5],
}
_FALCON_H1 = {
    "attention_in_multiplier": 0.9,
    "attention_out_multiplier": 0.7,
    "embedding_multiplier": 3.0,
    "key_multiplier": 0.6,
    "lm_head_multiplier": 0.5,
    "mlp_multipliers": [0.8, 1.2],
    "ssm_in_multiplier": 1.1,
    "ssm_multipliers": [0.8, 1.3, 0.7, 1.2, 0.9],
    "ssm_out_multiplier": 0.6,
}
_HYBRID = {"layer_types": ["linear_attention", "full_attention", "linear_attention"], **_MAMBA2}
_LFM2 = {
    "layer_types": ["conv", "full_attention", "conv"],
    "norm_eps": 2e-3,
    "pad_token_id": 0,
}


_NEMOTRON_H = {
    "model_type": "nemotron_h",
    "head_dim": 16,
    "layer_norm_epsilon": 2e-3,
    "moe_shared_expert_intermediate_size": 40,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 24,
    "pad_token_id": 0,
}


_FAMILIES: dict[str, dict[str, Any]] = {
    "llama2": _heads(4, 4, model_type="llama"),
    "llama3": _heads(8, 2, model_type="llama", head_dim=16, rope_parameters=_LLAMA3_ROPE),
    "llama-linear-bias": _heads(
        4, 2, model_type="llama", rope_parameters=_LINEAR_ROPE, attention_bias=True, mlp_bias=True
    ),
    # Queries of layers without a rotary embedding grow after each 16 positions.
    "llama4": _heads(4, 2, model_type="llama4_text", num_experts_per_tok=2, **_LLAMA4),
    # One expert for each row, and blocks that end where chunks do.
    "llama4-plain": _heads(
        4,
        2,
        model_type="llama4_text",
        **{**_LLAMA4, "attention_chunk_size": 32},
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        use_qk_norm=False,
        rope_parameters=_LLAMA3_ROPE,
    ),
    "mistral": _heads(4, 1, model_type="mistral", sliding_window=24),
    "qwen2": _heads(4, 2, model_type="qwen2"),
    "qwen2-window": _heads(
        4,
        1,
        model_type="qwen2",
        rope_parameters=_YARN_ROPE,
        use_sliding_window=True,
        sliding_window=20,
        max_window_layers=1,
    ),
    "qwen3": _heads(4, 2, model_type="qwen3", head_dim=32),
    "qwen3-window": _heads(
        4,
        4,
        model_type="qwen3",
        head_dim=16,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=17,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        tie_word_embeddings=True,
    ),
    "gemma2": _heads(
        4,
        2,
        model_type="gemma2",
        head_dim=16,
        sliding_window=20,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=4.0,
        tie_word_embeddings=True,
    ),
    "gemma3": _heads(
        4,
        1,
        model_type="gemma3_text",
        head_dim=32,
        sliding_window=20,
        query_pre_attn_scalar=24,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={"full_attention": _LINEAR_ROPE, "sliding_attention": _LOCAL_ROPE},
    ),
    "gemma4": _heads(4, 2, model_type="gemma4_text", **_GEMMA4),
    "gemma4-moe": _heads(
        4,
        2,
        model_type="gemma4_text",
        enable_moe_block=True,
        num_experts=6,
        top_k_experts=2,
        moe_intermediate_size=40,
        **_GEMMA4,
    ),
    "gemma4-plain": _heads(
        4,
        2,
        model_type="gemma4_text",
        **{**_GEMMA4, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
    ),
    "gpt-oss": _heads(
        4, 2, model_type="gpt_oss", head_dim=16, pad_token_id=0, **_EXPERTS, **_MIXED
    ),
    "mixtral": _heads(4, 2, model_type="mixtral", **_EXPERTS),
    "olmoe": _heads(4, 2, model_type="olmoe", **_EXPERTS),
    "qwen2-moe": _heads(4, 2, model_type="qwen2_moe", mlp_only_layers=[1], **_EXPERTS),
    "qwen3-moe": _heads(4, 2, model_type="qwen3_moe", head_dim=16, norm_topk_prob=True, **_EXPERTS),
    "deepseek-v2": _heads(
        4,
        4,
        model_type="deepseek_v2",
        topk_method="group_limited_greedy",
        first_k_dense_replace=1,
        rope_parameters=_DEEPSEEK_ROPE,
        **_LATENT,
        **_GROUPS,
    ),
    "deepseek-v2-lite": _heads(
        4, 4, model_type="deepseek_v2", **{**_LATENT, **_GROUPS, "q_lora_rank": None}
    ),
    "deepseek-v3": _heads(
        8,
        8,
        model_type="deepseek_v3",
        first_k_dense_replace=1,
        attention_bias=True,
        rope_parameters=_DEEPSEEK_ROPE,
        **_LATENT,
        **_GROUPS,
    ),
    "glm4-moe-lite": _heads(4, 4, model_type="glm4_moe_lite", **_LATENT, **_GROUPS),
    "minicpm3": _heads(
        4,
        4,
        model_type="minicpm3",
        dim_model_base=32,
        scale_emb=3.0,
        **{**_LATENT, "tie_word_embeddings": True},
    ),
    "qwen3-next": _heads(
        4, 2, model_type="qwen3_next", head_dim=16, mlp_only_layers=[1], **_DELTA, **_EXPERTS
    ),
    "qwen3.5": _heads(4, 2, model_type="qwen3_5_text", head_dim=16, **_DELTA),
    "qwen3.5-moe": _heads(4, 2, model_type="qwen3_5_moe_text", head_dim=16, **_DELTA, **_EXPERTS),
    "lfm2": _heads(
        4, 2, model_type="lfm2", block_multiple_of=16, block_ffn_dim_multiplier=1.3, **_LFM2
    ),
    "lfm2-bias": _heads(
        4, 2, model_type="lfm2", block_auto_adjust_ff_dim=False, conv_bias=True, **_LFM2
    ),
    "lfm2-moe": _heads(
        4,
        2,
        model_type="lfm2_moe",
        num_dense_layers=1,
        routed_scaling_factor=1.7,
        **_LFM2,
        **_EXPERTS,
    ),
    "bamba": _heads(4, 2, model_type="bamba", attn_layer_indices=[1], **_MAMBA2),
    "falcon-h1": _heads(4, 2, model_type="falcon_h1", mamba_d_ssm=128, **_FALCON_H1, **_MAMBA2),
    "falcon-h1-norm": _heads(
        4,
        2,
        model_type="falcon_h1",
        mamba_d_ssm=None,
        mamba_rms_norm=True,
        attention_bias=True,
        projectors_bias=True,
        **_MAMBA2,
    ),
    "nemotron-h": _heads(
        4,
        2,
        layers_block_type=["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"],
        **_NEMOTRON_H,
    ),
    "nemotron-h-moe": _heads(
        4,
        2,
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "moe"],
        **_NEMOTRON_H,
        **_GROUPS,
    ),
    "nemotron-h-latent": _heads(
        4,
        2,
        layers_block_type=["moe", "linear_attention", "full_attention", "moe"],
        moe_latent_size=24,
        mlp_bias=True,
        norm_topk_prob=False,
        **_NEMOTRON_H,
        **_EXPERTS,
    ),
    "kimi-linear": _heads(
        4,
        4,
        model_type="kimi_linear",
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_num_heads=3,
        linear_head_dim=16,
        mlp_layer_types=["dense", "sparse", "sparse"],
        rms_norm_eps=2e-3,
        pad_token_id=0,
        bos_token_id=1,
        **{**_LATENT, **_GROUPS, "q_lora_rank": None, "num_experts": 8},
    ),
    "jamba": _heads(
        4,
        2,
        model_type="jamba",
        attn_layer_period=3,
        attn_layer_offset=1,
        mamba_dt_rank=12,
        mamba_proj_bias=True,
        pad_token_id=0,
        **_EXPERTS,
    ),
    "jamba-dense": _heads(
        4,
        2,
        model_type="jamba",
        attn_layer_period=3,
        attn_layer_offset=1,
        mamba_conv_bias=False,
        num_experts=1,
        pad_token_id=0,
    ),
    "glm4": _heads(4, 2, model_type="glm4", head_dim=32, pad_token_id=0),
    "glm4-moe": _heads(
        4,
        2,
        model_type="glm4_moe",
        head_dim=32,
        first_k_dense_replace=1,
        attention_bias=True,
        use_qk_norm=True,
        **_GROUPS,
    ),
    "granite": _heads(
        4,
        2,
        model_type="granite",
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        attention_multiplier=0.1,
        logits_scaling=2.5,
    ),
    "granite-hybrid": _heads(
        4,
        2,
        model_type="granitemoehybrid",
        num_local_experts=0,
        shared_intermediate_size=80,
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        attention_multiplier=0.1,
        logits_scaling=2.5,
        **_HYBRID,
    ),
    "granite-hybrid-rope": _heads(
        4,
        2,
        model_type="granitemoehybrid",
        num_local_experts=0,
        position_embedding_type="rope",
        mamba_conv_bias=False,
        mamba_proj_bias=True,
        **{**_HYBRID, "mamba_n_groups": 1},
    ),
    "granite-hybrid-moe": _heads(
        4,
        2,
        model_type="granitemoehybrid",
        num_local_experts=5,
        num_experts_per_tok=2,
        shared_intermediate_size=80,
        residual_multiplier=0.4,
        **_HYBRID,
    ),
    "mamba": {
        "model_type": "mamba",
        "layer_norm_epsilon": 2e-3,
        "time_step_rank": 12,
        "use_bias": True,
        "use_conv_bias": False,
    },
    "falcon-mamba": {
        "model_type": "falcon_mamba",
        "layer_norm_epsilon": 2e-3,
        "mixer_rms_eps": 0.1,
        "tie_word_embeddings": False,
    },
    "mamba2": {
        "model_type": "mamba2",
        "num_heads": 8,
        "head_dim": 16,
        "n_groups": _NUM_GROUPS,
        "state_size": 24,
        "layer_norm_epsilon": 2e-3,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "time_step_limit": [0.1, 1.5],
    },
    "minimax": _heads(
        4,
        2,
        model_type="minimax",
        head_dim=24,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        block_size=16,
        full_attn_alpha_factor=1.3,
        full_attn_beta_factor=0.8,
        linear_attn_alpha_factor=1.6,
        linear_attn_beta_factor=0.9,
        mlp_alpha_factor=1.2,
        mlp_beta_factor=0.7,
        pad_token_id=0,
        **_EXPERTS,
    ),
    "ministral": _heads(
        4,
        2,
        model_type="ministral",
        head_dim=16,
        sliding_window=20,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    ),
    "ministral3": _heads(4, 2, model_type="ministral3", head_dim=16, rope_parameters=_GROWING_ROPE),
    "olmo2": _heads(4, 2, model_type="olmo2"),
    "olmo3": _heads(
        4,
        2,
        model_type="olmo3",
        sliding_window=20,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={"full_attention": _YARN_ROPE, "sliding_attention": _LOCAL_ROPE},
    ),
    # transformers saves convolutions rightly only if keys are as long as values.
    "olmo-hybrid": _heads(
        4,
        2,
        model_type="olmo_hybrid",
        pad_token_id=0,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        rms_norm_eps=2e-3,
    ),
    "phi3": _heads(4, 2, model_type="phi3", pad_token_id=0, sliding_window=40),
    "phi4-mini": _heads(
        4,
        2,
        model_type="phi3",
        pad_token_id=0,
        rope_parameters=_LONG_ROPE,
        tie_word_embeddings=True,
    ),
    "recurrent-gemma": _heads(
        3,
        1,
        model_type="recurrent_gemma",
        hidden_size=48,  # its root has more bits than bfloat16
        attention_window_size=20,
        block_types=["recurrent", "attention", "recurrent"],
        logits_soft_cap=4.0,
        lru_width=48,
        pad_token_id=0,
        tie_word_embeddings=True,
    ),
    "smollm3": _heads(
        4,
        2,
        model_type="smollm3",
        pad_token_id=0,
        no_rope_layers=[1, 0, 1],
        use_sliding_window=True,
        sliding_window=30,
    ),
    "zamba2": _heads(
        4,
        4,
        model_type="zamba2",
        layers_block_type=["linear_attention", "hybrid", "linear_attention", "hybrid", "hybrid"],
        num_hidden_layers=5,
        num_mem_blocks=2,
        adapter_rank=8,
        use_shared_attention_adapter=True,
        use_mem_rope=True,
        n_mamba_heads=8,
        mamba_ngroups=2,
        mamba_d_state=24,
        add_bias_linear=True,
        rms_norm_eps=2e-3,
        hidden_act="gelu",
        pad_token_id=0,
    ),
    "zamba2-plain": _heads(
        4,
        2,
        model_type="zamba2",
        layers_block_type=["linear_attention", "hybrid", "hybrid"],
        adapter_rank=8,
        n_mamba_heads=8,
        mamba_d_state=24,
        time_step_min=0.3,
        hidden_act="gelu",
        pad_token_id=0,
    ),
    "smollm": _heads(3, 1, model_type="llama", hidden_size=48, tie_word_embeddings=True),
}
FAMILIES = tuple(_FAMILIES)

# Models that transformers computes, by their types; with what differs from `_SIZES`.
_FALLBACKS: dict[str, dict[str, Any]] = {
    "afmoe": {**_EXPERTS, **_HEADS},
    "apertus": {},
    "arcee": {},
    "bitnet": {},
    "bloom": {"num_attention_heads": 6, "hidden_size": 96, "seq_length": 512},
    "codegen": {"rotary_dim": 8, "n_positions": 512},
    "cohere": {},
    "cohere2": _MIXED,
    "cwm": {**_HEADS, **_MIXED},
    "ernie4_5": _HEADS,
    "ernie4_5_moe": {**_EXPERTS, "moe_layer_start_index": 1, "moe_layer_end_index": 2},
    "exaone4": _MIXED,
    "falcon": {},
    "falcon-alibi": {"model_type": "falcon", "alibi": True, "multi_query": False},
    "falcon-groups": {
        "model_type": "falcon",
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
    },
    "flex_olmo": _EXPERTS,
    "gemma": _HEADS,
    "gemma3n_text": {
        **_HEADS,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 20,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 199,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "glm": _HEADS,
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neox": {},
    "gptj": {"rotary_dim": 8, "n_positions": 512},
    "granitemoe": _EXPERTS,
    "granitemoeshared": _EXPERTS,
    "helium": _HEADS,
    "hunyuan_v1_dense": _HEADS,
    "hunyuan_v1_moe": {**_EXPERTS, **_HEADS},
    "jetmoe": {**_EXPERTS, "kv_channels": 16},
    "minimax_m2": {**_EXPERTS, **_HEADS, "rotary_dim": 8},
    "modernbert-decoder": {**_MIXED, "local_attention": 20},
    "mpt": {"n_heads": 6, "d_model": 96, "max_seq_len": 512},
    "nemotron": {},
    "olmo": {},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "persimmon": {},
    "phi": {},
    "phimoe": _EXPERTS,
    "seed_oss": _HEADS,
    "solar_open": {**_EXPERTS, **_HEADS},
    "stablelm": _heads(4, 2),
    "starcoder2": {"sliding_window": 20},
    "vaultgemma": {**_HEADS, "sliding_window": 20, "query_pre_attn_scalar": 16},
    "xglm": {"attention_heads": 4, "ffn_dim": 96, "num_layers": 3, "d_model": 64},
}
FALLBACKS = tuple(_FALLBACKS)


def make_checkpoint(
    family: str, folder: Path, *, max_shard_size: str = "50GB", **overrides: Any
) -> PreTrainedModel:
    """Save a checkpoint of a family and return transformers' own float32 model.

    `overrides` replace values of its config.json. The weights depend on nothing but the family
    and the overrides; biases and norms are random too, so that a forgotten one shows. Attention is
    "eager", because with sdpa some releases of transformers ignore Gemma 2's soft cap.
    """
    config = AutoConfig.for_model(**{**values_of(family), **overrides})
    state = torch.get_rng_state()
    torch.manual_seed(7)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(
                (
                    *("norm.weight", "layernorm.weight", "norm_f.weight", "pre_norm.weight"),
                    *("layernorm_1.weight", "layernorm_2.weight", "router.scale", "expert_scale"),
                )
            ):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("sinks"):
                parameter.normal_()
            elif name.endswith((".D", ".dt_bias", ".A_log")):
                parameter.normal_(0, 0.7)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(0, 0.2)
            elif name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    if config.model_type == "falcon":
        model.config._attn_implementation = "sdpa"  # "eager" adds the biases of positions twice
    torch.set_rng_state(state)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model.eval()


def write_config(family: str, folder: Path, **overrides: Any) -> None:
    """Save the config.json of the checkpoint that `make_checkpoint` saves, without weights."""
    config = AutoConfig.for_model(**{**values_of(family), **overrides})
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    config.save_pretrained(folder)


def values_of(family: str) -> dict[str, Any]:
    """The values of a family's config.json."""
    if family in _FAMILIES:
        return {**_SIZES, **_FAMILIES[family]}
    tokens = {"pad_token_id": 0, "bos_token_id": 1}
    return {"model_type": family, **_SIZES, **_heads(4, 2), **tokens, **_FALLBACKS[family]}
