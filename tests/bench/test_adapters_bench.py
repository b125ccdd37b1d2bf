"""The benchmark of LoRA adapters: what it prints and saves, and mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from error_lines import error_line
from safetensors.torch import save_file

from paged_backend.cli import main
from paged_backend.tools.bench import adapters as adapters_bench


def test_figures_of_the_demo(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters_bench, "ANSWER_TOKENS", 12)
    dtypes = []

    def save(tensors: dict[str, torch.Tensor], path: Path) -> None:
        dtypes.extend(tensor.dtype for tensor in tensors.values())
        save_file(tensors, path)

    monkeypatch.setattr(adapters_bench, "save_file", save)
    path = tmp_path / "figures.json"
    flags = ["--ranks", "2,5", "--concurrency", "2", "--rounds", "1", "--json", str(path)]
    flags += ["--adapter-dtype", "bfloat16"]
    assert main(["bench", "adapters", "demo", *flags]) == 0
    assert set(dtypes) == {torch.bfloat16}
    base, adapters = json.loads(path.read_text())["figures"]
    assert (base["name"], base["at_once"], len(base["rounds"])) == ("base", 2, 1)
    assert adapters["ratio"] == pytest.approx(adapters["engine"] / adapters["peer"])
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed] == ["requests", "base", "adapters"]


def test_mistakes_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "adapters", "demo", "--task", "embed"]) == 2
    assert "enable_lora can only be false for a model that generates nothing" in error_line(
        capsys.readouterr().err
    )
