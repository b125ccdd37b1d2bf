"""Limits of the queue and of a request."""

from __future__ import annotations

from dataclasses import dataclass

from paged_backend.values.validation import Rule, checked


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    """See :class:`paged_backend.values.config.EngineConfig`."""

    max_tenant_request_rate: float | None = checked(
        None,
        Rule(float, 1e-3, 1e6, optional=True),
        "accepted requests per second of one tenant, with bursts of up to two seconds' worth",
    )
    max_waiting_requests: int = checked(
        1024,
        Rule(int, 1, 2**20),
        "maximum number of waiting requests; more are refused with queue_full",
    )
    max_waiting_tokens: int = checked(
        2**20,
        Rule(int, 1, 2**40),
        "maximum number of tokens of all waiting requests; more are refused with queue_full",
    )
    max_prompt_tokens: int | None = checked(
        None,
        Rule(int, 1, 2**24, optional=True),
        "maximum number of prompt tokens; default: max_model_len - 1",
    )
    max_output_tokens: int | None = checked(
        None,
        Rule(int, 1, 2**24, optional=True),
        "maximum value of max_tokens; default: max_model_len",
    )
    max_n: int = checked(64, Rule(int, 1, 64), "maximum value of n")
    max_beam_width: int = checked(8, Rule(int, 1, 16), "maximum value of beam_width")
    max_stop_strings: int = checked(16, Rule(int, 0, 256), "maximum number of stop strings")
    max_stop_length: int = checked(256, Rule(int, 1, 256), "maximum characters per stop string")
    max_logit_bias: int = checked(
        1024, Rule(int, 0, 1024), "maximum number of entries of logit_bias"
    )
    max_json_length: int = checked(
        2**20, Rule(int, 2, 2**24), "maximum characters of sampling_parameters"
    )
    max_json_depth: int = checked(
        32, Rule(int, 1, 256), "maximum nesting of sampling_parameters and messages"
    )
    max_total_logprobs: int = checked(
        2**15,
        Rule(int, 1, 2**31 - 1),
        "maximum number of log-probabilities of a request: for each token of its completions, "
        "and of its prompt if requested, one and those of the most likely tokens",
    )
    max_total_logits: int = checked(
        2**19,
        Rule(int, 0, 2**31 - 1),
        "maximum number of logits that a request returns: for each token of its completions, or of "
        "its prompt, the size of the vocabulary; 0 turns them off",
    )
    max_open_result_bytes: int = checked(
        2**26,
        Rule(int, 1, 2**40),
        "maximum bytes of the logits and log-probabilities that open requests of an instance may "
        "hold together: 4 for each logit, 64 for each log-probability; more requests with such "
        "results are refused with queue_full",
    )
    max_pass_through_length: int = checked(
        4096,
        Rule(int, 0, 2**24),
        "maximum bytes of pass_through, which is returned with each response of a stream",
    )
