"""Writes parts of pipelines for tests that do not need every model."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from paged_backend.launch.repository import write_pipeline

OWN = ("preprocess", "postprocess", "llm")
TENSORRTLLM = ("preprocessing", "tensorrt_llm", "postprocessing", "ensemble", "tensorrt_llm_bls")


def write_part_of_pipeline(
    repository: Path, model: str, options: dict[str, Any], names: Collection[str]
) -> None:
    """Write a model, and those models of its pipeline that have these names.

    Each model takes a second to load.
    """
    for path in write_pipeline(repository, model, options, instances=1):
        if path.name not in (model, *names):
            shutil.rmtree(path)
