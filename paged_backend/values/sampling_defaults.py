"""The sampling parameters that a model gives to requests that leave them out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from paged_backend.values.sampling_params import SamplingParams
from paged_backend.values.validation import Rule

# The names of generation_config.json, which are transformers', and of the parameters. vLLM
# takes the same ones; it ignores `do_sample`, too.
PARAMETERS = {
    **{name: name for name in ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")},
    "max_new_tokens": "max_tokens",
}
RULES: dict[str, Rule] = {
    key: spec.metadata["rule"]
    for key, parameter in PARAMETERS.items()
    for spec in fields(SamplingParams)
    if spec.name == parameter
}
"""What each name of generation_config.json accepts besides null, which is the same as no value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """The values of parameters that requests leave out; None is the default of SamplingParams."""

    repetition_penalty: float | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    max_tokens_limit: int | None = None  # the operator's cap on max_tokens of each request

    def values(self, max_output_tokens: int) -> dict[str, Any]:
        """Return the values that there are, by the names of the parameters.

        Args:
            max_output_tokens: the largest value of ``max_tokens`` that a request may have.
        """
        found = {name: getattr(self, name) for name in PARAMETERS.values()}
        if self.max_tokens is not None:
            found["max_tokens"] = min(self.max_tokens, max_output_tokens)
        return {name: value for name, value in found.items() if value is not None}

    def completed(self, given: Mapping[str, Any], max_output_tokens: int) -> dict[str, Any]:
        """Return the parameters of a request with the defaults of those that it leaves out.

        Args:
            given: the request's parameters, of which null is the same as none. Beams are not
                sampled, so only ``max_tokens`` has a default with them.
            max_output_tokens: the largest value of ``max_tokens`` that a request may have.
        """
        values = self.values(max_output_tokens)
        if given.get("beam_width") not in (None, 1) or given.get("use_beam_search"):
            values = {name: values[name] for name in ("max_tokens",) if name in values}
        return values | {
            name: value for name, value in given.items() if value is not None or name not in values
        }

    def limited(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with at most the operator's number of tokens.

        Raises:
            InvalidRequest: ``min_tokens`` is larger.
        """
        limit = self.max_tokens_limit
        if limit is None or params.max_tokens is None or params.max_tokens <= limit:
            return params
        return replace(params, max_tokens=limit)


NO_DEFAULTS = SamplingDefaults()
