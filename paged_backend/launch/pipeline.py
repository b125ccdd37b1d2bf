"""The models of a pipeline: the steps around a model, and the ensembles of these steps."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from paged_backend.launch.server_version import server_is_from
from paged_backend.values import contract
from paged_backend.values.contract import PARSED_TEXT, TOOL_INPUTS, TensorDeclaration, named
from paged_backend.values.errors import option_error

# Maximum number of responses that wait for the next step, and of requests that wait for the model:
# far more than run at once, and a limit for a step that hangs.
MAX_INFLIGHT_REQUESTS = 1024
_KNOWS_THE_BOUND = (2, 63)  # the first version of the server: release 25.11

_FILLED_IN = "The model's auto_complete_config fills in what is not here."
_IN_ORDER = "\n# One instance keeps the pieces of a stream in order."

# Inputs of the model that an ensemble does not have: other tasks, notes for its own steps, and
# logits.
_INNER_INPUTS = (
    *("image", "embedding_request", "text_pair", "task"),
    *("call_id", "pass_through", "return_context_ids"),
    *("return_context_logits", "return_generation_logits"),
)
_LLM_INPUTS = tuple(spec for spec in contract.INPUTS if spec.name not in _INNER_INPUTS)
_LLM_OUTPUTS = named(
    contract.OUTPUTS,
    *("text_output", "finish_reason", "logprobs", "num_output_tokens", "output_ids", "metrics"),
    *("cumulative_logprob", "num_input_tokens", "num_cached_tokens", "prompt_logprobs"),
    *("stop_reason", "tool_calls", "reasoning"),
)
# These tensors come from the model unchanged; the others pass through postprocess.
_LLM_DIRECT = (
    *("num_input_tokens", "num_cached_tokens", "metrics"),
    *("logprobs", "cumulative_logprob", "prompt_logprobs", "stop_reason"),
)
_LLM_PARSED = ("tool_calls", "reasoning")  # the same, but the first step needs their flags, too


# Tensors from preprocess to the model, and from the model to postprocess, in every pipeline.
_TO_MODEL = (
    *("input_ids", "stream", "sampling_parameters", "call_id", "pass_through"),
    *("exclude_input_in_output", "return_context_ids", "return_finish_reason"),
    *("return_num_output_tokens", "return_output_ids"),
)
_FROM_MODEL = (
    *("output_ids", "num_output_tokens", "finish_reason", "sequence_length"),
    *("context_ids", "num_context_ids", "num_held_ids", "pass_through"),
)


_CLASS = "TritonPythonModel"
# The models with tensorrtllm_backend's names and tensors: module and class.
_TENSORRTLLM = {
    "preprocessing": ("steps", "Preprocessing"),
    "tensorrt_llm": ("ids", _CLASS),
    "postprocessing": ("steps", "Postprocessing"),
    "ensemble": ("text", _CLASS),
    "tensorrt_llm_bls": ("text", _CLASS),
}


@dataclass(frozen=True, slots=True)
class PipelineModel:
    """One model of the repository."""

    name: str
    config: str  # config.pbtxt
    code: tuple[str, str] | None = None  # module and class; None for an ensemble


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """Options of the models with tensorrtllm_backend's tensors, by its templates' names."""

    triton_max_batch_size: int = 64  # 0: the tensors have no batch dimension
    decoupled_mode: bool = True  # False: one response for each request

    def __post_init__(self) -> None:
        """Raise ConfigError for a size that is not allowed."""
        if self.triton_max_batch_size < 0:
            raise option_error(
                "triton_max_batch_size", f"must be at least 0, got {self.triton_max_batch_size}"
            )


def pipeline_models(
    llm: str, prefix: str, options: PipelineOptions, *, bounded: bool
) -> list[PipelineModel]:
    """Return all models around the model ``llm``, with names that begin with ``prefix``.

    ``bounded`` is for servers that know ``max_inflight_requests``.
    """
    pre, post = f"{prefix}preprocess", f"{prefix}postprocess"
    steps = {"llm": llm, "preprocess": pre, "postprocess": post}
    return [
        PipelineModel(pre, _python({"llm": llm}), ("preprocess", _CLASS)),
        PipelineModel(post, _python({"llm": llm}, _IN_ORDER), ("postprocess", _CLASS)),
        PipelineModel(f"{prefix}llm", _ensemble(pre, llm, post, bounded=bounded)),
        PipelineModel(f"{prefix}llm_bls", _python(steps), ("bls", _CLASS)),
        *(
            PipelineModel(
                f"{prefix}{name}",
                _tensorrtllm(llm, options, is_step=module == "steps"),
                (f"tensorrtllm.{module}", class_name),
            )
            for name, (module, class_name) in _TENSORRTLLM.items()
        ),
    ]


def knows_the_bound(variables: Mapping[str, str] = os.environ) -> bool:
    """Return True if this is an NVIDIA image with a server that knows ``max_inflight_requests``."""
    return server_is_from(*_KNOWS_THE_BOUND, variables)


def _python(parameters: Mapping[str, str], comment: str = "", lines: Sequence[str] = ()) -> str:
    """Return the configuration of a Python model: a stage of the pipeline, or their caller."""
    return "".join(
        f"{line}\n"
        for line in (
            f"# {_FILLED_IN}{comment}",
            'backend: "python"',
            *lines,
            "instance_group [{ count: 1 kind: KIND_CPU }]",
            *(
                f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
                for key, value in parameters.items()
            ),
        )
    )


def _tensorrtllm(llm: str, options: PipelineOptions, *, is_step: bool) -> str:
    is_decoupled = options.decoupled_mode and not is_step
    lines = (
        f"max_batch_size: {options.triton_max_batch_size}",
        f"model_transaction_policy {{ decoupled: {str(is_decoupled).lower()} }}",
    )
    return _python({"llm": llm}, lines=lines)


def _ensemble(pre: str, llm: str, post: str, *, bounded: bool) -> str:
    given = [spec.name for spec in _LLM_INPUTS]
    wanted = [spec.name for spec in _LLM_OUTPUTS]
    flags = [f"return_{name}" for name in _LLM_DIRECT]
    to_model, from_model = _inner("to", _TO_MODEL), _inner("from", _FROM_MODEL)
    text = {"text_output": PARSED_TEXT}
    unchanged = [*_LLM_DIRECT, *_LLM_PARSED]
    steps = (
        (pre, _same(name for name in given if name not in flags), to_model),
        (
            llm,
            to_model | _same([*flags, *TOOL_INPUTS]),
            from_model | text | _same(unchanged),
        ),
        (
            post,
            from_model | _same(text.values()),
            _same(name for name in wanted if name not in unchanged),
        ),
    )
    lines = [
        'platform: "ensemble"',
        *_declared("input", _LLM_INPUTS),
        *_declared("output", _LLM_OUTPUTS),
        "ensemble_scheduling {",
        *([f"  max_inflight_requests: {MAX_INFLIGHT_REQUESTS}"] if bounded else []),
        *(line for step in steps for line in _step(*step)),
        "}",
    ]
    return "".join(f"{line}\n" for line in lines)


def _declared(kind: str, specs: Sequence[TensorDeclaration]) -> list[str]:
    return [
        f'{kind} {{ name: "{spec.name}" data_type: {spec.data_type} dims: {spec.dims}'
        + (" optional: true }" if kind == "input" else " }")
        for spec in specs
    ]


def _step(model: str, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> Iterator[str]:
    yield "  step {"
    yield f'    model_name: "{model}"'
    yield "    model_version: -1"
    for kind, names in (("input_map", inputs), ("output_map", outputs)):
        for key, value in names.items():
            yield f'    {kind} {{ key: "{key}" value: "{value}" }}'
    yield "  }"


def _same(names: Iterable[str]) -> dict[str, str]:
    """Return mappings of tensors with the same names for the caller."""
    return {name: name for name in names}


def _inner(way: str, names: Iterable[str]) -> dict[str, str]:
    """Return mappings of tensors between the steps and the model, which the caller does not see."""
    return {name: f"{way}_model_{name}" for name in names}
