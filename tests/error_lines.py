"""The error that a command of ours prints."""

from __future__ import annotations


def error_line(stderr: str) -> str:
    """Return the one line of an error; a slow machine shows the progress of a load before it."""
    lines = stderr.strip().splitlines()
    (line,) = (line for line in lines if not line.startswith("Loading weights:"))
    return line
