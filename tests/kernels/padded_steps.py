"""Steps that are padded to the shapes of graphs, without a GPU that captures graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paged_backend.platforms.gpu.cuda_graphs import StepGraphs, StepShape

PLAIN = [StepShape.decodes(4), StepShape.mixed(4, 64)]
DRAFTED = [*PLAIN, StepShape.drafted(0, 16), StepShape.drafted(4, 16)]


def use_shapes(runner: Any, shapes: Sequence[StepShape] = DRAFTED) -> list[StepShape]:
    """Pad steps to captured shapes, as graphs do; returns the shapes of the steps to come."""
    replayed: list[StepShape] = []

    def capture(shape: StepShape) -> Any:
        def replay() -> torch.Tensor:
            replayed.append(shape)
            return runner._run(shape)

        return replay

    runner._graphs = StepGraphs(shapes, capture)
    return replayed
