"""Reads the prompt of a request: text, token ids or chat messages become token ids."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paged_backend.serving import fields
from paged_backend.serving.fields import Tensors
from paged_backend.text.chat import Chat
from paged_backend.text.tokenizer import Tokenizer
from paged_backend.text.tokenizer_limits import PROBE_LENGTH
from paged_backend.values.errors import InvalidRequest
from paged_backend.values.request import RequestLimits

TEXT, TEXT_PAIR = "text_input", "text_pair"  # the texts of a pair
EMBEDDING_REQUEST = "embedding_request"  # vllm_backend's tensor: a prompt with its parameters
SOURCES = ("text_input", "input_ids", "messages")
# A character may be written as two escaped surrogates, and each message has fields around its text.
JSON_PER_CHARACTER = 12
JSON_BESIDES = 2**16
# Thread time to encode a short text; after one that took longer, the tokenizer is a slow one.
SLOW_ENCODING_S = 0.02
UTF8_BYTES = 4  # maximum number of bytes of a character


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of a prompt.

    Attributes:
        token_ids: ids of the tokens.
        text: text that they were made from, if any.
        is_continued: the answer goes on with the last message.
    """

    token_ids: list[int]
    text: str | None
    is_continued: bool = False


class PromptReader:
    """Tokenizes prompts for a model with a limited context."""

    def __init__(self, tokenizer: Tokenizer, limits: RequestLimits) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        # A prompt with more characters cannot fit; it is not tokenized.
        self.max_text_length = limits.max_prompt_tokens * tokenizer.max_token_length
        self.max_json_length = JSON_PER_CHARACTER * self.max_text_length + JSON_BESIDES
        self.is_slow = False  # a short text took long; then no text is short enough

    def check_lengths(self, tensors: Tensors) -> None:
        """Refuse a prompt that is too long, without decoding it.

        Raises:
            InvalidRequest: the prompt is too long; the error names the tensor.
        """
        for name, limit in (
            (TEXT, self.max_text_length),
            (TEXT_PAIR, self.max_text_length),
            ("messages", self.max_json_length),
            (EMBEDDING_REQUEST, self.max_json_length),
            ("tools", self.max_json_length),
        ):
            if name in tensors:
                length = len(fields.single(name, tensors[name])) // UTF8_BYTES
                self._check_length(name, length, limit)

    def read(self, tensors: Tensors, tools: Sequence[Mapping[str, Any]] = ()) -> Prompt:
        """Return the prompt in a request's tensors.

        Args:
            tensors: tensors of the request.
            tools: tools for the chat template, as OpenAI's JSON.

        Raises:
            InvalidRequest: there is no prompt, more than one, or it cannot be tokenized.
        """
        given = [name for name in SOURCES if name in tensors]
        if not given:
            raise InvalidRequest("text_input", f"is missing; give one of {', '.join(SOURCES)}")
        if len(given) > 1:
            raise InvalidRequest(given[0], f"give either {' or '.join(given)}, not both")
        (name,) = given
        if name == "input_ids":
            return Prompt(fields.elements(name, tensors[name], self._limits.max_model_len), None)
        if name == "messages":
            chat, text = self._render(tensors, tools)
            prompt = self.encode(name, text, add_special_tokens=False)
            return replace(prompt, is_continued=chat.continue_final_message)
        return self.encode(
            name,
            fields.string(name, tensors[name]),
            add_special_tokens=fields.flag(tensors, "add_special_tokens", default=True),
        )

    def read_pair(self, tensors: Tensors) -> Prompt:
        """Return the tokens of a pair of texts, joined as the tokenizer joins them.

        Raises:
            InvalidRequest: a text is missing, too long or no valid Unicode.
        """
        texts = []
        for name in (TEXT, TEXT_PAIR):
            if name not in tensors:
                raise InvalidRequest(name, f"is missing; a score is of {TEXT} and {TEXT_PAIR}")
            text = fields.string(name, tensors[name])
            self._check_length(name, len(text), self.max_text_length)
            texts.append(text)
        with self._measuring(sum(map(len, texts))):
            return Prompt(self._tokenizer.encode_pair(*texts), None)

    def _render(self, tensors: Tensors, tools: Sequence[Mapping[str, Any]]) -> tuple[Chat, str]:
        """Return a chat, and its text."""
        if self._tokenizer.chat_template is None:
            raise InvalidRequest("messages", "cannot be used: the model has no chat template")
        source = fields.string("messages", tensors["messages"])
        self._check_length("messages", len(source), self.max_json_length)
        values = fields.parse_json("messages", source, self._limits.max_json_depth)
        chat = Chat.from_json(values)
        return chat, self._tokenizer.chat_template.render(chat, tools)

    def encode(self, name: str, text: str, *, add_special_tokens: bool = True) -> Prompt:
        """Tokenize a text.

        Raises:
            InvalidRequest: it is too long or no valid Unicode; ``name`` is the field that has it.
        """
        self._check_length(name, len(text), self.max_text_length)
        with self._measuring(len(text)):
            (ids,) = self._tokenizer.encode_prompts([text], add_special_tokens=add_special_tokens)
        return Prompt(ids, text)

    @contextlib.contextmanager
    def _measuring(self, length: int) -> Iterator[None]:
        """Find out whether a short text takes long, which the checks at load cannot rule out."""
        start_s = time.thread_time()  # the library encodes a single text on this thread
        try:
            yield
        finally:
            if length <= PROBE_LENGTH and time.thread_time() - start_s > SLOW_ENCODING_S:
                self.is_slow = True

    def _check_length(self, name: str, length: int, max_length: int) -> None:
        if length > max_length:
            raise InvalidRequest(
                name,
                f"has {length} characters, more than can become {self._limits.longest_prompt}",
            )
