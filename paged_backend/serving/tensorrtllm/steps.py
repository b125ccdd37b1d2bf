"""The models ``preprocessing`` and ``postprocessing``: text to token ids, and back."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, ClassVar

import numpy as np

from paged_backend.serving import fields, triton
from paged_backend.serving.contract import Array, as_strings
from paged_backend.serving.fields import Tensors
from paged_backend.serving.pipeline import load_llm
from paged_backend.serving.requests.intake import MAX_WAITING_TASKS
from paged_backend.serving.requests.parameters import tenant_of
from paged_backend.serving.requests.preparation import Load, Preparation
from paged_backend.serving.requests.tasks import TaskKind
from paged_backend.serving.rotation import MAX_IDS_AT_ONCE, Rotation
from paged_backend.serving.tensorrtllm.arrays import (
    Outputs,
    element,
    is_batched,
    merge,
    split_rows,
)
from paged_backend.serving.tensorrtllm.batch import with_queue_words
from paged_backend.serving.tensorrtllm.lengths import check_queries, check_sequences
from paged_backend.serving.tensorrtllm.sampling import bias_of_words
from paged_backend.serving.tensorrtllm.specs import specs
from paged_backend.serving.tensorrtllm.words import NO_WORD, read_texts, write_words
from paged_backend.values.contract import TensorDeclaration
from paged_backend.values.errors import InvalidRequest, RequestRefused, as_exception
from paged_backend.values.sampling_params import MAX_BAD_WORDS, MAX_WORD_LENGTH

_WORD_LISTS = {"BAD_WORDS_DICT": "BAD_WORDS_IDS", "STOP_WORDS_DICT": "STOP_WORDS_IDS"}
_OFF = ("DECODER_QUERY", "PROMPT_TABLE_EXTRA_ID")
_PADDING = dict.fromkeys(_WORD_LISTS.values(), NO_WORD)


class _TextStep(ABC):
    """A step that answers small requests at once, and large ones on a thread."""

    inputs: ClassVar[tuple[TensorDeclaration, ...]]
    outputs: ClassVar[tuple[TensorDeclaration, ...]]

    @classmethod
    def auto_complete_config(cls, config: Any) -> Any:
        """Add the tensors."""
        return triton.add_tensors(config, cls.inputs, cls.outputs)

    def initialize(self, args: dict[str, str]) -> None:
        """Load the tokenizer of the pipeline's model."""
        self._llm = load_llm(args)
        self._is_batched = is_batched(args)

    def execute(self, requests: list[Any]) -> None:
        """Answer each request separately."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                tensors = triton.read_tensors(request, self.inputs)
                rows = split_rows(tensors, is_batched=self._is_batched)
                tenant = tenant_of({}, triton.read_parameters(request))
                self._start(tensors, self._answer(rows, sender), tenant)
            # An exception that leaves this method would fail every request of the batch.
            except Exception as error:
                triton.send_only(sender, triton.error_response(with_queue_words(error)))

    @abstractmethod
    def _start(self, tensors: Tensors, work: Iterator[None], tenant: str) -> None:
        """Do the work now or later."""

    def _answer(self, rows: list[Tensors], sender: Any) -> Iterator[None]:
        """Answer a request, a slice at a time."""
        answers: list[Outputs] = []
        try:
            self._check(rows)
            for row in rows:
                for part in self._parts(row):
                    answers.append(part)
                    yield
            answer = triton.response(merge(answers, padding=_PADDING))
        except BaseException as error:  # a tokenizer's may be no Exception
            answer = triton.error_response(as_exception(error))
        with contextlib.suppress(Exception):  # the server may have ended the request already
            triton.send_only(sender, answer)

    @abstractmethod
    def _check(self, rows: list[Tensors]) -> None:
        """Refuse what is too long.

        Raises:
            InvalidRequest: naming the tensor.
        """

    @abstractmethod
    def _parts(self, tensors: Tensors) -> Iterator[Outputs]:
        """Return the parts of a row's answer; each is a slice of the work."""


