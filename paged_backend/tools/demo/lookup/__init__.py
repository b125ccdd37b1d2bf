"""The bundled model `demo-tools`: a small Llama that looks functions up with a tool.

`python -m paged_backend.tools.demo.lookup.train` generates the model and the questions of this
package. Importing the package loads neither torch nor transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

QUESTIONS_FILE = Path(__file__).parent / "questions.json"

TOOL_NAME = "lookup"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": TOOL_NAME,
        "description": "Look up the documentation of a function.",
        "parameters": {
            "type": "object",
            "properties": {"name": {"type": "string"}},
            "required": ["name"],
        },
    },
}


JSON_QUESTION = "Describe {} as JSON."
# What the answer to `JSON_QUESTION` follows without a constraint, too.
JSON_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "summary": {"type": "string"}},
    "required": ["name", "summary"],
    "additionalProperties": False,
}


def description(name: str, summary: str) -> str:
    """Return the model's answer to `JSON_QUESTION` about a function that it knows."""
    return json.dumps({"name": name, "summary": summary})


def tool_call(name: str) -> dict[str, Any]:
    """Return the call that looks `name` up, as the messages of a chat hold it."""
    return {"type": "function", "function": {"name": TOOL_NAME, "arguments": {"name": name}}}


def answer(results: dict[str, str]) -> str:
    """Return the model's answer to what the tool said about each name that was asked for.

    A single result is repeated as it is. Of several, each stands below its name.
    """
    if len(results) == 1:
        (result,) = results.values()
        return result
    return "\n".join(f"{name}:\n{result}" for name, result in results.items())
