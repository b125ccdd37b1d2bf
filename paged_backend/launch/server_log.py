"""The file with the server's log, which is kept only if an error message names it."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Self

from paged_backend.launch.storage import writing
from paged_backend.values.validation import shorten

_ERROR = re.compile(r'^E\d{4} .*?\] "?(.*?)"?$', re.MULTILINE)
_NO_CAUSE = "CudaDriverHelper"  # logged on every machine without a GPU
_STACK = r"\n\nAt:"  # precedes the place of a Python error; line breaks are escaped
_MAX_LENGTH = 400


class ServerLog:
    """A private log file; ``path`` is None if the log goes to stderr."""

    def __init__(self, *, to_file: bool) -> None:
        self.path: Path | None = None
        self._keep = False
        if to_file:
            with writing("a temporary file"):
                descriptor, name = tempfile.mkstemp(prefix="paged-backend-", suffix=".log")
            os.close(descriptor)
            self.path = Path(name)

    def last_error(self) -> str | None:
        """Return the last error in the file, if any, as one line."""
        if self.path is None:
            return None
        errors = _ERROR.findall(self.path.read_text(errors="replace"))
        errors = [error for error in errors if _NO_CAUSE not in error]
        if not errors:
            return None
        line = errors[-1].partition(_STACK)[0].replace(r"\n", " ")
        return shorten(line, _MAX_LENGTH, quote=False)

    def mention(self) -> str:
        """Return the end of an error message, which names the file; the file is then kept."""
        if self.path is None:
            return ""
        self._keep = True
        return f"; its log is {self.path}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.path is not None and not self._keep:
            self.path.unlink()
