"""The defaults of sampling parameters: where they come from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paged_backend.values.errors import option_error
from paged_backend.values.sampling_defaults import RULES
from paged_backend.values.validation import Rule, check_known, checked, shorten

CHECKPOINT, NEUTRAL = "auto", "vllm"
FILE_NAME = "generation_config.json"


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """See :class:`paged_backend.values.config.EngineConfig`."""

    generation_config: str = checked(
        CHECKPOINT,
        Rule(str),
        "defaults of temperature, top_k, top_p, min_p, repetition_penalty and max_tokens: auto "
        f"takes those of the checkpoint's {FILE_NAME}, vllm none of them, and a folder those of "
        f"the {FILE_NAME} in it, whose max_new_tokens also limits max_tokens of all requests",
    )
    override_generation_config: dict[str, Any] | None = checked(
        None,
        Rule(dict, optional=True),
        f"single values in place of those of {FILE_NAME} as JSON, such as "
        '{"temperature": 0.5}; max_new_tokens also limits max_tokens of all requests, and null '
        "takes the default of the protocol",
    )

    def check_generation(self) -> None:
        """Refuse a folder without the file, and values that no request could have.

        Raises:
            ConfigError: naming the option.
        """
        source = self.generation_config
        if source not in (CHECKPOINT, NEUTRAL) and not (Path(source) / FILE_NAME).is_file():
            raise option_error(
                "generation_config",
                f"must be {CHECKPOINT}, {NEUTRAL} or a folder with {FILE_NAME}, got "
                f"{shorten(source, 200)}",
            )
        name, values = "override_generation_config", self.override_generation_config or {}
        check_known(values, RULES, lambda key, problem: option_error(f"{name}.{key}", problem))
        for key, value in values.items():
            if value is not None and not RULES[key].accepts(value):
                problem = f"must be {RULES[key].describe()}, got {shorten(value)}"
                raise option_error(f"{name}.{key}", problem)


def resolved_source(source: str, folder: Path) -> str:
    """Return an absolute path for a folder that is relative to `folder`, other values unchanged."""
    if source in (CHECKPOINT, NEUTRAL):
        return source
    path = folder / Path(source).expanduser()
    return str(path.resolve()) if path.is_dir() else source
