"""Forwards the server's stderr without repeating error lines."""

from __future__ import annotations

import os
import threading

ERROR_PREFIX = "paged-backend: error: "
_OURS = ERROR_PREFIX.encode()
# Triton's last line when a model cannot be loaded; it has no cause.
_NO_CAUSE = b"error: creating server: "


class StderrRelay:
    """Reads the pipe ``source`` in a separate thread, and writes to the descriptor ``target``.

    All instances of a model report the same failure. So lines that start with ERROR_PREFIX are
    stored in ``errors``, once each, and are written only after ``release`` was called. Nothing is
    written after ``mute``.
    """

    def __init__(self, source: int, target: int) -> None:
        self.errors: list[str] = []
        self._source = source
        self._target = target
        self._line = b""
        self._passing = False
        self._released = False
        self._thread = threading.Thread(target=self._run, name="stderr-relay", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Write error lines from now on, in addition to storing them."""
        self._released = True

    def mute(self) -> None:
        """Drop everything from now on, as processes that are ended write errors."""
        self._target = os.open(os.devnull, os.O_WRONLY)

    def wait(self, timeout_s: float) -> bool:
        """Wait until every process with the other end has ended; returns False if one has not."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while data := os.read(self._source, 65536):
            for piece in data.splitlines(keepends=True):
                self._take(piece)
        self._finish_line()
        os.close(self._source)

    def _take(self, piece: bytes) -> None:
        ended = piece.endswith((b"\n", b"\r"))
        if self._passing:
            self._write(piece)
        else:
            self._line += piece
            if ended:
                self._finish_line()
            elif not _may_become_held(self._line):
                self._write(self._line)
                self._line = b""
                self._passing = True
        if ended:
            self._passing = False

    def _finish_line(self) -> None:
        line, self._line = self._line, b""
        if line.startswith(_OURS):
            message = line[len(_OURS) :].decode(errors="replace").strip()
            if message in self.errors:
                return
            self.errors.append(message)
            if not self._released:
                return
        elif line.startswith(_NO_CAUSE):
            return
        self._write(line)

    def _write(self, data: bytes) -> None:
        try:
            os.write(self._target, data)
        except OSError:
            # Our stderr is closed, but the server's stderr must still be read.
            self.mute()


def _may_become_held(line: bytes) -> bool:
    return any(line.startswith(held) or held.startswith(line) for held in (_OURS, _NO_CAUSE))
