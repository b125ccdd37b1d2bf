"""The folders of the demo models, which this package carries."""

from __future__ import annotations

from pathlib import Path

_DEMO = Path(__file__).parent.parent / "tools" / "demo"

MODEL_DIR = _DEMO / "model"
TOOLS_MODEL_DIR = _DEMO / "lookup" / "model"

BUNDLED_MODELS = {"demo": MODEL_DIR, "demo-tools": TOOLS_MODEL_DIR}
