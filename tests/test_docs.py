"""The documents: links lead somewhere, the options are all there, the README stays short."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from checkpoints import FALLBACKS, FAMILIES
from encoders import ENCODERS
from models_page import TEXTS

from paged_backend.cli.options_page import options_page

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)")
PATH = re.compile(r"`((?:[a-z_]+/)+[a-z_]+\.py)`")
ROOTS = ("", "paged_backend", "client/paged_client", "kernels", "loadtest")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_exist(page: Path) -> None:
    text = page.read_text()
    broken = [link for link in LINK.findall(text) if not (page.parent / link).exists()]
    if page.name != "CHANGELOG.md":  # which names files of the past
        paths = set(PATH.findall(text))
        broken += [
            p for p in paths if not any((ROOT / r / p).exists() for r in (*ROOTS, page.parent))
        ]
    assert broken == []


def test_options_page_is_up_to_date() -> None:
    """`python -m paged_backend.cli.options_page > docs/options.md` writes it."""
    assert (ROOT / "docs" / "options.md").read_text() == options_page()


def test_readme_fits_two_screens() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_the_page_of_models_has_each_one_and_all_passed() -> None:
    text = (ROOT / "docs" / "models.md").read_text()
    rows = re.findall(r"^\| (\S+) \| `\w+` \| (.*) \|$", text, re.MULTILINE)
    assert [name for name, _ in rows] == [*FAMILIES, *FALLBACKS, *ENCODERS]
    assert [part for part in TEXTS if part.strip() not in text] == []
    assert {marks for _, marks in rows} == {"yes | yes | yes | yes", "yes | yes | yes"}


def test_the_figures_beside_vllm_are_those_of_the_file() -> None:
    page = (ROOT / "docs/benchmarks.md").read_text()
    report = json.loads((ROOT / "loadtest/results/decode-llama-3-8b-vllm-h200.json").read_text())
    fitting = [row for row in report["rows"] if row["figures"] is not None]
    for row, peer in zip(fitting, report["peer"]["rows"], strict=True):
        ours = row["figures"]
        line = (
            f"| {row['context']:,} x {row['batch_size']} | {ours['tokens_per_s']:,.0f} "
            f"| {ours['of_roofline']:.0%} | {peer['tokens_per_s']:,.0f} | {peer['ratio']:.2f} |\n"
        )
        assert line in page
