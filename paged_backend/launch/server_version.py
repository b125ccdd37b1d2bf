"""The version of the server in NVIDIA's image; it is unknown elsewhere."""

from __future__ import annotations

import os
from collections.abc import Mapping


def server_is_from(major: int, minor: int, variables: Mapping[str, str] = os.environ) -> bool:
    """Whether this is an NVIDIA image with a server of this version or a later one."""
    version = variables.get("TRITON_SERVER_VERSION", "0").split(".")[:2]
    return all(map(str.isdecimal, version)) and tuple(map(int, version)) >= (major, minor)
