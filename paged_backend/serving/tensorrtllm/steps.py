"""The models ``preprocessing`` and ``postprocessing``: text to token ids, and back."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import numpy as np

from paged_backend.serving import fields, triton
from paged_backend.serving.contract import Array, as_strings
from paged_backend.serving.fields import Tensors
from paged_backend.serving.pipeline import load_llm
from paged_backend.serving.requests.tasks import TokenizerTask
from paged_backend.serving.tensorrtllm.arrays import (
    Outputs,
    element,
    is_batched,
    merge,
    split_rows,
)
from paged_backend.serving.tensorrtllm.sampling import bias_of_words
from paged_backend.serving.tensorrtllm.specs import specs
from paged_backend.serving.tensorrtllm.words import NO_WORD, read_texts, write_words
from paged_backend.values.contract import TensorSpec
from paged_backend.values.errors import InvalidRequest
from paged_backend.values.sampling_params import MAX_BAD_WORDS, MAX_WORD_LENGTH

_TOKENIZE = TokenizerTask("tokenize", is_charged=False)
_WORD_LISTS = {"BAD_WORDS_DICT": "BAD_WORDS_IDS", "STOP_WORDS_DICT": "STOP_WORDS_IDS"}
_OFF = ("DECODER_QUERY", "PROMPT_TABLE_EXTRA_ID")
_PADDING = dict.fromkeys(_WORD_LISTS.values(), NO_WORD)


class _Step:
    """A step that answers each request at once."""

    inputs: ClassVar[tuple[TensorSpec, ...]]
    outputs: ClassVar[tuple[TensorSpec, ...]]

    @classmethod
    def auto_complete_config(cls, config: Any) -> Any:
        """Add the tensors."""
        return triton.add_tensors(config, cls.inputs, cls.outputs)

    def initialize(self, args: dict[str, str]) -> None:
        """Load the tokenizer of the pipeline's model."""
        self._llm = load_llm(args)
        self._is_batched = is_batched(args)

    def finalize(self) -> None:
        """End properly."""
        self._llm.leave()

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request separately."""
        return [triton.respond(partial(self._answer, request)) for request in requests]

    def _answer(self, request: Any) -> Outputs:
        tensors = triton.read_tensors(request, self.inputs)
        rows = split_rows(tensors, is_batched=self._is_batched)
        return merge([self._row(row) for row in rows], padding=_PADDING)

    def _row(self, tensors: Tensors) -> Outputs:
        raise NotImplementedError


class Preprocessing(_Step):
    """Turns text and words into token ids; the outputs are inputs of ``tensorrt_llm``."""

    inputs = (
        TensorSpec("QUERY", "TYPE_STRING", 1, optional=False),
        TensorSpec("REQUEST_OUTPUT_LEN", "TYPE_INT32", 1, optional=False),
        *specs("TYPE_STRING", 1, "DECODER_QUERY"),
        *specs("TYPE_STRING", -1, *_WORD_LISTS, "EMBEDDING_BIAS_WORDS"),
        *specs("TYPE_FP32", -1, "EMBEDDING_BIAS_WEIGHTS"),
        *specs("TYPE_INT32", 1, "END_ID", "PAD_ID"),
        *specs("TYPE_UINT64", 1, "PROMPT_TABLE_EXTRA_ID"),
    )
    outputs = (
        *specs("TYPE_INT32", -1, "INPUT_ID", "DECODER_INPUT_ID"),
        *specs("TYPE_INT32", 1, "REQUEST_INPUT_LEN", "REQUEST_DECODER_INPUT_LEN"),
        *specs("TYPE_INT32", 1, "REQUEST_OUTPUT_LEN", "OUT_END_ID", "OUT_PAD_ID"),
        *specs("TYPE_INT32", (2, -1), *_WORD_LISTS.values()),
        *specs("TYPE_FP32", -1, "EMBEDDING_BIAS"),
    )

    def _row(self, tensors: Tensors) -> Outputs:
        for name in _OFF:
            if name in tensors and tensors[name].any():
                raise InvalidRequest(name, "is not supported")
        ids = self._token_ids(tensors)
        end_id = self._end_id(tensors)
        pad_id = fields.single("PAD_ID", tensors["PAD_ID"]) if "PAD_ID" in tensors else end_id
        output_length = fields.single("REQUEST_OUTPUT_LEN", tensors["REQUEST_OUTPUT_LEN"])
        return {
            "INPUT_ID": ids[None],
            "REQUEST_INPUT_LEN": element(len(ids)),
            # For models with an encoder, of which there are none: the one token stands for nothing.
            "DECODER_INPUT_ID": element(end_id),
            "REQUEST_DECODER_INPUT_LEN": element(1),
            "REQUEST_OUTPUT_LEN": element(output_length),
            "OUT_END_ID": element(end_id),
            "OUT_PAD_ID": element(pad_id),
            **{ours: self._words(tensors, theirs) for theirs, ours in _WORD_LISTS.items()},
            "EMBEDDING_BIAS": self._bias(tensors),
        }

    def _token_ids(self, tensors: Tensors) -> Array:
        query = {"text_input": as_strings([fields.string("QUERY", tensors["QUERY"])])}
        try:
            self._llm.parser.read(query, "")
            return self._llm.parser.answer_task(_TOKENIZE, query)["output_ids"]
        except InvalidRequest as error:
            raise error.renamed("QUERY") from error

    def _end_id(self, tensors: Tensors) -> int:
        """Return the client's token, or the tokenizer's."""
        if "END_ID" in tensors:
            return int(fields.single("END_ID", tensors["END_ID"]))
        end_id = self._llm.tokenizer.eos_token_id
        if end_id is None:
            raise InvalidRequest("END_ID", "is missing, and the tokenizer has no end token")
        return end_id

    def _words(self, tensors: Tensors, name: str) -> Array:
        max_words = 2 * MAX_BAD_WORDS  # no list of the model has more words
        texts = (
            read_texts(name, tensors[name], max_words, MAX_WORD_LENGTH) if name in tensors else []
        )
        words = list(filter(None, texts))
        return write_words(self._llm.tokenizer.encode_batch(words, add_special_tokens=False))[None]

    def _bias(self, tensors: Tensors) -> Array:
        """Return the bias of each token of the vocabulary."""
        names = {
            "embedding_bias_words": "EMBEDDING_BIAS_WORDS",
            "embedding_bias_weights": "EMBEDDING_BIAS_WEIGHTS",
        }
        given = {ours: tensors[theirs] for ours, theirs in names.items() if theirs in tensors}
        bias = np.zeros((1, self._llm.limits.vocab_size), np.float32)
        try:
            for token_id, weight in bias_of_words(given, self._llm).items():
                bias[0, int(token_id)] = weight
        except InvalidRequest as error:
            raise error.renamed(names.get(error.field, error.field)) from error
        return bias


class Postprocessing(_Step):
    """Turns the outputs of ``tensorrt_llm`` into text."""

    inputs = (
        TensorSpec("TOKENS_BATCH", "TYPE_INT32", (-1, -1), optional=False),
        TensorSpec("SEQUENCE_LENGTH", "TYPE_INT32", -1, optional=False),
    )
    outputs = specs("TYPE_STRING", -1, "OUTPUT")

    def _row(self, tensors: Tensors) -> Outputs:
        lengths = tensors["SEQUENCE_LENGTH"].reshape(-1).tolist()
        tokens = tensors["TOKENS_BATCH"]
        if len(tokens) != len(lengths):
            raise InvalidRequest(
                "SEQUENCE_LENGTH", f"has {len(lengths)} elements for {len(tokens)} sequences"
            )
        return {"OUTPUT": as_strings(map(self._text, tokens.tolist(), lengths))}

    def _text(self, token_ids: list[int], length: int) -> str:
        if not 0 <= length <= len(token_ids):
            raise InvalidRequest(
                "SEQUENCE_LENGTH", f"must be from 0 to {len(token_ids)}, got {length}"
            )
        self._llm.limits.check_token_ids("TOKENS_BATCH", token_ids[:length])
        return self._llm.tokenizer.decode(token_ids[:length])
