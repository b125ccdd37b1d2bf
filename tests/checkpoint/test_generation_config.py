"""The sampling defaults of a checkpoint: which values are taken, and which files are refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from paged_backend.checkpoint.generation_config import read_sampling_defaults
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import ConfigError
from paged_backend.values.sampling_defaults import NO_DEFAULTS, SamplingDefaults

VALUES = {
    **{"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1},
    **{"repetition_penalty": 1.05, "max_new_tokens": 2048},
}
OTHERS = {"do_sample": False, "presence_penalty": 1.5, "eos_token_id": [2], "num_beams": 4}
TAKEN = SamplingDefaults(
    temperature=0.6, top_k=20, top_p=0.95, min_p=0.1, repetition_penalty=1.05, max_tokens=2048
)


def write(folder: Path, values: Any) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "generation_config.json"
    path.write_text(json.dumps(values))
    return path


def read(folder: Path, **options: Any) -> SamplingDefaults:
    return read_sampling_defaults(folder, EngineConfig(**options))


def test_six_values_are_taken_and_no_others(tmp_path: Path) -> None:
    write(tmp_path, VALUES | OTHERS)
    assert read(tmp_path) == TAKEN


def test_nulls_and_missing_files_give_no_default(tmp_path: Path) -> None:
    assert read(tmp_path) == NO_DEFAULTS
    write(tmp_path, OTHERS | dict.fromkeys(VALUES))
    assert read(tmp_path) == NO_DEFAULTS
    (tmp_path / "model.gguf").touch()
    assert read(tmp_path / "model.gguf") == NO_DEFAULTS


@pytest.mark.parametrize(
    "values", [{"temperature": 0}, {"top_k": 0}, {"top_k": -1}, {"temperature": 1.0, "top_p": 1}]
)
def test_zero_and_neutral_values_are_values(tmp_path: Path, values: dict[str, Any]) -> None:
    write(tmp_path, values)
    assert read(tmp_path) == SamplingDefaults(**values)


def test_vllm_turns_the_file_off_even_if_it_cannot_be_used(tmp_path: Path) -> None:
    write(tmp_path, VALUES | {"temperature": -1})
    assert read(tmp_path, generation_config="vllm") == NO_DEFAULTS


def test_another_folder_takes_the_place_of_the_checkpoint(tmp_path: Path) -> None:
    write(tmp_path / "model", VALUES)
    write(tmp_path / "mine", {"top_k": 3})
    found = read(tmp_path / "model", generation_config=str(tmp_path / "mine"))
    assert found == SamplingDefaults(top_k=3)


def test_overrides_replace_single_values_and_null_removes_one(tmp_path: Path) -> None:
    write(tmp_path, {"temperature": "hot", "top_k": 20, "top_p": 0.9})
    overrides = {"temperature": 0.5, "top_k": None, "min_p": 0.2}
    found = read(tmp_path, override_generation_config=overrides)
    assert found == SamplingDefaults(temperature=0.5, top_p=0.9, min_p=0.2)
    neutral = read(tmp_path, override_generation_config=overrides, generation_config="vllm")
    assert neutral == SamplingDefaults(temperature=0.5, min_p=0.2)


def test_the_operators_number_of_tokens_is_a_limit_and_the_authors_is_none(tmp_path: Path) -> None:
    write(tmp_path, {"max_new_tokens": 30})
    write(tmp_path / "mine", {"max_new_tokens": 40})
    found = [
        read(tmp_path),
        read(tmp_path, generation_config=str(tmp_path / "mine")),
        read(tmp_path, override_generation_config={"max_new_tokens": 50}),
        read(tmp_path, override_generation_config={"max_new_tokens": None}),
    ]
    numbers = [(each.max_tokens, each.max_tokens_limit) for each in found]
    assert numbers == [(30, None), (40, 40), (50, 50), (None, None)]


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("temperature", -1, "must be a number from 0 up to 100, got -1"),
        ("temperature", "0.6", "must be a number from 0 up to 100, got '0.6'"),
        ("temperature", True, "must be a number from 0 up to 100, got True"),
        ("temperature", float("nan"), "must be a number from 0 up to 100, got nan"),
        ("top_k", 2.5, "must be an integer from -1 up to 2147483647, got 2.5"),
        ("top_k", [1], r"must be an integer from -1 up to 2147483647, got \[1\]"),
        ("top_p", 0, "must be a number above 0 up to 1, got 0"),
        ("min_p", 2, "must be a number from 0 up to 1, got 2"),
        ("repetition_penalty", 0, "must be a number above 0 up to 100, got 0"),
        ("max_new_tokens", 0, "must be an integer from 1 up to 2147483647 or null, got 0"),
        ("max_new_tokens", 2**99, "must be an integer from 1 up to 2147483647 or null, got "),
    ],
)
def test_values_that_no_request_could_have(
    tmp_path: Path, key: str, value: object, problem: str
) -> None:
    """The file's error names the file and how to do without; the option's names the option."""
    path = write(tmp_path, {key: value})
    with pytest.raises(ConfigError, match=f"^{path}: {key} {problem}.*generation_config: vllm"):
        read(tmp_path)
    name = f"override_generation_config.{key}"
    with pytest.raises(ConfigError, match=f"^option {name} {problem}"):
        EngineConfig(override_generation_config={key: value})


def test_a_file_that_holds_no_object(tmp_path: Path) -> None:
    path = write(tmp_path, [])
    with pytest.raises(ConfigError, match=f"^{path} must hold a JSON object"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"generation_config": ""}, "generation_config must be auto, vllm or a folder with"),
        ({"generation_config": "/none"}, "generation_config must be auto, vllm or a folder with"),
        (
            {"override_generation_config": {"temprature": 1}},
            "override_generation_config.temprature is not known, did you mean temperature?",
        ),
        (
            {"override_generation_config": {"do_sample": True}},
            "override_generation_config.do_sample is not known; known: repetition_penalty",
        ),
        ({"override_generation_config": []}, "override_generation_config must be a JSON object"),
    ],
)
def test_options_that_cannot_be_used(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**options)
    assert problem in str(caught.value)


def test_one_line_of_the_log_has_the_values_and_their_origin(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, {"temperature": 0.6, "max_new_tokens": 30})
    overridden = "the option override_generation_config"
    with caplog.at_level(logging.INFO, "paged_backend"):
        read(tmp_path)
        read(tmp_path, override_generation_config={"top_k": 3})
        read(tmp_path, override_generation_config={"top_k": 3}, generation_config="vllm")
        read(tmp_path, generation_config="vllm")
    assert caplog.messages == [
        f"defaults of requests by {path}: temperature=0.6, max_tokens=30",
        f"defaults of requests by {path} and {overridden}: temperature=0.6, max_tokens=30, top_k=3",
        f"defaults of requests by {overridden}: top_k=3",
    ]
