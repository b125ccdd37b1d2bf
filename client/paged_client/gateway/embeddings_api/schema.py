"""Request bodies for embeddings, scores and rankings; names are OpenAI's, vLLM's and Jina's."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PlainValidator

from paged_client.gateway.schema import EngineFields, TextOrIds, list_of_one, prompts

MAX_INPUTS = 2048  # OpenAI's limit
MAX_DIMENSIONS = 2**16

_NOT_SUPPORTED: dict[str, Any] = {
    **dict.fromkeys(("truncate_prompt_tokens", "messages", "mm_processor_kwargs"), None),
    **dict.fromkeys(("normalize", "activation", "use_activation", "softmax"), None),
    **dict.fromkeys(("instruction", "chat_template", "chat_template_kwargs"), None),
    "embed_dtype": "float32",
    "endianness": "native",
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


Texts = Annotated[
    list[str],
    Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True),
    BeforeValidator(list_of_one, json_schema_input_type=str | list[str]),
]


class ScoreRequest(EmbeddingFields):
    """The body of ``/v1/score``: one text is compared with several, or texts in pairs."""

    text_1: Texts
    text_2: Texts
    encoding_format: Literal["float"] = "float"


class RerankRequest(EmbeddingFields):
    """The body of ``/v1/rerank``."""

    query: str
    documents: Texts
    top_n: int = Field(0, ge=0, le=MAX_INPUTS, description="0 returns all")
    return_documents: bool = True