class Preprocessing(_TextStep):
    """Turns text and words into token ids; the outputs are inputs of ``tensorrt_llm``."""

    inputs = (
        TensorDeclaration("QUERY", "TYPE_STRING", 1, optional=False),
        TensorDeclaration("REQUEST_OUTPUT_LEN", "TYPE_INT32", 1, optional=False),
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

    def initialize(self, args: dict[str, str]) -> None:
        """Load the tokenizer of the pipeline's model."""
        super().initialize(args)
        self._preparation = Preparation(self._llm.config.max_waiting_tokens)

    def finalize(self) -> None:
        """Answer the waiting requests, and end properly."""
        self._preparation.close()
        self._llm.leave()

    def _start(self, tensors: Tensors, work: Iterator[None], tenant: str) -> None:
        if self._preparation.num_waiting >= MAX_WAITING_TASKS:
            problem = f"{MAX_WAITING_TASKS} requests wait to be tokenized; retry after 1 s"
            raise RequestRefused("queue_full", problem)
        load = replace(Load.of(tensors, ""), is_slow=self._llm.parser.prompts.is_slow)
        self._preparation.run(load, partial(_finish, work), tenant)

    def _check(self, rows: list[Tensors]) -> None:
        check_queries(rows, self._llm.parser.prompts.max_text_length)

    def _parts(self, tensors: Tensors) -> Iterator[Outputs]:
        for name in _OFF:
            if name in tensors and tensors[name].any():
                raise InvalidRequest(name, "is not supported")
        ids = self._token_ids(tensors)
        end_id = self._end_id(tensors)
        pad_id = fields.single("PAD_ID", tensors["PAD_ID"]) if "PAD_ID" in tensors else end_id
        output_length = fields.single("REQUEST_OUTPUT_LEN", tensors["REQUEST_OUTPUT_LEN"])
        yield {
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
        query = {
            "task": as_strings([TaskKind.TOKENIZE]),
            "text_input": as_strings([fields.string("QUERY", tensors["QUERY"])]),
        }
        parser = self._llm.parser
        try:
            return parser.tokenizer_tasks.answer(parser.read(query, ""))["output_ids"]
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


class Postprocessing(_TextStep):
    """Turns the outputs of ``tensorrt_llm`` into text."""

    inputs = (
        TensorDeclaration("TOKENS_BATCH", "TYPE_INT32", (-1, -1), optional=False),
        TensorDeclaration("SEQUENCE_LENGTH", "TYPE_INT32", -1, optional=False),
    )
    outputs = specs("TYPE_STRING", -1, "OUTPUT")

    def initialize(self, args: dict[str, str]) -> None:
        """Load the tokenizer of the pipeline's model."""
        super().initialize(args)
        self._rotation = Rotation("paged-long-texts")
        self._numbers = count()

    def finalize(self) -> None:
        """Answer what is open, and end properly."""
        self._rotation.close()
        self._llm.leave()

    def _start(self, tensors: Tensors, work: Iterator[None], tenant: str) -> None:
        # A sequence takes time even if it has no tokens.
        size = tensors["TOKENS_BATCH"].size + tensors["SEQUENCE_LENGTH"].size
        if size > MAX_IDS_AT_ONCE:
            self._rotation.put(tenant, f"{next(self._numbers)}", work)
        else:
            _finish(work)

    def _check(self, rows: list[Tensors]) -> None:
        check_sequences(rows, self._llm.limits)

    def _parts(self, tensors: Tensors) -> Iterator[Outputs]:
        yield {"OUTPUT": as_strings([])}  # there may be no sequence
        lengths = tensors["SEQUENCE_LENGTH"].reshape(-1).tolist()
        for row, length in zip(tensors["TOKENS_BATCH"], lengths, strict=True):
            token_ids = row[:length].tolist()
            self._llm.limits.check_token_ids("TOKENS_BATCH", token_ids)
            yield {"OUTPUT": as_strings([self._llm.tokenizer.decode(token_ids)])}


def _finish(work: Iterator[None]) -> None:
    deque(work, maxlen=0)
