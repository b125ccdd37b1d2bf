"""LiteLLM: chats, tool calls, streams, schemas, and the errors that it maps."""

# /// script
# dependencies = ["litellm", "mcp"]
# ///

import json
import os

import litellm

MODEL = f"openai/{os.environ['MODEL']}"
CLAUDE = f"anthropic/{os.environ['MODEL']}"
QUESTION, NAME, RESULT = (os.environ[name] for name in ("QUESTION", "NAME", "RESULT"))
PARAMETERS = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
LOOKUP = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look up the documentation of a function.",
        "parameters": PARAMETERS,
    },
}
ASKED = [{"role": "user", "content": QUESTION}]
OPTIONS = {"temperature": 0, "max_tokens": 200}


def converse(model: str) -> None:
    """Let the model call the tool, and answer from its result."""
    called = litellm.completion(model=model, messages=ASKED, tools=[LOOKUP], **OPTIONS)
    (call,) = called.choices[0].message.tool_calls
    assert called.choices[0].finish_reason == "tool_calls"
    assert json.loads(call.function.arguments) == {"name": NAME}
    history = [
        *ASKED,
        called.choices[0].message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": RESULT},
    ]
    answer = litellm.completion(model=model, messages=history, tools=[LOOKUP], **OPTIONS)
    assert answer.choices[0].message.content == RESULT, answer
    stream = list(
        litellm.completion(model=model, messages=history, tools=[LOOKUP], stream=True, **OPTIONS)
    )
    text = "".join(part.choices[0].delta.content or "" for part in stream)
    assert text == RESULT and len(stream) > 3
    parts = list(
        litellm.completion(model=model, messages=ASKED, tools=[LOOKUP], stream=True, **OPTIONS)
    )
    whole = litellm.stream_chunk_builder(parts, messages=ASKED)
    (streamed,) = whole.choices[0].message.tool_calls
    assert streamed.function.arguments == call.function.arguments
    print(f"{model}: a call, its result, and both as streams")


def main() -> None:
    converse(MODEL)
    converse(CLAUDE)
    schema = {"name": "x", "schema": {**PARAMETERS, "additionalProperties": False}}
    answer = litellm.completion(
        model=MODEL,
        messages=ASKED,
        response_format={"type": "json_schema", "json_schema": schema},
        **OPTIONS,
    )
    print("response_format:", json.loads(answer.choices[0].message.content))
    text = litellm.text_completion(model=f"text-completion-{MODEL}", prompt="x", max_tokens=4)
    assert text.choices[0].text is not None
    long = [{"role": "user", "content": "x " * 9000}]
    for fields, error in (
        ({"messages": long}, litellm.ContextWindowExceededError),
        ({"messages": ASKED, "temperature": -1}, litellm.BadRequestError),
        ({"messages": ASKED, "model": "openai/none"}, litellm.NotFoundError),
    ):
        try:
            litellm.completion(**{"model": MODEL, **fields})
        except error as raised:
            print(f"{type(raised).__name__}: {str(raised)[:90]}")
        else:
            raise AssertionError(f"{error.__name__} was expected")


main()
