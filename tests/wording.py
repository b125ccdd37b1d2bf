"""Rules about the wording of docstrings and comments, for any checkout.

A description begins with its noun ("limits: limits of a step", not "limits: of a step"). Otherwise
a reader has to look back to what it describes.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("paged_backend", "kernels", "client", "loadtest", "tests", "model_repository", "docker")
SECTIONS = ("Args", "Attributes")
PREPOSITIONS = (
    *(
        "about",
        "across",
        "around",
        "after",
        "against",
        "along",
        "among",
        "at",
        "before",
        "behind",
        "below",
    ),
    *("beside", "between", "beyond", "by", "during", "for", "from", "in", "inside", "into", "of"),
    *("on", "onto", "over", "per", "through", "to", "under", "until", "up", "with", "within"),
)
# They say how much there is, or in what unit.
_MEASURES = "at (?:most|least)|by default|per |up to|in (?:order|bytes)"
_BEGINS = re.compile(rf"(?!{_MEASURES})(?:{'|'.join(PREPOSITIONS)})\b")
_ENTRY = re.compile(r"^ {4,}(\*{0,2}\w+): (.*)$")
# A line that is one of those entries if it is in a docstring.
_SUSPECT = re.compile(rf"^ {{4,}}\*{{0,2}}\w+: {_BEGINS.pattern}", re.MULTILINE)


def entries(root: Path) -> list[str]:
    """Return the entries of arguments and attributes that begin with a preposition."""
    sources = ((path, path.read_text()) for path in _files(root))
    return [
        f"{path.relative_to(root)}: {name}: {text}"
        for path, source in sources
        if _SUSPECT.search(source)  # parsing takes long
        for name, text in _entries(source)
        if _BEGINS.match(text)
    ]


def comments(root: Path) -> list[str]:
    """Return the comments after code that begin with "of"."""
    found = []
    for path in _files(root):
        text = path.read_text()
        if "# of " not in text:  # reading tokens takes long
            continue
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            is_first = not token.line[: token.start[1]].strip()
            if token.type == tokenize.COMMENT and not is_first:
                if token.string.startswith("# of "):
                    found.append(f"{path.relative_to(root)}:{token.start[0]}: {token.string}")
    return found


def _files(root: Path) -> Iterator[Path]:
    for folder in FOLDERS:
        yield from sorted((root / folder).rglob("*.py"))


def _entries(source: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the first line of each entry."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            section = ""
            for line in (ast.get_docstring(node) or "").splitlines():
                if line and not line.startswith(" "):
                    section = line.rstrip(":")
                match = _ENTRY.match(line)
                if match and section in SECTIONS:
                    yield match[1], match[2]
