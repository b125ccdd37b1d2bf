"""Rates and percentiles of the last seconds, from pages a second apart."""

from __future__ import annotations

import pytest
from readings import reading

from paged_backend.tools.top import words
from paged_backend.tools.top.figures import Window


def test_rates_are_those_of_the_last_second():
    window = Window()
    assert window.add(reading(5.0, {"generation_tokens_total": 100})).generated.now is None
    assert window.add(reading(6.0, {"generation_tokens_total": 350})).generated.now == 250
    counts = {"generation_tokens_total": 360, "prompt_tokens_total": 8, "engine_steps_total": 30}
    figures = window.add(reading(8.0, counts))
    assert figures.generated.now == 5
    assert figures.generated.history == (250, 5)
    assert figures.prompt.now == 4
    assert figures.steps.per_s == 10  # over the window


def test_the_hit_rate_of_now_is_not_that_of_ever():
    window = Window()
    window.add(reading(0.0, {"prefix_cache_queries_total": 300, "prefix_cache_hits_total": 0}))
    figures = window.add(
        reading(1.0, {"prefix_cache_queries_total": 400, "prefix_cache_hits_total": 80})
    )
    assert (figures.recent_hit_rate, figures.overall_hit_rate) == (0.8, 0.2)
    idle = Window().add(reading(0.0))
    assert (idle.recent_hit_rate, idle.overall_hit_rate) == (None, None)


def test_percentiles_forget_what_is_older_than_the_window():
    window = Window()
    slow, fast = [5.0] * 10, [0.005] * 10
    window.add(reading(0.0))
    window.add(reading(1.0, time_to_first_token_seconds=slow))
    window.add(reading(11.5, time_to_first_token_seconds=slow + fast))
    figures = window.add(reading(12.0, time_to_first_token_seconds=slow + fast))
    first_token = figures.latencies[0]
    assert first_token.name == "TTFT"
    assert words.quantile(first_token.recent, 0.5) == "5.0 ms"
    assert words.quantile(first_token.overall, 0.99) == "9.8 s"
    assert words.quantile(figures.latencies[1].recent, 0.5) == "-"


def test_a_server_that_was_started_again_has_no_negative_rates():
    window = Window()
    before = {"generation_tokens_total": 900, "engine_steps_total": 900}
    window.add(reading(0.0, before, time_to_first_token_seconds=[0.5] * 9))
    after = {"generation_tokens_total": 20, "engine_steps_total": 20}
    figures = window.add(reading(1.0, after, time_to_first_token_seconds=[0.5] * 2))
    assert figures.generated.now is None
    after = {"generation_tokens_total": 50, "engine_steps_total": 50}
    assert window.add(reading(2.0, after)).generated.now == 30


def test_counts_and_means():
    window = Window()
    window.add(reading(0.0, engine_step_seconds=[0.5], engine_step_sequences=[2]))
    figures = window.add(
        reading(1.0, engine_step_seconds=[0.5, 0.1, 0.3], engine_step_sequences=[2, 4, 8])
    )
    assert figures.steps.seconds == pytest.approx(0.2)
    assert figures.steps.sequences == 6
    assert figures.finished == {"stop": 3, "length": 3}
    assert figures.is_up and not window.add(reading(2.0, {"engine_up": 0})).is_up


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (words.count(1234.4), "1,234"),
        (words.count(None), "-"),
        (words.decimal(0.123), "0.12"),
        (words.decimal(9.87), "9.9"),
        (words.decimal(9.99), "10"),
        (words.decimal(0.999), "1.0"),
        (words.decimal(1234.5), "1,234"),
        (words.duration(0.00042), "0.42 ms"),
        (words.duration(0.0518), "52 ms"),
        (words.duration(2.5), "2.5 s"),
        (words.percent(0.004), "0.4%"),
        (words.percent(0.51), "51%"),
        (words.percent(0), "0%"),
        (words.curve([1, 2, 4, 8], 3), "▃▅█"),
        (words.curve([0, 0], 9), "▁▁"),
        (words.curve([], 9), ""),
    ],
)
def test_numbers_in_words(text, expected):
    assert text == expected
