"""The file that takes the server's own log, kept only for someone who was told of it."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Self

from paged_backend.launch.storage import writing
from paged_backend.validation import shorten

_ERROR = re.compile(r'^E\d{4} .*?\] "?(.*?)"?$', re.MULTILINE)
_NO_CAUSE = "CudaDriverHelper"  # what the server says wherever there is no GPU
_STACK = r"\n\nAt:"  # begins the place of a Python error; line breaks are escaped
_MAX_LENGTH = 400


class ServerLog:
    """A private log file, or none (``path`` is None) where the log goes to stderr."""

    def __init__(self, *, to_file: bool) -> None:
        self.path: Path | None = None
        self._keep = False
        if to_file:
            with writing("a temporary file"):
                descriptor, name = tempfile.mkstemp(prefix="paged-backend-", suffix=".log")
            os.close(descriptor)
            self.path = Path(name)

    def last_error(self) -> str | None:
        """The last error in the file, on one line, if there is any."""
        if self.path is None:
            return None
        errors = _ERROR.findall(self.path.read_text(errors="replace"))
        errors = [error for error in errors if _NO_CAUSE not in error]
        if not errors:
            return None
        line = errors[-1].partition(_STACK)[0].replace(r"\n", " ")
        return shorten(line, _MAX_LENGTH, quote=False)

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
