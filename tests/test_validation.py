"""What it costs to refuse names and values that a client has made long."""

from __future__ import annotations

import time

import pytest

from paged_backend.values.errors import InvalidRequest
from paged_backend.values.sampling_params import SamplingParams
from paged_backend.values.validation import from_mapping, shorten

MEGABYTE = "temperatur" * 10**5


def refusal(name: str) -> tuple[str, float]:
    """The error for an unknown field, and the processor time that ten of them take."""
    started = time.process_time()
    for _ in range(10):
        with pytest.raises(InvalidRequest) as caught:
            from_mapping(SamplingParams, {name: 1}, InvalidRequest)
    return str(caught.value), time.process_time() - started


def test_a_long_name_costs_no_more_than_a_short_one():
    short, short_s = refusal("temperatur")
    assert short == "temperatur: is not known, did you mean temperature?"
    long, long_s = refusal(MEGABYTE)
    assert long.startswith("temperaturtemperaturtemperaturtempera...: is not known; known: ")
    assert long_s < 5 * short_s


@pytest.mark.parametrize("value", [MEGABYTE, MEGABYTE.encode(), [1] * 10**6, "\u00e9" * 10**6])
def test_a_long_value_is_cut_before_it_is_written_out(value):
    for quote in (True, False):
        shown = shorten(value, quote=quote)
        assert len(shown) == 60 and shown.endswith("...")
    assert shorten(value[:3]) == repr(value[:3])
