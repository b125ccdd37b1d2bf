"""The first and last step of a pipeline for clients of tensorrtllm_backend's ``ensemble``.

The clients' tensors have a batch dimension, which must be 1. Each sequence gets separate responses.
A field that this engine does not support is refused with an error that names the field, unless its
value turns it off.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from paged_backend import contract
from paged_backend.contract import named
from paged_backend.errors import InvalidRequest
from paged_backend.sampling_params import MAX_WORD_LENGTH
from paged_backend.serving import fields, postprocess, preprocess, triton
from paged_backend.serving.contract import Array, as_strings
from paged_backend.serving.fields import Tensors
from paged_backend.serving.pipeline import PassThrough, load_llm
from paged_backend.serving.postprocess import Leavers
from paged_backend.structured_outputs import KINDS, from_guide
from paged_backend.text.tokenizer import Tokenizer

_NO_END = -1  # the end_id with which only max_tokens and stop_words end a sequence

# Scalars with the same meaning here, and their names here.
_SAME = {
    "max_tokens": "max_tokens",
    "min_tokens": "min_tokens",
    "num_return_sequences": "n",
    "temperature": "temperature",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "seed": "seed",
}
_WORDS = {"stop_words": "stop", "bad_words": "bad_words"}
# The client's field for each of ours, for error messages.
_CALLED_THERE = {
    **{ours: theirs for theirs, ours in (_SAME | _WORDS).items()},
    "stop_token_ids": "end_id",
    "logit_bias": "embedding_bias_weights",
    **{f"structured_outputs.{kind}": "guided_decoding_guide" for kind in KINDS},
}
# Fields that have no effect unless they are set, and are not supported then.
_OFF = (
    *("decoder_text_input", "num_draft_tokens", "use_draft_logits"),
    *("prompt_embedding_table", "prompt_vocab_size", "prompt_table_extra_id"),
    *("lora_task_id", "lora_weights", "lora_config"),
    *("return_context_logits", "return_generation_logits", "return_perf_metrics"),
)
_WITHOUT_BEAMS = {"beam_width": (1,), "length_penalty": (0, 1)}
_COUNTS = ("return_num_input_tokens", "return_num_output_tokens")
_LOGPROBS = ("logprobs", "cumulative_logprob")
_FLAGS = named(contract.INPUTS, *(f"return_{name}" for name in _LOGPROBS))
_FROM_MODEL = (
    *postprocess.INPUTS,
    *(spec._replace(optional=True) for spec in named(contract.OUTPUTS, *_LOGPROBS)),
)


class Preprocess(preprocess.TritonPythonModel):
    """Translates the client's tensors into the model's."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Add the outputs; config.pbtxt declares the inputs as in the ensemble."""
        return triton.complete_config(config, (), (*preprocess.OUTPUTS, *_FLAGS))

    def _read(self, request: Any) -> Tensors:
        return {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}

    def _prepare(self, tensors: Tensors, parameters: str) -> dict[str, Array]:
        del parameters  # this client has none
        ours = _translated(tensors, self._llm.tokenizer)
        try:
            prepared = preprocess.prepare(self._llm, ours)
        except InvalidRequest as error:
            raise error.renamed(_CALLED_THERE.get(error.field, error.field)) from error
        asked = np.array([fields.flag(tensors, "return_log_probs")])
        return prepared | {spec.name: asked for spec in _FLAGS}


