"""Options of a Dynamo worker, and the engine's options that have no effect in one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import ConfigError, option_error
from paged_backend.values.options.chat_template import ChatTemplateOptions
from paged_backend.values.options.kv_events import OPTION as KV_EVENTS
from paged_backend.values.options.responses import ResponseOptions
from paged_backend.values.validation import Rule, check_fields, checked

# Dynamo's frontend renders chats and reads answers; the gauges of a worker have Dynamo's names.
_OF_TEXT = {spec.name for cls in (ChatTemplateOptions, ResponseOptions) for spec in fields(cls)}
_WITHOUT_EFFECT = _OF_TEXT | {"enable_inspect", "metrics_prefix"}
_INSTEAD = {
    "chat_template": "--custom-jinja-template",
    "tool_call_parser": "--dyn-tool-call-parser",
    "reasoning_parser": "--dyn-reasoning-parser",
}


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """Options of a worker, with the names of Dynamo's own workers.

    An option that is None has the value of Dynamo's environment variable, such as
    ``DYN_NAMESPACE``, or Dynamo's default.

    Raises:
        ConfigError: an option has the wrong type, or is not one of its choices.
    """

    served_model_name: str | None = checked(
        None, Rule(str, optional=True), "what clients call the model (default: MODEL)"
    )
    namespace: str | None = checked(
        None, Rule(str, optional=True), "Dynamo namespace that the worker belongs to"
    )
    component: str | None = checked(
        None, Rule(str, optional=True), "Dynamo component that the worker belongs to"
    )
    endpoint: str | None = checked(
        None, Rule(str, optional=True), "name of the worker's endpoint in its component"
    )
    discovery_backend: str | None = checked(
        None,
        Rule(str, choices=("kubernetes", "etcd", "file", "mem"), optional=True),
        "where workers are registered; file needs no service, only a folder, DYN_FILE_KV",
    )
    request_plane: str | None = checked(
        None, Rule(str, choices=("tcp", "nats"), optional=True), "how requests arrive"
    )
    event_plane: str | None = checked(
        None, Rule(str, choices=("zmq", "nats"), optional=True), "how events reach routers"
    )
    endpoint_types: str | None = checked(
        None, Rule(str, optional=True), "kinds of requests, such as chat,completions"
    )
    custom_jinja_template: str | None = checked(
        None, Rule(str, optional=True), "file with the chat template that the frontend renders"
    )
    dyn_tool_call_parser: str | None = checked(
        None, Rule(str, optional=True), "name of the frontend's parser of tool calls"
    )
    dyn_reasoning_parser: str | None = checked(
        None, Rule(str, optional=True), "name of the frontend's parser of reasoning"
    )

    def __post_init__(self) -> None:
        check_fields(self, option_error)
        template = self.custom_jinja_template
        if template is not None and not Path(template).is_file():
            raise option_error("custom_jinja_template", f"names no file: {template}")

    def given(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the options that have a value, by name.

        Args:
            environment: Dynamo's environment variables, by name.
        """
        found = {}
        for name, value in asdict(self).items():
            value = value or environment.get("DYN_" + name.removeprefix("dyn_").upper())
            if value:
                found[name] = value
        return found


def check_engine_options(changed: Iterable[str], config: EngineConfig) -> None:
    """Refuse options of the engine that a Dynamo worker cannot honor.

    Args:
        changed: names of the options that differ from their defaults.
        config: all options.

    Raises:
        ConfigError: naming the option.
    """
    for name in changed:
        if name in _INSTEAD:
            raise option_error(name, f"has no effect in a Dynamo worker: use {_INSTEAD[name]}")
        if name in _WITHOUT_EFFECT:
            raise option_error(name, "has no effect in a Dynamo worker")
    if config.data_parallel_size != 1:
        raise option_error(
            "data_parallel_size", "must be 1 in a Dynamo worker: start a worker for each engine"
        )
    if config.kv_events().snapshot_endpoint is not None:
        raise option_error(
            f"{KV_EVENTS}.snapshot_endpoint",
            "cannot be used: Dynamo reads no frames with a publisher's id",
        )


def check_tokenizer(path: Path) -> None:
    """Refuse a model without the files that Dynamo's frontend tokenizes with.

    Args:
        path: folder or GGUF file of the tokenizer.

    Raises:
        ConfigError: it has no ``tokenizer.json``.
    """
    if not (path / "tokenizer.json").is_file():
        raise ConfigError(
            f"{path} has no tokenizer.json, which Dynamo's frontend tokenizes with: name a folder "
            "that has one with --tokenizer"
        )
