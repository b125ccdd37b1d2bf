"""The folder of the demo model, which this package carries."""

from __future__ import annotations

from pathlib import Path

MODEL_DIR = Path(__file__).parent.parent / "tools" / "demo" / "model"
