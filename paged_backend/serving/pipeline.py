"""What the steps of a pipeline share: the model, and the data that travels with each request."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paged_backend.checkpoint.hub import resolve_tokenizer
from paged_backend.grammar.client import GrammarChecker
from paged_backend.process.lifetime import StepsFolder
from paged_backend.serving import fields, triton
from paged_backend.serving.contract import Array, as_strings
from paged_backend.serving.requests.parsing import RequestParser
from paged_backend.serving.requests.tool_use import load_tool_use
from paged_backend.text.tokenizer import load_tokenizer
from paged_backend.values.contract import named as named  # copies of bls.py import it from here
from paged_backend.values.engine_args import read_engine_args
from paged_backend.values.errors import ConfigError, InvalidRequest
from paged_backend.values.request import RequestLimits
from paged_backend.values.sampling_defaults import SamplingDefaults
from paged_backend.values.sampling_params import SamplingParams

MAX_PASS_THROUGH_LENGTH = 2**26  # characters; a prompt may be among them
_SHORT = 2**14
_PASS_THROUGH_DEPTH = 3  # a list in params in the object

# The sampling parameters that affect how tokens become text.
_TEXT_FIELDS = (
    *("stop", "stop_special_tokens", "include_stop_str_in_output"),
    *("min_tokens", "skip_special_tokens"),
)


class Llm:
    """The model in the middle of a pipeline, for the other steps.

    A step finds the model by the parameter ``llm`` of its config.pbtxt, and the tokenizer in the
    model's ``model.json``.
    """

    def __init__(self, args: Mapping[str, str]) -> None:
        """Find the model of a step that the server initializes with ``args``.

        Raises:
            ConfigError: there is no such model, or its tokenizer cannot be loaded.
        """
        self.name = parameter(args, "llm")
        self.config = read_engine_args(llm_version(args) / "model.json").config
        self._tokenizer_folder = resolve_tokenizer(self.config)
        self.tokenizer = load_tokenizer(self._tokenizer_folder, self.config)
        self._folder = StepsFolder(os.getppid())

    @functools.cached_property
    def limits(self) -> RequestLimits:
        """The model's limits; the first access asks the model, which must be ready by then."""
        return RequestLimits(
            **{spec.name: self._info[spec.name] for spec in dataclasses.fields(RequestLimits)}
        )

    @functools.cached_property
    def parser(self) -> RequestParser:
        """A parser that checks requests as the model does; it needs ``limits``."""
        grammars = GrammarChecker(self._tokenizer_folder, self.limits.vocab_size)
        tool_use = load_tool_use(self._tokenizer_folder, self.tokenizer, self.config)
        defaults = SamplingDefaults(**self._info["sampling_defaults"])
        return RequestParser(self.tokenizer, self.limits, grammars, tool_use, defaults)

    @functools.cached_property
    def _info(self) -> dict[str, Any]:
        (answer,) = self._ask("info", {})
        info: dict[str, Any] = json.loads(fields.string("text_output", answer["text_output"]))
        return info

    def leave(self) -> None:
        """End the step properly: the server removes the memory that it shares with it."""
        self._folder.leave()
        triton.end_process()

    def cancel(self, call_id: str) -> None:
        """Cancel a request: its stream gets its last response."""
        self._ask("cancel", {"call_id": as_strings([call_id])})

    def _ask(self, task: str, tensors: dict[str, Array]) -> list[dict[str, Array]]:
        return list(triton.stream(self.name, {"task": as_strings([task]), **tensors}))


def load_llm(args: Mapping[str, str]) -> Llm:
    """Find the model in the ``initialize`` of a step; an error fails the load with the reason."""
    triton.prepare_process()
    with triton.refusing_to_load():
        return Llm(args)


def parameter(args: Mapping[str, str], name: str) -> str:
    """Return a parameter of a model's config.pbtxt.

    Raises:
        ConfigError: the parameter is missing.
    """
    parameters = json.loads(args["model_config"])["parameters"]
    if name not in parameters:
        raise ConfigError(f"{args['model_name']}: config.pbtxt must have the parameter {name}")
    return str(parameters[name]["string_value"])


def llm_version(args: Mapping[str, str]) -> Path:
    """Return the folder of the newest version of a step's model.

    Raises:
        ConfigError: there is no such model.
    """
    model = Path(args["model_repository"]).parent / parameter(args, "llm")
    versions = [path.parent for path in model.glob("*/model.json") if path.parent.name.isdecimal()]
    if not versions:
        raise ConfigError(
            f"parameter llm: there is no {model.name}/1/model.json next to this model"
        )
    return max(versions, key=lambda folder: int(folder.name))


@dataclass(frozen=True, slots=True)
class PassThrough:
    """The data of a request that ``postprocess`` needs with every response.

    An ensemble passes a tensor of ``preprocess`` to the first response of a decoupled step only, so
    this data goes through the model, which returns it with each response.
    """

    call_id: str  # the model's name for the request
    prompt: str  # precedes the text of the only response
    wanted: tuple[str, ...]  # optional outputs that the client asked for
    params: SamplingParams  # when it arrives, only those that affect text
    tenant: str = ""  # the text of a long answer takes this tenant's turns

    @classmethod
    def from_tensor(cls, tensor: Array) -> PassThrough:
        """Parse the result of ``as_tensor``.

        Raises:
            InvalidRequest: the tensor is something else.
        """
        source = fields.string("pass_through", tensor)
        # A stream returns it with every response, so it leaves out the prompt, which may be long.
        read = _read_again if len(source) < _SHORT else _read
        return read(source)

    def as_tensor(self) -> Array:
        """Return the tensor that travels through the model."""
        values = {
            "call_id": self.call_id,
            "tenant": self.tenant,
            "prompt": self.prompt,
            "wanted": self.wanted,
            "params": {name: getattr(self.params, name) for name in _TEXT_FIELDS},
        }
        return as_strings([json.dumps(values)])


def _read(source: str) -> PassThrough:
    if len(source) > MAX_PASS_THROUGH_LENGTH:
        raise InvalidRequest("pass_through", f"has over {MAX_PASS_THROUGH_LENGTH} characters")
    values = fields.json_object("pass_through", source, _PASS_THROUGH_DEPTH)
    try:
        params = SamplingParams.from_mapping({**values.pop("params"), "max_tokens": None})
        passed = PassThrough(**values, params=params)
        if not all(
            isinstance(part, str) for part in (passed.call_id, passed.prompt, passed.tenant)
        ):
            raise TypeError
    except (KeyError, TypeError) as error:
        raise InvalidRequest("pass_through", "must be what preprocess made") from error
    return passed


_read_again = functools.lru_cache(256)(_read)
