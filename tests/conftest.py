"""Makes the helpers beside the tests importable by name."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in ("", "core", "faults"):
    sys.path.insert(0, str(Path(__file__).parent / folder))
