"""The curl commands in the documents."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
CURL = re.compile(r"(?:^|`)(curl [^`]+?)(?:`|\n(?=```|\S))", re.MULTILINE)


def curl_commands() -> list[str]:
    """Return all commands."""
    pages = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
    return [command for page in pages for command in CURL.findall(page.read_text())]


def answer_of(documented: str, triton: str, gateway: str, folder: Path | None = None) -> str:
    """Run a command with other addresses in place of the documented ones.

    Args:
        documented: the command.
        triton: address of the server.
        gateway: address of the gateway.
        folder: folder for the files that commands write and read.

    Returns:
        The body of the answer; empty if the command writes it to a file.
    """
    command = documented.replace("localhost:8000", triton.removeprefix("http://"))
    command = command.replace("localhost:9000", gateway)
    words = [*shlex.split(command.replace("\\\n", " ")), "--silent", "--fail-with-body"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=folder)
    assert done.returncode == 0, (command, done.returncode, done.stdout, done.stderr)
    return done.stdout