class Postprocess:
    """Translates the model's tensors into the client's."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Add the inputs; config.pbtxt declares the outputs as in the ensemble."""
        return triton.complete_config(config, _FROM_MODEL, (), decoupled=True)

    def initialize(self, args: dict[str, str]) -> None:
        """Load the tokenizer of the pipeline's model."""
        self._llm = load_llm(args)
        self._leavers = Leavers(self._llm)

    def execute(self, requests: list[Any]) -> None:
        """Answer each request with one response for each completion that has new tokens.

        A request without new tokens gets only the final flag. A request that fails gets one error.
        """
        for request in requests:
            sender = request.get_response_sender()
            try:
                responses = [triton.response(tensors) for tensors in self._pieces(request)]
            except Exception as error:
                responses = [triton.error_response(error)]
            for response in responses[:-1]:
                sender.send(response)
            sender.send(*responses[-1:], flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _pieces(self, request: Any) -> Iterator[dict[str, Array]]:
        tensors = triton.read_tensors(request, _FROM_MODEL)
        passed = PassThrough.from_tensor(tensors["pass_through"])
        self._leavers.look(request, passed)
        texts = postprocess.new_texts(self._llm.tokenizer, tensors, passed)
        counts = tensors["num_output_tokens"].tolist()
        for index, (text, count) in enumerate(zip(texts, counts, strict=True)):
            if count:
                yield {
                    "text_output": as_strings([text]),
                    "sequence_length": _batch(count),
                    "sequence_index": _batch(index),
                    "batch_index": _batch(0),
                    **_asked_for(tensors, passed, index),
                }


def _translated(tensors: Tensors, tokenizer: Tokenizer) -> dict[str, Array]:
    """Return the same inputs under this package's names."""
    _refuse_what_is_on(tensors)
    values: dict[str, Any] = {
        ours: fields.single(theirs, tensors[theirs]).item()
        for theirs, ours in _SAME.items()
        if theirs in tensors
    }
    for theirs, ours in _WORDS.items():
        if theirs in tensors:  # an empty string stands for no word
            values[ours] = [word for word in fields.strings(theirs, tensors[theirs]) if word]
    values |= _truncation(tensors) | _end(tensors) | _guide(tensors)
    if "embedding_bias_words" in tensors or "embedding_bias_weights" in tensors:
        values["logit_bias"] = _bias(tensors, tokenizer)
    if fields.flag(tensors, "return_log_probs"):
        values["logprobs"] = 0
    stream = fields.flag(tensors, "stream")
    return {
        "text_input": tensors["text_input"],
        "sampling_parameters": as_strings([json.dumps(values)]),
        "stream": np.array([stream]),
        # A stream never contains the prompt.
        "exclude_input_in_output": np.array(
            [stream or fields.flag(tensors, "exclude_input_in_output")]
        ),
        **{name: tensors[name] for name in _COUNTS if name in tensors},
    }


def _truncation(tensors: Tensors) -> dict[str, Any]:
    """Return ``top_k`` and ``top_p``; 0 turns one off, and without both decoding is greedy."""
    given = {
        name: value
        for name in ("top_k", "top_p")
        if name in tensors and (value := fields.single(name, tensors[name]).item())
    }
    return given or {"temperature": 0.0}


def _end(tensors: Tensors) -> dict[str, Any]:
    """Return the token that ends a sequence, if the client names it."""
    if "end_id" not in tensors:
        return {}
    end_id = fields.single("end_id", tensors["end_id"]).item()
    return {"ignore_eos": True, "stop_token_ids": [] if end_id == _NO_END else [end_id]}


def _guide(tensors: Tensors) -> dict[str, Any]:
    """Return the constraint on the output; an empty type stands for none."""
    kind, guide = (
        fields.string(name, tensors[name]) if name in tensors else ""
        for name in ("guided_decoding_guide_type", "guided_decoding_guide")
    )
    if not kind:
        if guide:
            raise InvalidRequest("guided_decoding_guide_type", "is missing; it says what it is")
        return {}
    return {"structured_outputs": from_guide(kind, guide or None)}


def _bias(tensors: Tensors, tokenizer: Tokenizer) -> dict[str, float]:
    """Return the bias for the logits of all tokens of the words."""
    for name in ("embedding_bias_words", "embedding_bias_weights"):
        if name not in tensors:
            raise InvalidRequest(name, "is missing; words and weights come together")
    words = fields.strings("embedding_bias_words", tensors["embedding_bias_words"])
    weights = fields.elements("embedding_bias_weights", tensors["embedding_bias_weights"])
    if len(words) != len(weights):
        raise InvalidRequest(
            "embedding_bias_weights", f"has {len(weights)} elements for {len(words)} words"
        )
    bias: defaultdict[str, float] = defaultdict(float)
    for word, weight in zip(words, weights, strict=True):
        if len(word) > MAX_WORD_LENGTH:
            raise InvalidRequest(
                "embedding_bias_words",
                f"each has at most {MAX_WORD_LENGTH} characters, got {len(word)}",
            )
        for token_id in tokenizer.encode(word, add_special_tokens=False):
            bias[str(token_id)] += weight
    return dict(bias)


def _refuse_what_is_on(tensors: Tensors) -> None:
    for name in _OFF:
        if name in tensors and tensors[name].any():
            raise InvalidRequest(name, "is not supported")
    for name in ("beam_width", "length_penalty"):
        if name in tensors and fields.single(name, tensors[name]) not in _WITHOUT_BEAMS[name]:
            raise InvalidRequest(name, "must be 1: beam search is not supported")


def _asked_for(tensors: Tensors, passed: PassThrough, index: int) -> dict[str, Array]:
    """Return the optional outputs for one sequence."""
    found: dict[str, Array] = {}
    if "logprobs" in tensors:
        entries = json.loads(fields.strings("logprobs", tensors["logprobs"])[index])
        sampled = [next(iter(entry.values()))["logprob"] for entry in entries]
        found["output_log_probs"] = np.array([[sampled]], np.float32)
        found["cum_log_probs"] = tensors["cumulative_logprob"][index].reshape(1, 1)
    if "num_input_tokens" in passed.wanted:
        found["num_input_tokens"] = _batch(passed.num_input_tokens)
    if "num_output_tokens" in passed.wanted:
        found["num_output_tokens"] = _batch(tensors["num_output_tokens"][index])
    return found


def _batch(value: int) -> Array:
    return np.array([[value]], np.int32)
