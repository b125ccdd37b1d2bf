"""Makes helpers importable by name, and takes clocks and inherited signals out of the tests."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

for folder in ("", "core", "faults", "grammar"):
    sys.path.insert(0, str(Path(__file__).parent / folder))

# The time that an example takes depends on the machine and on what else it does.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

# A shell that runs the tests in the background makes them ignore Ctrl-C, and so would every
# program that they start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
