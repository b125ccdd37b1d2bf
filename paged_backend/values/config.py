"""The engine's options: each default, range and sentence of help is written once, in `options/`.

The command line, ``1/model.json`` and :class:`paged_backend.LLM` all read these fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paged_backend.values.errors import option_error
from paged_backend.values.options.cache import CacheOptions
from paged_backend.values.options.chat_template import ChatTemplateOptions
from paged_backend.values.options.cpu import CpuOptions
from paged_backend.values.options.generation import GenerationOptions
from paged_backend.values.options.lifetime import LifetimeOptions
from paged_backend.values.options.limits import LimitOptions
from paged_backend.values.options.lora import LoraOptions
from paged_backend.values.options.model import ModelOptions
from paged_backend.values.options.nodes import NodeOptions
from paged_backend.values.options.parallel import ParallelOptions
from paged_backend.values.options.reporting import ReportingOptions
from paged_backend.values.options.responses import ResponseOptions
from paged_backend.values.options.scheduling import SchedulingOptions
from paged_backend.values.options.speculation import MTP
from paged_backend.values.validation import check_fields, from_mapping


@dataclass(frozen=True, kw_only=True)
class EngineConfig(
    # The fields of the last base come first.
    ReportingOptions,
    LifetimeOptions,
    LimitOptions,
    ResponseOptions,
    ChatTemplateOptions,
    SchedulingOptions,
    LoraOptions,
    CacheOptions,
    NodeOptions,
    ParallelOptions,
    CpuOptions,
    GenerationOptions,
    ModelOptions,
):
    """Options of one engine; names are vLLM's where vLLM has the option.

    Code that needs the options of one concern takes that base class.

    Raises:
        ConfigError: an option has the wrong type or lies outside its range.
    """

    def __post_init__(self) -> None:
        check_fields(self, option_error)
        self.check_revisions()
        self.check_generation()
        self.check_chat_template()
        self.check_cache()
        self.check_cpu()
        self.check_lora()
        self.check_parallel()
        self.check_scheduling()
        self.check_reporting()
        self._check_engines()
        self._check_drafts()

    def _check_drafts(self) -> None:
        """Refuse what cannot be combined with the MTP layer.

        Only the last of several stages has hidden states.
        """
        speculation, option = self.speculation(), "speculative_config.method"
        if speculation is None or speculation.method != MTP:
            return
        stages = self.pipeline_parallel_size
        if stages > 1:
            problem = f"can be {MTP} only with a pipeline_parallel_size of 1; got {stages}"
            raise option_error(option, problem)

    def _check_engines(self) -> None:
        """Refuse options that several engines of a model cannot have."""
        if self.data_parallel_size == 1:
            return
        if self.enable_inspect:
            raise option_error(
                "enable_inspect", "can only be true for one engine (data_parallel_size)"
            )
        if self.nnodes is not None and self.nnodes > 1:
            raise option_error("nnodes", "can only be 1 for several engines (data_parallel_size)")
        if self.kv_events().is_on:
            self.kv_events().check_engines(self.data_parallel_size)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> EngineConfig:
        """Build from names and values of unknown origin.

        Raises:
            ConfigError: a name is unknown or a value is not allowed.
        """
        return from_mapping(cls, values, option_error)
