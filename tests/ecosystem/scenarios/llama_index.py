"""LlamaIndex: chats, streams, tool calls and structured answers of an OpenAI-like model."""

# /// script
# dependencies = ["llama-index-llms-openai-like"]
# ///

import os

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

QUESTION, NAME, RESULT = (os.environ[name] for name in ("QUESTION", "NAME", "RESULT"))


def lookup(name: str) -> str:
    """Look up the documentation of a function."""
    assert name == NAME
    return RESULT


def main() -> None:
    model = OpenAILike(
        model=os.environ["MODEL"],
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        temperature=0,
        max_tokens=200,
    )
    hello = model.chat([ChatMessage("hello")]).message.content
    streamed = [part.delta for part in model.stream_chat([ChatMessage("hello")])]
    assert hello and "".join(text or "" for text in streamed) == hello
    print(f"chat and stream: {hello}")
    tool = FunctionTool.from_defaults(lookup)
    called = model.chat_with_tools([tool], user_msg=QUESTION)
    (call,) = model.get_tool_calls_from_response(called)
    assert (call.tool_name, call.tool_kwargs) == ("lookup", {"name": NAME})
    result = ChatMessage(
        role="tool", content=RESULT, additional_kwargs={"tool_call_id": call.tool_id}
    )
    history = [ChatMessage(QUESTION), called.message, result]
    answer = model.chat_with_tools([tool], chat_history=history)
    assert answer.message.content == RESULT, answer
    print("a tool call and the answer from its result")


main()
