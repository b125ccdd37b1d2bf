"""Request bodies for embeddings, scores and rankings; names are OpenAI's, vLLM's and Jina's."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PlainValidator, PrivateAttr
from pydantic_core import PydanticCustomError

from paged_client.gateway.errors import ApiError
from paged_client.gateway.schema.body import INT32_MAX
from paged_client.gateway.schema.generation import EngineFields
from paged_client.gateway.schema.prompts import TextOrIds, prompts

MAX_INPUTS = 2048  # OpenAI's limit
MAX_DIMENSIONS = 2**16

_NOT_SUPPORTED: dict[str, Any] = {
    **dict.fromkeys(("truncate_prompt_tokens", "messages", "mm_processor_kwargs"), None),
    **dict.fromkeys(("normalize", "activation", "use_activation", "softmax"), None),
    **dict.fromkeys(("instruction", "chat_template", "chat_template_kwargs"), None),
    "embed_dtype": "float32",
    "endianness": "native",
    "padding": "do_not_pad",
    **dict.fromkeys(("max_tokens_per_query", "max_tokens_per_doc"), 0),
    "rank_fields": ["text"],
}


class EmbeddingFields(EngineFields):
    """Fields of every request that is answered from embeddings."""

    not_supported: ClassVar[Mapping[str, Any]] = _NOT_SUPPORTED
    add_special_tokens: bool = True


class EmbeddingRequest(EmbeddingFields):
    """The body of ``/v1/embeddings``."""

    input: Annotated[
        list[TextOrIds],
        PlainValidator(
            partial(prompts, "input", MAX_INPUTS),
            json_schema_input_type=str | list[str] | list[int] | list[list[int]],
        ),
    ]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1, le=MAX_DIMENSIONS)

    def engine_fields(self) -> dict[str, Any]:
        """Return the fields that the engine takes under the same names."""
        values = super().engine_fields()
        return values if self.dimensions is None else values | {"dimensions": self.dimensions}


class PoolingRequest(EmbeddingRequest):
    """The body of ``/pooling``, vLLM's other form of ``/v1/embeddings``."""

    task: Literal["embed"] = "embed"


def _text(value: Any) -> str:
    """Return the text of a document, which Jina, Cohere and vLLM write in different ways."""
    match value:
        case str():
            return value
        case {"text": str(text), **others} if not others:
            return text
        case {"content": str(text), **others} if not others:
            return text
        case {"content": [{"type": "text", "text": str(text), **others}], **more}:
            if not others and not more:
                return text
    raise PydanticCustomError(
        "document",
        'must be a text, {"text": TEXT}, or {"content": TEXT or a list of one part of text}',
    )


def _documents(value: Any) -> Any:
    return [value] if isinstance(value, (str, dict)) else value


Text = Annotated[
    str, PlainValidator(_text, json_schema_input_type=str | dict[str, str | list[dict[str, str]]])
]
Texts = Annotated[
    list[Text],
    Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True),
    BeforeValidator(_documents, json_schema_input_type=Text | list[Text]),
]
_PAIRS = (
    ("text_1", "text_2"),
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
)


class ScoreRequest(EmbeddingFields):
    """The body of ``/v1/score``: one text is compared with several, or texts in pairs.

    The texts have the names ``text_1`` and ``text_2``, or another of vLLM's pairs of names.
    """

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    encoding_format: Literal["float"] = "float"
    _names: tuple[str, str] = PrivateAttr()

    def model_post_init(self, context: Any) -> None:
        """Check that the texts have one of the pairs of names."""
        found = {name for pair in _PAIRS for name in pair if getattr(self, name) is not None}
        for pair in _PAIRS:
            if found == set(pair):
                self._names = pair
                return
        known = ", ".join(" and ".join(pair) for pair in _PAIRS)
        missing = next((b if a in found else a for a, b in _PAIRS if {a, b} & found), "text_1")
        raise ApiError.field(missing, f"the texts must be given as {known}")

    @property
    def names(self) -> tuple[str, str]:
        """The names of the two fields that have the texts."""
        return self._names

    @property
    def pairs(self) -> tuple[list[str], list[str]]:
        """The first and the second texts."""
        first, second = self._names
        return getattr(self, first), getattr(self, second)


class RerankRequest(EmbeddingFields):
    """The body of ``/v1/rerank``."""

    query: Text
    documents: Texts
    top_n: int = Field(0, ge=0, le=INT32_MAX, description="0 returns all")
    return_documents: bool = True
