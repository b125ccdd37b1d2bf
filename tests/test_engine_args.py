"""vLLM's engine arguments in a model.json: taken, without effect, or refused by name."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from functools import partial

import pytest

from paged_backend import LLM
from paged_backend.cli.options import add_engine_options, engine_options
from paged_backend.values import engine_args
from paged_backend.values.config import EngineConfig
from paged_backend.values.engine_args import from_mapping, read_engine_args
from paged_backend.values.errors import ConfigError


def test_vllm_backends_sample_file_is_taken():
    args = from_mapping(
        {"model": "facebook/opt-125m", "gpu_memory_utilization": 0.1, "enforce_eager": True}
    )
    expected = {"model": "facebook/opt-125m", "gpu_memory_utilization": 0.1, "enforce_eager": True}
    assert args.config == EngineConfig.from_mapping(expected)
    assert (args.log_stats, args.without_effect) == (True, ())


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"gpu_memory_utilization": "0.5"}, {"gpu_memory_utilization": 0.5}),
        ({"max_num_seqs": "8"}, {"max_num_seqs": 8}),
        ({"enforce_eager": "True"}, {"enforce_eager": True}),
        ({"enable_prefix_caching": None, "block_size": None, "seed": None}, {}),
        ({"dtype": "half"}, {"dtype": "float16"}),
        ({"dtype": "float"}, {"dtype": "float32"}),
        ({"load_format": "safetensors"}, {"load_format": "auto"}),
    ],
)
def test_values_as_vllm_takes_them(given, expected):
    assert from_mapping(given).config == EngineConfig.from_mapping(expected)


def test_what_changes_nothing_is_accepted_and_reported():
    values = {
        **{"disable_log_requests": True, "dcp_comm_backend": "ag_rs", "swap_space": 4},
        **{
            "data_parallel_size_local": "1",
            "trust_remote_code": "false",
            "quantization_config": None,
        },
        **{
            "calculate_kv_scales": False,
            "enable_prompt_adapter": False,
            "max_prompt_adapters": 8,
            "max_num_seqs": 4,
        },
    }
    args = from_mapping(values)
    assert args.without_effect == tuple(name for name in values if name != "max_num_seqs")


@pytest.mark.parametrize(("value", "log_stats"), [(True, False), ("true", False), (False, True)])
def test_log_stats_may_be_off(value, log_stats):
    args = from_mapping({"disable_log_stats": value})
    assert (args.log_stats, args.without_effect) == (log_stats, ())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"data_parallel_size_local": 2}, "option data_parallel_size_local can only be 1"),
        (
            {"speculative_model": "draft"},
            "option speculative_model can only be null with this engine, got 'draft'",
        ),
        ({"trust_remote_code": "True"}, "option trust_remote_code can only be false"),
        ({"enable_lora_bias": "true"}, "option enable_lora_bias can only be false"),
        ({"kv_cache_dtype": "int4"}, "option kv_cache_dtype must be one of auto, bfloat16, fp8"),
        ({"hf_overrides": {"a": 1}}, "option hf_overrides can only be null or {}"),
        ({"speculative_config": {"model": "x"}}, "speculative_config.model"),
        ({"tensor_paralel_size": 1}, "did you mean tensor_parallel_size?"),
        ({"max_num_sequences": 1}, "did you mean max_num_seqs?"),
        ({"qqqqqq": 1}, "is not known; known: async_scheduling, block_size"),
        ({"max_num_seqs": "many"}, "max_num_seqs must be an integer from 1"),
        ({"enforce_eager": 1}, "enforce_eager must be true or false"),
        ({"block_size": 24}, "block_size must be a power of two"),
    ],
)
def test_what_cannot_be_honoured_is_named(values, message):
    with pytest.raises(ConfigError) as caught:
        from_mapping(values)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_each_name_is_in_one_list():
    ours = {spec.name for spec in fields(EngineConfig)}
    only, no_meaning = set(engine_args._ONLY), set(engine_args._NO_MEANING)
    assert not ours & only
    assert not ours & no_meaning
    assert not only & no_meaning


def test_each_neutral_value_is_accepted_as_it_is_and_as_a_string():
    for name, values in engine_args._ONLY.items():
        for value in values:
            from_mapping({name: value})
            if isinstance(value, (str, int, float)) or value is None:
                from_mapping({name: str(value)})


def test_folders_and_files_may_be_relative_to_the_file(tmp_path):
    (tmp_path / "weights").mkdir()
    (tmp_path / "m.gguf").touch()
    file = tmp_path / "model.json"
    drafts = {"method": "draft_model", "model": "weights"}
    values = {"model": "m.gguf", "tokenizer": "weights", "speculative_config": drafts}
    file.write_text(json.dumps(values))
    config = read_engine_args(file).config
    assert config.speculation().model == str(tmp_path / "weights")
    assert config.model == str(tmp_path / "m.gguf")
    assert config.tokenizer == str(tmp_path / "weights")


@pytest.mark.parametrize(
    ("text", "message"),
    [("[]", "must hold a JSON object"), ("{", "is not valid JSON"), (None, "cannot read")],
)
def test_a_file_that_is_no_object(tmp_path, text, message):
    file = tmp_path / "model.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_engine_args(file)


def from_command_line(values):
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    words = [[f"--{name.replace('_', '-')}", str(value)] for name, value in values.items()]
    return from_mapping(engine_options(parser.parse_args(sum(words, ["demo"]))))


def from_model_json(values, folder):
    file = folder / "model.json"
    file.write_text(json.dumps({"model": "demo"} | values))
    return read_engine_args(file)


def test_each_door_takes_the_same_names_and_values(tmp_path):
    values = {
        **{"dtype": "float", "load_format": "safetensors", "scheduling_policy": "fcfs"},
        **{"max_num_seqs": 8, "max_model_len": 128, "swap_space": 4, "data_parallel_size_local": 1},
    }
    by_file, by_line = from_model_json(values, tmp_path), from_command_line(values)
    assert by_file.config == by_line.config == LLM("demo", **values).config
    assert set(by_file.without_effect) == {"swap_space", "data_parallel_size_local"}
    assert set(by_line.without_effect) == {"swap_space", "data_parallel_size_local"}


def test_a_chat_template_at_each_door(tmp_path, monkeypatch):
    """A file may be relative to model.json or, on the command line, to the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.jinja").write_text("{{ tone }}")
    arguments = '{"tone": "kind"}'
    values = {"chat_template": "mine.jinja", "default_chat_template_kwargs": arguments}
    expected = {"chat_template": str(tmp_path / "mine.jinja")}
    expected["default_chat_template_kwargs"] = {"tone": "kind"}
    for door in (partial(from_model_json, folder=tmp_path), from_command_line):
        config = door(values).config
        assert {name: getattr(config, name) for name in values} == expected
        literal = "{{ messages }}" * 1000
        assert door({"chat_template": literal}).config.chat_template == literal
    with pytest.raises(ConfigError, match="chat_template names no file: 'other.jinja'"):
        from_command_line({"chat_template": "other.jinja"})
    template = LLM("demo", **values).tokenizer.chat_template
    assert template is not None and template.source == "{{ tone }}"


