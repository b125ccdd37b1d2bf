"""vLLM's engine arguments: options of this engine, names without effect, and refused values.

``model.json``, the command line and :class:`paged_backend.LLM` all accept them.

The lists hold the names of vLLM's EngineArgs and AsyncEngineArgs from 0.4 on. A name that is in
none of them is a mistake.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import ConfigError, option_error
from paged_backend.values.json_file import read_json_object
from paged_backend.values.options.chat_template import resolved_path
from paged_backend.values.options.generation import resolved_source
from paged_backend.values.options.speculation import OPTION, SpeculativeConfig
from paged_backend.values.pooling_params import PoolingType
from paged_backend.values.validation import check_known, coerce, shorten

_OURS = frozenset(spec.name for spec in fields(EngineConfig))
_SILENCE = "disable_log_stats"

# Other values of vLLM for options of this engine.
_ALIASES: dict[str, dict[str, str]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "load_format": {"safetensors": "auto", "hf": "auto"},
    "scheduling_policy": {"fcfs": "priority"},  # equal while no request has a priority
    "task": {"embedding": "embed"},
    "distributed_executor_backend": {"uni": "mp"},
    "pooling_type": {name.upper(): name for name in PoolingType},
}

# Names of tensorrtllm_backend and of newer versions of vLLM for options of this engine.
_RENAMED = {"max_queue_size": "max_waiting_requests", "runner": "task"}

# The values that describe what this engine does; other values are refused by name.
_ONLY: dict[str, tuple[object, ...]] = {
    # more than one device or machine
    **dict.fromkeys(("prefill_context_parallel_size", "decode_context_parallel_size"), (1,)),
    "data_parallel_size_local": (1, None),
    **dict.fromkeys(("data_parallel_rank", "data_parallel_start_rank"), (0, None)),
    **dict.fromkeys(("data_parallel_hybrid_lb", "data_parallel_external_lb"), (False,)),
    **dict.fromkeys(("enable_elastic_ep", "enable_fault_tolerance"), (False,)),
    "device_ids": (None,),
    # other weights, or the same in another form
    **dict.fromkeys(("quantization_config", "quantization_param_path"), (None,)),
    "code_revision": (None, "main"),
    **dict.fromkeys(("hf_config_path", "hf_token"), (None,)),
    **dict.fromkeys(("hf_overrides", "model_loader_extra_config", "rope_scaling"), (None, {})),
    "rope_theta": (None,),
    "trust_remote_code": (False,),
    "config_format": ("auto", "hf"),
    "override_attention_dtype": (None,),
    "weight_transfer_config": (None,),
    # another tokenizer, another task
    "tokenizer_mode": ("auto", "hf"),
    **dict.fromkeys(("skip_tokenizer_init", "tokens_only", "enable_prompt_embeds"), (False,)),
    "convert": ("auto", "none"),
    **dict.fromkeys(("pooler_config", "override_pooler_config", "io_processor_plugin"), (None,)),
    # adapters and speculation
    **dict.fromkeys(("enable_prompt_adapter",), (False,)),
    "lora_dtype": (None, "auto", "float32"),
    "enable_lora_bias": (False,),
    **dict.fromkeys(("default_mm_loras", "lora_target_modules"), (None,)),
    "long_lora_scaling_factors": (None,),
    **dict.fromkeys(("speculative_model", "num_speculative_tokens"), (None,)),
    # the KV cache
    "kv_cache_dtype_skip_layers": (None, []),
    "calculate_kv_scales": (False,),
    **dict.fromkeys(("cpu_offload_gb", "kv_offloading_size"), (0, None)),
    **dict.fromkeys(("kv_transfer_config", "ec_transfer_config"), (None,)),
    "num_gpu_blocks_override": (None,),
    "disable_sliding_window": (False,),
    # sampling and outputs
    **dict.fromkeys(("logits_processors", "logits_processor_pattern"), (None,)),
    "max_logprobs": (20,),
    "logprobs_mode": ("raw_logprobs",),
    # code of the user, and reports to other services
    "scheduler_cls": (None,),
    "worker_cls": (None, "auto"),
    "worker_extension_cls": (None, ""),
    "additional_config": (None, {}),
    **dict.fromkeys(("otlp_traces_endpoint", "collect_detailed_traces"), (None,)),
}

# Arguments that cannot change an answer: logs, transports between processes, compilers, tuning of
# kernels, and options of features that are off.
_NO_MEANING = frozenset(
    """
    aggregate_engine_logging disable_log_requests enable_log_requests max_log_len
    enable_logging_iteration_details show_hidden_metrics_for_version kv_cache_metrics
    kv_cache_metrics_sample cudagraph_metrics enable_mfu_metrics enable_mm_processor_stats
    enable_layerwise_nvtx_tracing profiler_config fail_on_environ_validation use_tqdm_on_load
    served_model_name

    worker_use_ray engine_use_ray ray_workers_use_nsight
    max_parallel_loading_workers disable_custom_all_reduce
    cpu_distributed_timeout_seconds data_parallel_address
    data_parallel_rpc_port data_parallel_backend dcp_comm_backend dcp_kv_cache_interleave_size
    cp_kv_cache_interleave_size numa_bind numa_bind_nodes numa_bind_cpus
    disable_nccl_for_dp_synchronization disable_frontend_multiprocessing shutdown_timeout
    engine_recovery_timeout internal_fault_report_port external_fault_notify_port
    gloo_comm_timeout fault_tolerance_config

    enable_ep_weight_filter moe_backend all2all_backend enable_eplb
    eplb_config num_redundant_experts eplb_window_size eplb_step_interval eplb_log_balancedness
    expert_placement_strategy enable_dbo ubatch_size dbo_decode_token_threshold
    dbo_prefill_token_threshold

    swap_space use_v2_block_manager preemption_mode num_lookahead_slots num_scheduler_steps
    multi_step_stream_outputs scheduler_delay_factor disable_async_output_proc
    max_num_partial_prefills max_long_partial_prefills long_prefill_token_threshold
    scheduler_reserve_full_isl disable_hybrid_kv_cache_manager kv_offloading_backend
    prefix_caching_hash_algo kv_sharing_fast_prefill offload_backend offload_group_size
    offload_num_in_group offload_prefetch_step offload_params cpu_offload_params
    enable_sleep_mode

    compilation_config max_seq_len_to_capture max_context_len_to_capture cuda_graph_sizes
    cudagraph_capture_sizes max_cudagraph_capture_size optimization_level performance_mode
    attention_backend attention_config kernel_config ir_op_priority enable_flashinfer_autotune
    gdn_prefill_backend kda_prefill_backend mamba_cache_dtype
    mamba_ssm_cache_dtype mamba_backend mamba_config
    enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds

    ignore_patterns pt_load_map_location safetensors_load_strategy allow_deprecated_quantization
    tokenizer_pool_size tokenizer_pool_type tokenizer_pool_extra_config renderer_num_workers
    intial_incremental_detokenization_offset

    lora_extra_vocab_size fully_sharded_loras enable_tower_connector_lora
    specialize_active_lora max_prompt_adapters
    max_prompt_adapter_token qlora_adapter_name_or_path

    speculative_model_quantization speculative_draft_tensor_parallel_size
    speculative_disable_mqa_scorer speculative_max_model_len speculative_disable_by_batch_size
    ngram_prompt_lookup_max ngram_prompt_lookup_min spec_decoding_acceptance_method
    typical_acceptance_sampler_posterior_threshold typical_acceptance_sampler_posterior_alpha
    disable_logprobs_during_spec_decoding

    guided_decoding_backend guided_decoding_disable_fallback
    guided_decoding_disable_any_whitespace guided_decoding_disable_additional_properties
    structured_outputs_config reasoning_parser_plugin reasoning_config

    limit_mm_per_prompt language_model_only enable_mm_embeds interleave_mm_strings
    media_io_kwargs mm_processor_kwargs disable_mm_preprocessor_cache mm_processor_cache_gb
    mm_processor_cache_type mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_tp_mode
    mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path
    mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin mm_tensor_ipc
    skip_mm_profiling video_pruning_rate disable_chunked_mm_input allowed_local_media_path
    allowed_media_domains enable_multimodal_encoder_data_parallel
    """.split()
)


_LORA_MODULES = "multi_lora.json"


@dataclass(frozen=True, slots=True)
class EngineArgs:
    """The options that a user gave."""

    config: EngineConfig
    log_stats: bool  # vLLM's metrics may be reported
    without_effect: tuple[str, ...]  # accepted names that change nothing


def read_engine_args(path: Path) -> EngineArgs:
    """Read a ``model.json``; folders and files named in it may be relative to it.

    Raises:
        ConfigError: the file is missing, is no JSON object, names an unknown option, or asks for
            something that this engine lacks.
    """
    values = read_json_object(path)
    for name in ("model", "tokenizer", "download_dir", "runtime_lora_folder"):
        value = values.get(name)
        if isinstance(value, str) and (path.parent / value).exists():
            values[name] = str((path.parent / value).resolve())
    if OPTION in values:
        values[OPTION] = SpeculativeConfig.resolved(values[OPTION], path.parent)
    source = values.get("generation_config")
    if isinstance(source, str):
        values["generation_config"] = resolved_source(source, path.parent)
    if _plain(values.get("enable_lora")) is True and values.get("lora_modules") is None:
        file = path.parent / _LORA_MODULES
        others = (values.get("runtime_lora_folder"), values.get("max_request_lora_bytes"))
        if file.exists() or not any(others):
            values["lora_modules"] = _read_lora_modules(file)
    template = values.get("chat_template")
    if isinstance(template, str):
        values["chat_template"] = resolved_path(template, path.parent)
    return from_mapping(values)


def _read_lora_modules(path: Path) -> dict[str, Any]:
    """Read the adapters of a model from vllm_backend's file; folders may be relative to it.

    Raises:
        ConfigError: the file is missing, or is no JSON object.
    """
    if not path.exists():
        raise ConfigError(f"Triton backend cannot find {path}.")  # vllm_backend's wording
    return {
        name: str((path.parent / folder).resolve()) if isinstance(folder, str) else folder
        for name, folder in read_json_object(path).items()
    }


def from_mapping(values: Mapping[str, Any]) -> EngineArgs:
    """Read engine arguments; null stands for the default of an option, as in vLLM.

    Raises:
        ConfigError: a name is unknown or a value is not allowed.
    """
    check_known(values, (*sorted(_OURS), _SILENCE, *_RENAMED, *_ONLY, *_NO_MEANING), option_error)
    values = _without_overrides(_renamed(values))
    for name, value in values.items():
        if name in _ONLY:
            _check_neutral(name, value)
    ours = {
        name: alias(name, value)
        for name, value in values.items()
        if name in _OURS and value is not None
    }
    return EngineArgs(
        EngineConfig.from_mapping(coerce(EngineConfig, ours)),
        log_stats=_plain(values.get(_SILENCE)) is not True,
        without_effect=tuple(name for name in values if name not in {*_OURS, _SILENCE}),
    )


def other_names() -> list[str]:
    """Return the accepted names that are not options of this engine.

    These are aliases of options, and arguments of vLLM that have no effect here or accept only a
    few values.
    """
    return [_SILENCE, *_RENAMED, *_ONLY, *sorted(_NO_MEANING)]


def _renamed(values: Mapping[str, Any]) -> dict[str, Any]:
    for theirs, ours in _RENAMED.items():
        if theirs in values and ours in values:
            raise option_error(theirs, f"is another name of {ours}; give one of them")
    return {_RENAMED.get(name, name): value for name, value in values.items()}


def _without_overrides(values: dict[str, Any]) -> dict[str, Any]:
    """Replace vLLM's ``hf_overrides`` for Qwen3-Reranker with the option that does the same.

    Raises:
        ConfigError: they ask for a classifier of another kind.
    """
    name, tokens = "hf_overrides", "classifier_from_token"
    overrides = values.get(name)
    if isinstance(overrides, str):
        with contextlib.suppress(ValueError):
            overrides = json.loads(overrides)
    if not isinstance(overrides, dict) or tokens not in overrides:
        return values
    match overrides:
        case {
            "architectures": ["Qwen3ForSequenceClassification"],
            "classifier_from_token": [str(first), str(second)],
            "is_original_qwen3_reranker": True,
        } if len(overrides) == 3:
            if values.get(tokens) is not None:
                raise option_error(tokens, f"is in {name}, too; give one of them")
            rest = {key: value for key, value in values.items() if key != name}
            return {**rest, tokens: f"{first},{second}"}
    raise option_error(
        name,
        'can only have architectures (["Qwen3ForSequenceClassification"]), classifier_from_token '
        "(two tokens) and is_original_qwen3_reranker (true), got "
        f"{shorten(json.dumps(overrides), 200, quote=False)}",
    )


def alias(name: str, value: Any) -> Any:
    """Return the value of our option for a value of vLLM's."""
    return _ALIASES.get(name, {}).get(value, value) if isinstance(value, str) else value


def _check_neutral(name: str, value: object) -> None:
    if value in _ONLY[name] or _plain(value) in _ONLY[name]:
        return
    allowed = " or ".join(json.dumps(neutral) for neutral in _ONLY[name])
    raise option_error(name, f"can only be {allowed} with this engine, got {shorten(value)}")


def _plain(value: object) -> object:
    """Convert a string of a command line to its value; other values are returned as they are."""
    if not isinstance(value, str):
        return value
    words: dict[str, object] = {"true": True, "false": False, "none": None, "null": None}
    if value.lower() in words:
        return words[value.lower()]
    try:
        return float(value)
    except ValueError:
        return value
