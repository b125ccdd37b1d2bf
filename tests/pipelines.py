"""Writes parts of pipelines for tests that do not need every model."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path
from tempfile import TemporaryDirectory
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


# Models that take a second for each request, and have room for two.
_SLOW = {
    "slow.preprocess": """\
import time
from paged_backend.serving import preprocess
from paged_backend.serving.preprocess import TritonPythonModel as Fast

preprocess.MAX_WAITING = 2

class TritonPythonModel(Fast):
    def _answer(self, *args):
        time.sleep(1)
        super()._answer(*args)
""",
    "slow.llm_bls": """\
import time
from paged_backend.serving import bls
from paged_backend.serving.bls import TritonPythonModel as Fast

bls.MAX_REQUESTS = bls.MAX_WAITING = 1

class TritonPythonModel(Fast):
    def _run(self, *args):
        time.sleep(1)
        yield from super()._run(*args)
""",
}


def add_slow_models(repository: Path, model: str) -> None:
    """Add ``slow.llm``, whose first step is slow, and the slow program ``slow.llm_bls``.

    Their other steps are those of the pipeline that is in the repository.
    """
    with TemporaryDirectory() as folder:
        write_pipeline(Path(folder), model, {}, instances=1, prefix="slow.")
        for name in ("slow.llm", *_SLOW):
            shutil.move(Path(folder) / name, repository)
    for name, source in _SLOW.items():
        (repository / name / "1" / "model.py").write_text(source)
    for name, steps in (("slow.llm", ("postprocess",)), ("slow.llm_bls", OWN[:2])):
        config = repository / name / "config.pbtxt"
        text = config.read_text()
        for step in steps:
            text = text.replace(f'"slow.{step}"', f'"{step}"')
        config.write_text(text)
