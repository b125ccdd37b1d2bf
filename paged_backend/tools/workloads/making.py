"""Builds the requests of a workload and checks that they fit the model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from paged_backend.tools.workloads.candidates import Candidate
from paged_backend.tools.workloads.options import NUM_PROMPTS, TokenizerContext, WorkloadOptions
from paged_backend.tools.workloads.request import WorkloadRequest
from paged_backend.tools.workloads.sharegpt import recorded_chats
from paged_backend.tools.workloads.synthetic import conversations, random_prompts, shared_prefixes
from paged_backend.tools.workloads.trace import trace_requests
from paged_backend.values.errors import ConfigError

_MAKERS: Mapping[str, Callable[[WorkloadOptions, TokenizerContext], Iterator[Candidate]]] = {
    "random": random_prompts,
    "shared-prefix": shared_prefixes,
    "conversations": conversations,
    "sharegpt": recorded_chats,
    "trace": trace_requests,
}


def make_requests(options: WorkloadOptions, material: TokenizerContext) -> list[WorkloadRequest]:
    """Build the requests of a workload; the same options always give the same requests.

    A sharegpt file with fewer conversations than requested is repeated.

    Raises:
        ConfigError: the file cannot be used (naming its line), a request does not fit
            ``max_model_len``, or there are no requests.
    """
    if options.num_prompts is None and options.dataset_name != "trace":
        options = replace(options, num_prompts=NUM_PROMPTS)
    fitting = _fitting(_MAKERS[options.dataset_name](options, material), options, material)
    requests = list(itertools.islice(fitting, options.num_prompts))
    if options.dataset_name == "sharegpt":
        requests = list(itertools.islice(itertools.cycle(requests), options.num_prompts))
    if not requests:
        raise ConfigError(_why_empty(options, material))
    return requests


def _fitting(
    candidates: Iterable[Candidate], options: WorkloadOptions, material: TokenizerContext
) -> Iterator[WorkloadRequest]:
    for candidate in candidates:
        if candidate.num_tokens <= material.max_model_len:
            yield candidate.request
        elif not options.skip_too_long:
            raise ConfigError(
                f"{candidate.place} does not fit: prompt and answer have {candidate.num_tokens} "
                f"tokens, max_model_len is {material.max_model_len}; ask for shorter ones, or "
                "leave out what is too long (option skip_too_long)"
            )


def _why_empty(options: WorkloadOptions, material: TokenizerContext) -> str:
    where = options.dataset_path or f"the {options.dataset_name} dataset"
    if options.skip_too_long:
        return (
            f"{where} holds no request that fits max_model_len ({material.max_model_len}); ask for "
            "shorter ones"
        )
    return f"{where} holds no request; choose a file with some (option dataset_path)"
