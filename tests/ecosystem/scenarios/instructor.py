"""Instructor: answers as pydantic objects, by tools and by schemas, whole and streamed."""

# /// script
# dependencies = ["instructor", "anthropic"]
# ///

import os

import anthropic
import instructor
import openai
from pydantic import BaseModel, Field

MODEL, QUESTION = os.environ["MODEL"], os.environ["QUESTION"]
ASKED = [{"role": "user", "content": QUESTION}]


class Function(BaseModel, extra="forbid"):
    """A function of the standard library."""

    name: str = Field(max_length=20)
    is_builtin: bool


def main() -> None:
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai.OpenAI(), mode=mode)
        options = {"model": MODEL, "messages": ASKED, "max_tokens": 200, "temperature": 0}
        made = client.chat.completions.create(response_model=Function, **options)
        assert isinstance(made, Function)
        parts = list(client.chat.completions.create_partial(response_model=Function, **options))
        assert parts[-1].name and len(parts) > 3
        print(f"OpenAI, {mode.name}: {made!r}; {parts[-1]!r} in {len(parts)} parts")
    claude = instructor.from_anthropic(anthropic.Anthropic())
    made = claude.messages.create(
        model=MODEL, messages=ASKED, max_tokens=200, response_model=Function
    )
    assert isinstance(made, Function)
    print(f"Anthropic: {made!r}")


main()
