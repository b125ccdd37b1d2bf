"""Garbage collections of a process that serves: none among what stays until the process ends."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Import modules without garbage collections, at the start of a process.

    Imported modules stay, so collections among them find nothing. They take a sixth of the
    processor time of importing torch. What exists at the end is in no later collection either.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def keep_loaded() -> None:
    """Leave what a process has loaded, and keeps until it ends, out of later collections.

    A collection of all objects stops every request of the process: for 50 to 100 ms among those of
    a loaded engine. Only a process that serves nothing else may call this, since the memory of a
    reference cycle that exists now is never freed.
    """
    gc.collect()
    gc.freeze()
