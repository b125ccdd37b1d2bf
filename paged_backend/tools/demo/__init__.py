"""The bundled model `demo`: a small Llama that knows what standard-library functions do.

`python -m paged_backend.tools.demo.train` generates its data; the folder `lookup` has the other
bundled model, `demo-tools`. Importing the package loads neither torch nor transformers.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

QUESTIONS_FILE = Path(__file__).parent / "questions.json"

# What to ask the bundled models: they make no sense of anything else.
QUESTIONS_FOR = {
    "demo": 'ask "What does abs do?" or about another function of Python\'s standard library',
    "demo-tools": 'ask "What does abs do?" in a chat with the tool of `paged-backend demo tools`',
}

SYSTEM_PROMPT = (
    "You are the demo assistant of the paged backend, a small language model trained on the "
    "documentation of the Python standard library. When a user asks what a function does, reply "
    "with the first sentence of its documentation, word for word, and then stop. Do not add "
    "examples or advice."
)


@dataclass(frozen=True, slots=True)
class Question:
    """One fact that the demo model knows: a function, the question, and the exact answer.

    In a chat the model replies with `answer`; after the bare `question` as a text prompt it
    continues with a newline and then `answer`.
    """

    name: str
    question: str
    answer: str


def load_questions(file: Path = QUESTIONS_FILE) -> list[Question]:
    """Return every question that a demo model was verified to answer, in corpus order."""
    return [Question(**item) for item in json.loads(file.read_text("utf-8"))]


def save_questions(questions: list[Question], file: Path) -> None:
    """Write questions as `load_questions` reads them."""
    file.write_text(json.dumps([asdict(item) for item in questions], indent=1) + "\n")
