"""The chat template of the model `demo-tools`, and its tokens, the same as Qwen3's."""

from __future__ import annotations

from pathlib import Path

from paged_backend.tools.demo.vocabulary import ChatFormat

TOOL_CHAT = ChatFormat(
    pad="<|pad|>",
    end="<|im_end|>",
    markers=("<|im_start|>",),
    template=(Path(__file__).parent / "chat_template.jinja").read_text("utf-8"),
    tags=(
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<tool_response>",
        "</tool_response>",
    ),
    # Line breaks never join what follows, so that a prompt that ends with some has the same token
    # ids when the answer is there.
    words=r"\n+| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|[^\S\n]+",
)
