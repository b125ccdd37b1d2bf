"""Shows a tool call and a constrained answer of a real server side by side."""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from paged_client import Answer, Client, CompletionBuilder
from rich.console import Console, Group
from rich.panel import Panel
from rich.text import Text

from paged_backend.tools.demo import load_questions
from paged_backend.tools.demo.lookup import (
    JSON_QUESTION,
    JSON_SCHEMA,
    QUESTIONS_FILE,
    TOOL,
    TOOL_NAME,
    description,
)
from paged_backend.tools.demo.show import demo_server, report_wrong, show_while

NAME = "os.path.join"
PANEL_HEIGHT = 12
OPTIONS: dict[str, Any] = {"temperature": 0, "max_tokens": 200, "parsed": True}


def show_tools() -> int:
    """Start a server, ask both questions and print the answers; return 1 if one is wrong, else 0.

    Raises:
        LaunchError: the server did not start.
    """
    console = Console()
    with (
        demo_server(console, "demo-tools") as server,
        Client(server.grpc_url, timeout=60) as client,
    ):
        dialogs: tuple[Dialog, ...] = (ToolDialog(), JsonDialog())
        threads = [threading.Thread(target=dialog.run, args=(client,)) for dialog in dialogs]
        show_while(console, threads, lambda: [dialog.panel() for dialog in dialogs])
    return report_wrong(console, [dialog.title for dialog in dialogs if not dialog.is_right])


class Dialog(ABC):
    """A conversation on the screen; its lines grow while the model answers."""

    title: ClassVar[str]

    def __init__(self) -> None:
        self.is_right = False
        self._lines: list[tuple[str, str]] = []  # speaker and text
        self._documentation = {item.name: item.answer for item in load_questions(QUESTIONS_FILE)}

    @abstractmethod
    def run(self, client: Client) -> None:
        """Have the conversation."""

    def panel(self) -> Panel:
        """The panel that shows the conversation so far."""
        lines = (Text.assemble((f"{speaker:8}", "bold"), text) for speaker, text in self._lines)
        return Panel(Group(*lines), title=self.title, height=PANEL_HEIGHT)

    def _add(self, speaker: str, text: str = "") -> None:
        """Begin a line."""
        self._lines.append((speaker, text))

    def _extend(self, text: str) -> None:
        """Add to the last line."""
        speaker, before = self._lines[-1]
        self._lines[-1] = (speaker, before + text)

    def _ask(self, client: Client, messages: list[dict[str, Any]], **options: Any) -> Answer:
        """Show an answer of the model while it comes, and return it."""
        self._add("model")
        builder = CompletionBuilder()
        with client.stream(messages, **OPTIONS, **options) as stream:
            for chunk in stream:
                builder.add(chunk)
                self._extend(chunk.text)
                for part in chunk.tool_calls:
                    self._extend(f"{part.name or ''} {part.arguments}".strip(" "))
        return builder.build().answers[0]


class ToolDialog(Dialog):
    """The model calls the tool, and answers from the result."""

    title = "a tool call"

    def run(self, client: Client) -> None:
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"What does {NAME} do?"}]
        self._add("user", messages[0]["content"])
        called = self._ask(client, messages, tools=[TOOL])
        if len(called.tool_calls) != 1:
            return
        (call,) = called.tool_calls
        name = json.loads(call.arguments)["name"]
        result = self._documentation.get(name, "There is no such function.")
        self._add(TOOL_NAME, result)
        function = {"name": call.name, "arguments": call.arguments}
        messages += [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": call.id, "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": call.id, "content": result},
        ]
        answer = self._ask(client, messages, tools=[TOOL])
        self.is_right = (name, answer.text) == (NAME, self._documentation[NAME])


class JsonDialog(Dialog):
    """The model answers from memory, in JSON of a schema."""

    title = "a constrained answer"

    def run(self, client: Client) -> None:
        question = JSON_QUESTION.format(NAME)
        self._add("user", question)
        types = {name: part["type"] for name, part in JSON_SCHEMA["properties"].items()}
        self._add("schema", ", ".join(f"{name}: {kind}" for name, kind in types.items()))
        messages = [{"role": "user", "content": question}]
        answer = self._ask(client, messages, structured_outputs={"json": JSON_SCHEMA})
        self.is_right = answer.text == description(NAME, self._documentation[NAME])
