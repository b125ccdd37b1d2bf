"""The values of keys that a config.json may leave out, where they differ from Llama's.

transformers writes every key, but older files, and files of other tools, leave out keys if the
value is the default of the family's class in transformers. These are the defaults of version 5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.families.granite import granite_hybrid_keys
from paged_backend.checkpoint.families.kimi import kimi_linear_keys
from paged_backend.checkpoint.families.lfm2 import lfm2_keys, lfm2_moe_keys
from paged_backend.checkpoint.families.llama4 import llama4_keys
from paged_backend.checkpoint.families.mamba import mamba_keys
from paged_backend.checkpoint.families.nemotron_h import nemotron_h_keys
from paged_backend.checkpoint.families.recurrent_gemma import recurrent_gemma_keys
from paged_backend.checkpoint.families.zamba2 import zamba2_keys

_LATENT: dict[str, Any] = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "BambaForCausalLM": {"num_key_value_heads": 8, "rms_norm_eps": 1e-5},
    "DeepseekV2ForCausalLM": {
        **_LATENT,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
    },
    "DeepseekV3ForCausalLM": {
        **_LATENT,
        "first_k_dense_replace": 3,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
    },
    "FalconH1ForCausalLM": {
        "mamba_d_ssm": 1024,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
    },
    "FalconMambaForCausalLM": {"rms_norm_eps": 1e-5},
    "Gemma2ForCausalLM": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "Glm4ForCausalLM": {"rms_norm_eps": 0.00000015625},
    "Glm4MoeForCausalLM": {
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1,
        "rms_norm_eps": 1e-5,
        "topk_group": 1,
    },
    "Glm4MoeLiteForCausalLM": {
        **_LATENT,
        "moe_intermediate_size": 1536,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 1.8,
        "topk_group": 1,
        "v_head_dim": 256,
    },
    "GptOssForCausalLM": {"rms_norm_eps": 1e-5, "rope_theta": 150_000.0},
    "JambaForCausalLM": {
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 8,
    },
    "KimiLinearForCausalLM": {
        "first_k_dense_replace": 1,
        "kv_lora_rank": 512,
        "moe_intermediate_size": 1024,
        "n_group": 1,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 2.446,
        "topk_group": 1,
        "v_head_dim": 128,
    },
    "Lfm2ForCausalLM": {"rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0},
    "Lfm2MoeForCausalLM": {
        "moe_intermediate_size": 1792,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
    },
    "Llama4ForCausalLM": {"num_key_value_heads": 8, "rms_norm_eps": 1e-5},
    "Ministral3ForCausalLM": {"rms_norm_eps": 1e-5},
    "MiniCPM3ForCausalLM": {
        "dim_model_base": 256,
        "kv_lora_rank": 256,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "rms_norm_eps": 1e-5,
        "scale_depth": 1.4,
        "scale_emb": 12,
    },
    "MambaForCausalLM": {"rms_norm_eps": 1e-5},
    "Mamba2ForCausalLM": {
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 8,
        "mamba_n_heads": 128,
        "rms_norm_eps": 1e-5,
    },
    "MiniMaxForCausalLM": {
        "num_experts_per_tok": 2,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
    },
    "MinistralForCausalLM": {"sliding_window": 4096},
    "MixtralForCausalLM": {"rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0},
    "NemotronHForCausalLM": {
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 8,
        "mamba_n_heads": 128,
        "n_group": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "topk_group": 1,
    },
    "Olmo2ForCausalLM": {"rms_norm_eps": 1e-5},
    "Olmo3ForCausalLM": {"rms_norm_eps": 1e-5},
    "OlmoeForCausalLM": {"rms_norm_eps": 1e-5},
    "Phi3ForCausalLM": {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    "Zamba2ForCausalLM": {
        "mamba_d_state": 64,
        "mamba_n_heads": 8,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
}
# The rotary embeddings of files that describe none.
_ROPES: dict[str, dict[str, Any]] = {
    "GptOssForCausalLM": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "Ministral3ForCausalLM": {
        "rope_type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16_384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale_all_dim": 1.0,
        "mscale": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
# Families with other names of keys. These functions do not change what they return themselves.
_USUAL_KEYS: dict[str, Callable[[ConfigFile], ConfigFile]] = {
    "FalconMambaForCausalLM": mamba_keys,
    "GraniteMoeHybridForCausalLM": granite_hybrid_keys,
    "KimiLinearForCausalLM": kimi_linear_keys,
    "Lfm2ForCausalLM": lfm2_keys,
    "Lfm2MoeForCausalLM": lfm2_moe_keys,
    "Llama4ForCausalLM": llama4_keys,
    "MambaForCausalLM": mamba_keys,
    "Mamba2ForCausalLM": mamba_keys,
    "NemotronHForCausalLM": nemotron_h_keys,
    "RecurrentGemmaForCausalLM": recurrent_gemma_keys,
    "Zamba2ForCausalLM": zamba2_keys,
}
_ROPE_KEYS = "rope_parameters", "rope_scaling"


def with_family_defaults(config: ConfigFile, architecture: str) -> ConfigFile:
    """Return a config.json with the usual names of keys, and the family's values of absent ones.

    Args:
        config: the file.
        architecture: a key of `registry.ARCHITECTURES`.
    """
    if architecture in _USUAL_KEYS:
        config = _USUAL_KEYS[architecture](config)
    config = config.with_absent(**_DEFAULTS.get(architecture, {}))
    if architecture in _ROPES and all(config.value(key) is None for key in _ROPE_KEYS):
        config = config.with_defaults(rope_parameters=_ROPES[architecture])
    return config
