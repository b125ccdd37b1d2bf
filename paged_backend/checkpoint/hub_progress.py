"""Shows the progress of a download: bars on a terminal, plain lines in a log."""

from __future__ import annotations

import io
import sys
import time
from typing import Any

from huggingface_hub.utils.tqdm import tqdm

from paged_backend.values.log import LOG

LOG_INTERVAL_S = 10.0
_RATE_INTERVAL_S = 1.0  # between measurements of the rate
_BYTES_BAR = "huggingface_hub.snapshot_download"  # the library's name for the bar of written bytes


def progress_class(title: str, num_bytes: int) -> type[tqdm] | None:
    """Return what ``snapshot_download`` makes its bars of; None, for its own bars, on a terminal.

    Args:
        title: name of what is downloaded.
        num_bytes: size of all files, as the library counts only those that it has begun; 0 if no
            lines are worth it.
    """
    if sys.stderr.isatty():
        return None

    class Progress(_LoggedProgress):
        what = title
        all_bytes = num_bytes

    return Progress


class _LoggedProgress(tqdm):
    """A bar that writes lines to the log and nothing to the terminal."""

    what: str
    all_bytes: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._logged_s = time.monotonic()
        # The others count files, and bytes on the wire. Without a terminal all would be off.
        kwargs["disable"] = kwargs.get("name") != _BYTES_BAR or not self.all_bytes
        kwargs["file"] = io.StringIO()  # for the line break that ends a bar
        kwargs["mininterval"] = min(_RATE_INTERVAL_S, LOG_INTERVAL_S)
        super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]  # tqdm has no types

    def display(self, *args: Any, **kwargs: Any) -> None:
        """Write a line to the log, at intervals."""
        now = time.monotonic()
        # A bar that is closed is disabled, and displayed once more.
        if self.disable or now - self._logged_s < LOG_INTERVAL_S:
            return
        self._logged_s = now
        state = self.format_dict
        rate = state["rate"] or state["n"] / max(state["elapsed"], 1e-3)
        LOG.info(
            "downloading %s: %s of %s (%.0f %%), %s/s",
            self.what,
            size_text(self.n),
            size_text(self.all_bytes),
            100 * self.n / self.all_bytes,
            size_text(rate),
        )


def size_text(num_bytes: float) -> str:
    """Describe a number of bytes, such as ``1.23GB``."""
    return str(tqdm.format_sizeof(num_bytes, "B"))
