"""The inputs that several of tensorrtllm_backend's models have, without a batch dimension."""

from __future__ import annotations

from paged_backend.values.contract import TensorDeclaration


def specs(
    data_type: str, dims: int | tuple[int, ...], *names: str
) -> tuple[TensorDeclaration, ...]:
    """Return optional inputs, or outputs, of one type and shape."""
    return tuple(TensorDeclaration(name, data_type, dims) for name in names)


SAMPLING_INPUTS = (
    *specs("TYPE_STRING", 1, "guided_decoding_guide_type", "guided_decoding_guide"),
    *specs("TYPE_INT32", 1, "min_tokens", "num_return_sequences", "beam_width"),
    *specs("TYPE_INT32", 1, "end_id", "pad_id"),
    *specs("TYPE_FP32", 1, "temperature", "repetition_penalty"),
    *specs("TYPE_FP32", 1, "presence_penalty", "frequency_penalty"),
    *specs("TYPE_UINT64", 1, "seed", "lora_task_id"),
    *specs("TYPE_FP16", (-1, -1), "prompt_embedding_table", "lora_weights"),
    *specs("TYPE_INT32", 1, "prompt_vocab_size"),
    *specs("TYPE_INT32", (-1, 3), "lora_config"),
    *specs("TYPE_BOOL", 1, "return_log_probs", "return_context_logits"),
    *specs("TYPE_BOOL", 1, "return_generation_logits", "return_perf_metrics"),
    *specs("TYPE_BOOL", 1, "exclude_input_in_output"),
    *specs("TYPE_FP32", 1, "beam_search_diversity_rate"),
    *specs("TYPE_INT32", 1, "no_repeat_ngram_size"),
    *specs("TYPE_BOOL", 1, "early_stopping"),
    # The names of older releases, see ``sampling.OLDER_NAMES``.
    *specs("TYPE_INT32", 1, "min_length"),
    *specs("TYPE_UINT64", 1, "random_seed"),
    *specs("TYPE_BOOL", 1, "is_return_log_probs", "return_kv_cache_reuse_stats"),
)
TEXT_INPUTS = (
    *specs("TYPE_STRING", 1, "text_input"),
    *specs("TYPE_INT32", 1, "max_tokens", "top_k"),
    *specs("TYPE_FP32", 1, "top_p"),
    *specs("TYPE_STRING", -1, "stop_words", "bad_words", "embedding_bias_words"),
    *specs("TYPE_FP32", -1, "embedding_bias_weights"),
)
