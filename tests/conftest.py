"""Makes the helpers beside the tests importable by name, and takes the clock out of hypothesis."""

from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

for folder in ("", "core", "faults"):
    sys.path.insert(0, str(Path(__file__).parent / folder))

# How long an example takes, or the making of it, depends on the machine and on what else it does.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")
