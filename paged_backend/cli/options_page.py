"""Writes docs/options.md: ``python -m paged_backend.cli.options_page > docs/options.md``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields

from paged_backend.values.config import EngineConfig
from paged_backend.values.validation import Rule

_HEAD = """\
# Options

These are the engine's options. They have the same names in three places: `--max-num-seqs 8` for
`paged-backend serve`, `"max_num_seqs": 8` in a model's `1/model.json`, and `max_num_seqs=8` for
`paged_backend.LLM`. The other engine arguments of vLLM are accepted as well, in all three places,
unless their value asks for something that this engine lacks. vLLM's other words for a value are
accepted, too, for example `half` for the `dtype` float16.

This page is generated: `python -m paged_backend.cli.options_page > docs/options.md`.

| option | value | default | meaning |
|---|---|---|---|
"""


def options_page() -> str:
    """Return the page as Markdown."""
    return _HEAD + "".join(_rows())


def _rows() -> Iterator[str]:
    for spec in fields(EngineConfig):
        rule: Rule = spec.metadata["rule"]
        default = "" if spec.default in (None, "") else f"`{json.dumps(spec.default)}`"
        cells = f"`{spec.name}`", rule.describe(), default, spec.metadata["help"]
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


if __name__ == "__main__":
    print(options_page(), end="")
