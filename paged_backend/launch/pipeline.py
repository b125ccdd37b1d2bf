"""The models of a pipeline: the steps around a model, and the ensembles of these steps."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from paged_backend import contract
from paged_backend.contract import PARSED_TEXT, TensorSpec, named
from paged_backend.launch.server_version import server_is_from

# Maximum number of responses that wait for the next step, and of requests that wait for the model:
# far more than run at once, and a limit for a step that hangs.
MAX_INFLIGHT_REQUESTS = 1024
_KNOWS_THE_BOUND = (2, 63)  # the first version of the server, that of release 25.11

_FILLED_IN = "The model's auto_complete_config fills in what is not here."
_IN_ORDER = "\n# One instance keeps the pieces of a stream in order."

# Inputs of the model that an ensemble does not have: other tasks, and notes for its own steps.
_INNER_INPUTS = (
    *("image", "embedding_request", "task"),
    *("call_id", "pass_through", "return_context_ids"),
)
_LLM_INPUTS = tuple(spec for spec in contract.INPUTS if spec.name not in _INNER_INPUTS)
_LLM_OUTPUTS = named(
    contract.OUTPUTS,
    *("text_output", "finish_reason", "logprobs", "num_output_tokens", "output_ids"),
    *("cumulative_logprob", "num_input_tokens", "num_cached_tokens", "prompt_logprobs"),
    *("stop_reason", "tool_calls", "reasoning"),
)
# These tensors come from the model unchanged; the others pass through postprocess.
_LLM_DIRECT = (
    *("num_input_tokens", "num_cached_tokens"),
    *("logprobs", "cumulative_logprob", "prompt_logprobs", "stop_reason"),
)
_LLM_PARSED = ("tool_calls", "reasoning")  # the same, but the first step needs their flags, too


def _specs(data_type: str, dims: tuple[int, ...], *names: str) -> list[TensorSpec]:
    return [TensorSpec(name, data_type, dims) for name in names]


# The names of tensorrtllm_backend, whose clients send a batch dimension.
_TENSORRTLLM_INPUTS = (
    *_specs("TYPE_STRING", (-1, 1), "text_input", "decoder_text_input"),
    *_specs("TYPE_STRING", (-1, 1), "guided_decoding_guide_type", "guided_decoding_guide"),
    *_specs("TYPE_STRING", (-1, -1), "bad_words", "stop_words", "embedding_bias_words"),
    *_specs("TYPE_INT32", (-1, 1), "max_tokens", "min_tokens", "num_return_sequences"),
    *_specs("TYPE_INT32", (-1, 1), "beam_width", "top_k", "end_id", "pad_id"),
    *_specs("TYPE_INT32", (-1, 1), "num_draft_tokens", "prompt_vocab_size"),
    *_specs("TYPE_FP32", (-1, 1), "top_p", "temperature", "length_penalty"),
    *_specs("TYPE_FP32", (-1, 1), "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *_specs("TYPE_FP32", (-1, -1), "embedding_bias_weights"),
    *_specs("TYPE_UINT64", (-1, 1), "seed", "lora_task_id", "prompt_table_extra_id"),
    *_specs("TYPE_BOOL", (-1, 1), "stream", "exclude_input_in_output", "use_draft_logits"),
    *_specs("TYPE_BOOL", (-1, 1), "return_log_probs", "return_context_logits"),
    *_specs("TYPE_BOOL", (-1, 1), "return_generation_logits", "return_perf_metrics"),
    *_specs("TYPE_BOOL", (-1, 1), "return_num_input_tokens", "return_num_output_tokens"),
    *_specs("TYPE_FP16", (-1, -1, -1), "prompt_embedding_table", "lora_weights"),
    *_specs("TYPE_INT32", (-1, -1, 3), "lora_config"),
)
_TENSORRTLLM_OUTPUTS = (
    TensorSpec("text_output", "TYPE_STRING", -1),
    *_specs("TYPE_FP32", (-1, -1, -1), "output_log_probs"),
    *_specs("TYPE_FP32", (-1, -1), "cum_log_probs"),
    *_specs("TYPE_INT32", (-1, -1), "sequence_length", "batch_index", "sequence_index"),
    *_specs("TYPE_INT32", (-1, -1), "num_input_tokens", "num_output_tokens"),
)

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


@dataclass(frozen=True, slots=True)
class PipelineModel:
    """One model of the repository."""

    name: str
    config: str  # config.pbtxt
    code: tuple[str, str] | None = None  # module and class; None for an ensemble


@dataclass(frozen=True, slots=True)
class _Face:
    """The tensors of an ensemble, and how they differ from the tensors of the model."""

    inputs: Sequence[TensorSpec]
    outputs: Sequence[TensorSpec]
    required: Sequence[str] = ()
    direct: Sequence[str] = ()  # outputs of the model that the caller can request
    through: Sequence[str] = ()  # outputs that the steps compute or change
    shared: Sequence[str] = ()  # inputs of both the first step and the model
    parsed: Sequence[str] = ()  # outputs of the model that make it leave them out of its text


_LLM = _Face(
    _LLM_INPUTS,
    _LLM_OUTPUTS,
    direct=_LLM_DIRECT,
    shared=contract.TOOL_INPUTS,
    parsed=_LLM_PARSED,
)
_TENSORRTLLM = _Face(
    _TENSORRTLLM_INPUTS,
    _TENSORRTLLM_OUTPUTS,
    required=("text_input", "max_tokens"),
    through=("logprobs", "cumulative_logprob"),
)


def pipeline_models(llm: str, prefix: str, *, bounded: bool) -> list[PipelineModel]:
    """Return all models around the model ``llm``, with names that begin with ``prefix``.

    ``bounded`` is for servers that know ``max_inflight_requests``.
    """
    pre, post = f"{prefix}preprocess", f"{prefix}postprocess"
    trt_pre, trt_post = f"{prefix}tensorrtllm_preprocess", f"{prefix}tensorrtllm_postprocess"
    trt_in = _declared("input", _TENSORRTLLM.inputs, _TENSORRTLLM.required)
    trt_out = _declared("output", _TENSORRTLLM.outputs)
    steps = {"llm": llm, "preprocess": pre, "postprocess": post}
    return [
        PipelineModel(pre, _python({"llm": llm}), ("preprocess", "TritonPythonModel")),
        PipelineModel(post, _python({"llm": llm}, _IN_ORDER), ("postprocess", "TritonPythonModel")),
        PipelineModel(f"{prefix}llm", _ensemble(_LLM, pre, llm, post, bounded=bounded)),
        PipelineModel(f"{prefix}llm_bls", _python(steps), ("bls", "TritonPythonModel")),
        PipelineModel(trt_pre, _python({"llm": llm}, lines=trt_in), ("tensorrtllm", "Preprocess")),
        PipelineModel(
            trt_post,
            _python({"llm": llm}, _IN_ORDER, lines=trt_out),
            ("tensorrtllm", "Postprocess"),
        ),
        PipelineModel(
            f"{prefix}ensemble", _ensemble(_TENSORRTLLM, trt_pre, llm, trt_post, bounded=bounded)
        ),
    ]


def knows_the_bound(variables: Mapping[str, str] = os.environ) -> bool:
    """Return True if this is an NVIDIA image with a server that knows ``max_inflight_requests``."""
    return server_is_from(*_KNOWS_THE_BOUND, variables)


def _python(parameters: Mapping[str, str], comment: str = "", lines: Sequence[str] = ()) -> str:
    """Return the config of a step, or of a model that calls the steps."""
    return "".join(
        f"{line}\n"
        for line in (
            f"# {_FILLED_IN}{comment}",
            'backend: "python"',
            "instance_group [{ count: 1 kind: KIND_CPU }]",
            *(
                f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
                for key, value in parameters.items()
            ),
            *lines,
        )
    )


def _ensemble(face: _Face, pre: str, llm: str, post: str, *, bounded: bool) -> str:
    given = [spec.name for spec in face.inputs]
    wanted = [spec.name for spec in face.outputs]
    flags = [f"return_{name}" for name in face.direct]
    to_model = _inner("to", [*_TO_MODEL, *(f"return_{name}" for name in face.through)])
    from_model = _inner("from", [*_FROM_MODEL, *face.through])
    text = {"text_output": PARSED_TEXT} if face.parsed else {}
    unchanged = [*face.direct, *face.parsed]
    steps = (
        (pre, _same(name for name in given if name not in flags), to_model),
        (
            llm,
            to_model | _same([*flags, *face.shared]),
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
        *_declared("input", face.inputs, face.required),
        *_declared("output", face.outputs),
        "ensemble_scheduling {",
        *([f"  max_inflight_requests: {MAX_INFLIGHT_REQUESTS}"] if bounded else []),
        *(line for step in steps for line in _step(*step)),
        "}",
    ]
    return "".join(f"{line}\n" for line in lines)


def _declared(kind: str, specs: Sequence[TensorSpec], required: Sequence[str] = ()) -> list[str]:
    return [
        f'{kind} {{ name: "{spec.name}" data_type: {spec.data_type} dims: {_dims(spec)}'
        + (" optional: true }" if kind == "input" and spec.name not in required else " }")
        for spec in specs
    ]


def _dims(spec: TensorSpec) -> str:
    if isinstance(spec.dims, int):
        return str(spec.dims)
    return f"[ {', '.join(map(str, spec.dims))} ]"


def _step(model: str, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> Iterator[str]:
    yield "  step {"
    yield f'    model_name: "{model}"'
    yield "    model_version: -1"
    for kind, names in (("input_map", inputs), ("output_map", outputs)):
        for key, value in names.items():
            yield f'    {kind} {{ key: "{key}" value: "{value}" }}'
    yield "  }"


def _same(names: Iterable[str]) -> dict[str, str]:
    """Return mappings of tensors whose names are the same for the caller."""
    return {name: name for name in names}


def _inner(way: str, names: Iterable[str]) -> dict[str, str]:
    """Return mappings of tensors between the steps and the model, which the caller does not see."""
    return {name: f"{way}_model_{name}" for name in names}
