"""The model of many engines: every request is answered, and its routing is the gateway's."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PATH = Path(__file__).parents[2] / "loadtest" / "fleet_model.py"
SMALL = {"engines": 4, "rate": 60.0, "seconds": 2.0, "prefixes": 20, "prefix_len": 128}
REAL = {"routing_us_per_request", "scheduling_us_per_step"}  # figures in processor time


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fleet_model", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fleet_model"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def figures(script: ModuleType, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = script.Model(script.Fleet(**SMALL | changes)).run()
    return values


def test_a_seed_gives_the_same_figures(script: ModuleType) -> None:
    first, again, other = (figures(script, seed=seed) for seed in (1, 1, 2))
    assert {first[name] == again[name] for name in first.keys() - REAL} == {True}
    assert first["requests"] != other["requests"]
    assert first["lost_tokens"] == first["failures"] == 0
    assert first["requests"] == pytest.approx(120, rel=0.3)


def test_prefix_routing_finds_more_than_chance(script: ModuleType) -> None:
    by_prefix, by_chance = (figures(script, policy=policy) for policy in ("prefix", "random"))
    assert by_chance["hit_rate"] + 0.05 < by_prefix["hit_rate"] <= 0.5  # half of a prompt is shared


def test_an_engine_that_fails_loses_time_and_no_token(script: ModuleType) -> None:
    calm = figures(script)
    failing = figures(script, failures_per_minute=300.0, restart_s=1.0)
    assert failing["failures"] > 2
    assert failing["lost_tokens"] == 0
    assert failing["e2e_ms_p99"] > calm["e2e_ms_p99"] + 500


def test_a_mistake_names_the_option(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.main(["--engines", "0"])
    assert "--engines: must be above 0, got 0" in capsys.readouterr().err
