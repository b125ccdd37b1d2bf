"""Client of a paged_llm model on Triton Inference Server.

>>> with Client("127.0.0.1:8001") as client:
...     for chunk in client.stream("What does abs do?", temperature=0, max_tokens=64):
...         print(chunk.text, end="")
"""

from paged_client._aio import AsyncClient, AsyncStream
from paged_client._completion import CompletionBuilder
from paged_client._sync import Client, Stream
from paged_client._types import (
    Answer,
    Chunk,
    Completion,
    Embedding,
    EngineView,
    ModelInfo,
    Position,
    PredictionTokens,
    Score,
    SequenceView,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
)
from paged_client.errors import (
    ClientError,
    InvalidRequest,
    RequestCancelled,
    RequestTimeout,
    ServerError,
    Unavailable,
    UnknownModel,
)
from paged_client.protocol import Messages, Prompt

__all__ = [
    "Answer",
    "AsyncClient",
    "AsyncStream",
    "Chunk",
    "Client",
    "ClientError",
    "Completion",
    "CompletionBuilder",
    "Embedding",
    "Score",
    "EngineView",
    "InvalidRequest",
    "Messages",
    "ModelInfo",
    "Position",
    "PredictionTokens",
    "Prompt",
    "RequestCancelled",
    "RequestTimeout",
    "SequenceView",
    "ServerError",
    "Stream",
    "TokenLogprob",
    "ToolCall",
    "ToolCallDelta",
    "Unavailable",
    "UnknownModel",
]
