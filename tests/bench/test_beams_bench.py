"""The benchmark of beams: what it prints and saves, and mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from error_lines import error_line

from paged_backend.cli import main
from paged_backend.tools.bench import beams


def test_figures_of_the_demo(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beams, "ANSWER_TOKENS", 12)
    path = tmp_path / "figures.json"
    flags = ["--beam-widths", "2,3", "--concurrency", "1", "--rounds", "1", "--json", str(path)]
    assert main(["bench", "beams", "demo", *flags]) == 0
    two, three = json.loads(path.read_text())["figures"]
    assert (two["width"], two["at_once"], len(two["rounds"])) == (2, 1, 1)
    assert three["width"] == 3
    assert two["time"] == pytest.approx(two["peer"] / two["engine"])
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed] == ["width", "2", "3"]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--beam-widths", "9"], "beam_width: must be at most max_beam_width (8), got 9"),
        (["--task", "embed"], "option task must be generate"),
    ],
)
def test_mistakes_are_named(
    flags: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "beams", "demo", *flags]) == 2
    assert problem in error_line(capsys.readouterr().err)
