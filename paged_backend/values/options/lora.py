"""LoRA adapters: how many, of which rank, and the first ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paged_backend.values.errors import option_error
from paged_backend.values.validation import Rule, checked, shorten

MAX_RANK = 512
_MAX_ADAPTERS = 1024


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """See :class:`paged_backend.values.config.EngineConfig`."""

    enable_lora: bool = checked(
        False,
        Rule(bool),
        "requests may name a LoRA adapter, which changes the model's answers",
    )
    max_loras: int = checked(
        8, Rule(int, 1, _MAX_ADAPTERS), "number of different adapters in one step"
    )
    max_lora_rank: int = checked(
        16, Rule(int, 1, MAX_RANK), "largest rank of an adapter; at most 64 on a GPU"
    )
    max_cpu_loras: int | None = checked(
        None,
        Rule(int, 1, _MAX_ADAPTERS, optional=True),
        "number of adapters in memory, at least max_loras; the one that was not used for longest "
        "makes room, and is read again when a request names it; default: max_loras",
    )
    lora_modules: dict[str, Any] | None = checked(
        None,
        Rule(dict, optional=True),
        "adapters that requests can name, read at the start, as JSON: "
        '{"name": "folder"}, the folders as PEFT saves them',
    )
    runtime_lora_folder: str | None = checked(
        None,
        Rule(str, optional=True),
        "folder with the only adapters that clients may load while the server runs; without it "
        "they can load none",
    )
    max_request_lora_bytes: int = checked(
        0,
        Rule(int, 0, 2**40),
        "maximum bytes of the adapters that requests of tensorrtllm_backend's clients have brought "
        "(lora_weights); the oldest makes room for a new one; 0: requests can bring none",
    )

    @property
    def num_adapters_in_memory(self) -> int:
        """The number of adapters that the model holds at once."""
        return self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras

    def check_lora(self) -> None:
        """Check what a `Rule` cannot express.

        Raises:
            ConfigError: the message names the option.
        """
        if self.num_adapters_in_memory < self.max_loras:
            raise option_error(
                "max_cpu_loras",
                f"must be at least max_loras ({self.max_loras}), got {self.max_cpu_loras}",
            )
        for name in ("lora_modules", "runtime_lora_folder", "max_request_lora_bytes"):
            if getattr(self, name) not in (None, 0) and not self.enable_lora:
                raise option_error(name, "needs enable_lora")
        if self.runtime_lora_folder is not None and not Path(self.runtime_lora_folder).is_dir():
            raise option_error("runtime_lora_folder", "must be a folder")
        for name, folder in (self.lora_modules or {}).items():
            if not name or not isinstance(folder, str) or not folder:
                raise option_error(
                    "lora_modules", f"must map names to folders, got {shorten({name: folder})}"
                )
