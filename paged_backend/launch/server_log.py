"""The file that takes the server's own log, kept only for someone who was told of it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Self


class ServerLog:
    """A private log file, or none (``path`` is None) where the log goes to stderr."""

    def __init__(self, *, to_file: bool) -> None:
        self.path: Path | None = None
        self._keep = False
        if to_file:
            descriptor, name = tempfile.mkstemp(prefix="paged-backend-", suffix=".log")
            os.close(descriptor)
            self.path = Path(name)

    def mention(self) -> str:
        """The end of an error message that sends the reader to the file, which then stays."""
        if self.path is None:
            return ""
        self._keep = True
        return f"; its log is {self.path}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.path is not None and not self._keep:
            self.path.unlink()