def test_defaults_of_sampling_at_each_door(tmp_path, monkeypatch):
    """A folder may be relative to model.json or, on the command line, to the working directory."""
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "vllm"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "generation_config.json").write_text("{}")
    values = {"generation_config": "mine", "override_generation_config": '{"top_k": 3}'}
    expected = {"generation_config": str(tmp_path / "mine")}
    expected["override_generation_config"] = {"top_k": 3}
    for door in (partial(from_model_json, folder=tmp_path), from_command_line):
        config = door(values).config
        assert {name: getattr(config, name) for name in values} == expected
        assert door({"generation_config": "vllm"}).config.generation_config == "vllm"
        assert door({}).config.generation_config == "auto"
        with pytest.raises(ConfigError, match="option generation_config must be auto, vllm or a"):
            door({"generation_config": "other"})


def test_the_queue_has_the_name_of_tensorrtllm_backend_too(tmp_path):
    values = {"max_queue_size": 7}
    for door in (partial(from_model_json, folder=tmp_path), from_command_line):
        assert door(values).config.max_waiting_requests == 7
        with pytest.raises(ConfigError, match="option max_waiting_requests must be an integer"):
            door({"max_queue_size": 0})
        with pytest.raises(ConfigError, match="max_queue_size is another name"):
            door(values | {"max_waiting_requests": 8})


@pytest.mark.parametrize("values", [{"data_parallel_size_local": 2}, {"calculate_kv_scales": True}])
def test_each_door_refuses_what_the_engine_lacks(tmp_path, values):
    (name,) = values
    for door in (partial(from_model_json, folder=tmp_path), from_command_line):
        with pytest.raises(ConfigError, match=f"option {name} can only be"):
            door(values)
    with pytest.raises(ConfigError, match=f"option {name} can only be"):
        LLM("demo", **values)


def test_adapters_of_vllm_backend(tmp_path):
    file = tmp_path / "model.json"
    file.write_text('{"model": "demo", "enable_lora": "true"}')
    with pytest.raises(ConfigError) as error:
        read_engine_args(file)
    assert str(error.value) == f"Triton backend cannot find {tmp_path / 'multi_lora.json'}."
    (tmp_path / "multi_lora.json").write_text('{"doll": "adapters/doll", "sheep": "/sheep"}')
    modules = {"doll": str(tmp_path / "adapters/doll"), "sheep": "/sheep"}
    assert read_engine_args(file).config.lora_modules == modules
    (tmp_path / "multi_lora.json").unlink()  # clients load all adapters
    file.write_text('{"model": "demo", "enable_lora": true, "runtime_lora_folder": "."}')
    config = read_engine_args(file).config
    assert (config.lora_modules, config.runtime_lora_folder) == (None, str(tmp_path))


def test_flags_without_a_value():
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    for flag in ("--disable-log-requests", "--no-enable-lora", "--enable-expert-parallel"):
        engine_options(parser.parse_args([flag]))
    assert engine_options(parser.parse_args(["--enable-lora"]))["enable_lora"] is True
    assert "swap-space" not in parser.format_help()
