"""The rules of `wording.py` hold, and each catches a violation of it."""

from __future__ import annotations

from pathlib import Path

import wording

ROOT = Path(__file__).parent.parent


def test_descriptions_begin_with_their_noun() -> None:
    assert wording.entries(ROOT) == []
    assert wording.comments(ROOT) == []


def test_others_are_found(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/module.py").write_text(
        "def f(limits, size):\n"
        '    """Act.\n\n    Args:\n        limits: of a step.\n        size: at most 8.\n    """\n'
        "    return 1  # of them\n"
    )
    assert wording.entries(tmp_path) == ["tests/module.py: limits: of a step."]
    assert wording.comments(tmp_path) == ["tests/module.py:8: # of them"]
