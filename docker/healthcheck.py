"""Whether every model of the container answers; /v2/health/ready can stay 200 when one has died."""

from __future__ import annotations

import os
import sys
import urllib.request
from pathlib import Path

from paged_backend.launch.repository import model_names
from paged_backend.values.errors import ConfigError

_TIMEOUT_S = 4.0


def main() -> None:
    """Ask for each model's readiness; raises where one is not ready."""
    host = f"http://127.0.0.1:{os.environ.get('PAGED_HTTP_PORT', '8000')}"
    for name in model_names(Path(os.environ.get("PAGED_MODELS", "/models"))):
        with urllib.request.urlopen(f"{host}/v2/models/{name}/ready", timeout=_TIMEOUT_S):
            pass


if __name__ == "__main__":
    try:
        main()
    except (OSError, ConfigError) as error:
        sys.exit(f"not ready: {error}")
