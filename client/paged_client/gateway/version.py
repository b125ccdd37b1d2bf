"""The version of the gateway."""

from __future__ import annotations

from importlib.metadata import version

VERSION = version("paged-backend")
