"""LangChain's chat models of OpenAI and Anthropic: a tool call, its result, streams, schemas."""

# /// script
# dependencies = ["langchain-openai", "langchain-anthropic"]
# ///

import os
from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

MODEL, QUESTION = os.environ["MODEL"], os.environ["QUESTION"]
NAME, RESULT = os.environ["NAME"], os.environ["RESULT"]


@tool
def lookup(name: str) -> str:
    """Look up the documentation of a function."""
    assert name == NAME
    return RESULT


class Function(BaseModel, extra="forbid"):
    """A function of the standard library."""

    name: str = Field(max_length=20)
    is_builtin: bool


def converse(model: Any) -> None:
    """Let the model call the tool, and answer from its result."""
    bound = model.bind_tools([lookup])
    called = bound.invoke(QUESTION)
    assert [(call["name"], call["args"]) for call in called.tool_calls] == [
        ("lookup", {"name": NAME})
    ], called
    (call,) = called.tool_calls
    result = lookup.invoke(call)
    assert isinstance(result, ToolMessage)
    answer = bound.invoke([HumanMessage(QUESTION), called, result])
    assert answer.text == RESULT, answer
    assert answer.usage_metadata["output_tokens"] > 0
    pieces = list(bound.stream([HumanMessage(QUESTION), called, result]))
    assert "".join(piece.text for piece in pieces) == RESULT and len(pieces) > 3
    parts = None
    for piece in bound.stream(QUESTION):
        parts = piece if parts is None else parts + piece
    assert parts is not None and parts.tool_calls[0]["args"] == {"name": NAME}, parts


def main() -> None:
    openai = ChatOpenAI(model=MODEL, temperature=0, max_tokens=200)
    converse(openai)
    print("ChatOpenAI: a call, its result, and both as streams")
    converse(ChatOpenAI(model=MODEL, temperature=0, max_tokens=200, use_responses_api=True))
    print("ChatOpenAI with the Responses API: the same")
    converse(ChatAnthropic(model=MODEL, temperature=0, max_tokens=200))
    print("ChatAnthropic: the same")
    for method in ("json_schema", "function_calling"):
        made = openai.with_structured_output(Function, method=method).invoke(QUESTION)
        assert isinstance(made, Function), made
        print(f"with_structured_output by {method}: {made!r}")
    texts = [answer.content for answer in openai.batch(["hello"] * 4)]
    assert len(texts) == 4 and len(set(texts)) == 1 and texts[0]
    print("batch of 4: the same answer")


main()
