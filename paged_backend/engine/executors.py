"""Makes the executor of an engine: one worker, or one for each rank of a model."""

from __future__ import annotations

import os
from pathlib import Path

from paged_backend.engine.worker import Worker
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import option_error
from paged_backend.values.nodes import Nodes


def open_executor(config: EngineConfig, folder: Path, tokenizer: Path | None = None) -> Worker:
    """Load a model, in this process and in the processes of other ranks if there are any.

    Other nodes join first.

    Args:
        config: the engine's options.
        folder: the checkpoint.
        tokenizer: see :class:`~paged_backend.engine.worker.Worker`.

    Raises:
        ConfigError: the model cannot be loaded with these options.
        EngineDead: a rank has ended while it loaded.
    """
    if config.data_parallel_size != 1:
        raise option_error(
            "data_parallel_size",
            f"must be 1 outside of a server, where nothing divides requests among engines; got "
            f"{config.data_parallel_size}",
        )
    if config.num_ranks == 1 and config.nnodes in (None, 1):
        return Worker(config, folder, tokenizer)
    # It needs libraries for messages between processes.
    from paged_backend.engine.leading_worker import LeadingWorker

    return LeadingWorker(config, Nodes.of(config, os.environ), folder, tokenizer)
