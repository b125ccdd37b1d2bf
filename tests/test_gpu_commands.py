"""The commands for a machine with a GPU, as far as they go without one.

They are read from the Makefile, and run here up to their collection and their arguments, without
the packages that such a machine may lack.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paged_backend.checkpoint.model_config import load_model_config
from paged_backend.cli import bench
from paged_backend.cli.options import engine_options
from paged_backend.platforms.select import resolve_dtype
from paged_backend.tools.bench.decode_engine import growth
from paged_backend.values.config import EngineConfig
from paged_backend.values.options.scheduling import GPU_LIMITS

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "kernels" / "benchmarks"))

import run_all  # noqa: E402

MOST_SECONDS = 300  # that a part may take
MOST_BLOCK_SECONDS = 600  # that a pasted block may take where machines are lent
MOST_CHARACTERS = 2000  # length of a command there
LIMIT = ["timeout", "--signal", "INT", "--kill-after", "30"]
GRACE = int(LIMIT[-1])
PYTEST = "python3 -m pytest "
BENCH = "python3 -m paged_backend.cli bench decode "
KERNELS = "python3 kernels/benchmarks/run_all.py "
ABSENT = (
    *("zmq", "msgspec", "numba", "tritonclient", "pytriton", "fastapi", "uvicorn", "openai"),
    *("locust", "gevent", "prometheus_client"),
)

COLLECT = """
import json, sys
from importlib import import_module

commands, absent = map(json.loads, sys.argv[1:])

class Absent:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent)

import pytest

class Names:
    def __init__(self):
        self.found = []

    def pytest_collection_finish(self, session):
        self.found = [item.nodeid for item in session.items]

collected = []
for command in commands:
    names = Names()
    status = pytest.main([*command, "--collect-only", "-q"], plugins=[names])
    assert status == 0, command
    collected.append(names.found)
import_module("paged_backend.cli")
print()
print(json.dumps(collected))
"""


def printed(target: str) -> list[str]:
    """The commands of a target with its variables, with `$RESULTS` for the folder."""
    outer = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        ["make", "-n", "--no-print-directory", *target.split(), "RESULTS=$$RESULTS"],
        cwd=ROOT,
        env=outer,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def commands() -> list[str]:
    return printed("gpu")


def of_kind(commands: list[str], kind: str) -> list[list[str]]:
    """The arguments of the commands of one program."""
    found = [command.partition(kind)[2] for command in commands if kind in command]
    assert found
    return [shlex.split(arguments) for arguments in found]


def seconds(command: str) -> int:
    """The limit of a command, until it is killed."""
    words = shlex.split(command)
    assert words[: len(LIMIT)] == LIMIT
    return int(words[len(LIMIT)]) + GRACE


def test_each_command_has_a_limit_of_five_minutes(commands):
    assert len(commands) == 18
    for command in commands:
        assert GRACE < seconds(command) <= MOST_SECONDS
        assert any(kind in command for kind in (PYTEST, BENCH, KERNELS))


def test_all_parts_write_files_of_their_own_to_the_folder_for_results(commands):
    files = [re.findall(r" --(?:json|junitxml) (\$RESULTS/\S+)", command) for command in commands]
    assert all(len(names) == 1 for names in files)
    assert len({name for names in files for name in names}) == len(commands)


def test_the_groups_are_the_parts_of_their_names(commands):
    groups = {target: printed(target) for target in ("gpu-test", "gpu-kernels")}
    assert set(groups["gpu-test"]) == {command for command in commands if PYTEST in command}
    assert set(groups["gpu-kernels"]) == {command for command in commands if KERNELS in command}


def test_the_commands_to_paste_are_those_of_make_and_keep_the_limits(commands):
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("## On a machine with a GPU")[2]
    blocks = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    pasted = []
    for block in blocks:
        inside = [line for line in block.splitlines() if line.startswith("timeout ")]
        assert len(block) < MOST_CHARACTERS
        assert sum(map(seconds, inside)) <= MOST_BLOCK_SECONDS
        assert subprocess.run(["bash", "-n"], input=block, text=True).returncode == 0
        pasted += inside
    assert pasted == commands
    limits = [
        int(number)
        for row in re.findall(r"\| ([\d, ]+) s \|", section)
        for number in row.split(",")
    ]
    assert limits == [seconds(command) - GRACE for command in commands]


def test_the_parts_collect_each_test_once_without_the_packages_of_a_server(commands, tmp_path):
    parts = of_kind(commands, PYTEST)
    for part in parts:
        assert part[part.index("--timeout") + 1] == "150"
        assert "--timeout-method=thread" in part
        assert int(part[part.index("-n") + 1]) >= 1
    common = parts[0][: parts[0].index("--timeout")]
    folders = ("", "kernels", "client", "loadtest")
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",  # in place of a device
        "PYTEST_ADDOPTS": "",  # which a developer may have set
        "PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in folders),
    }
    runs = [[word.replace("$RESULTS", str(tmp_path)) for word in part] for part in parts]
    runs.append([*common, "tests/kernels", "tests/gpu"])
    done = subprocess.run(
        [sys.executable, "-c", COLLECT, json.dumps(runs), json.dumps(ABSENT)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    *found, everything = json.loads(done.stdout.splitlines()[-1])
    assert all(found)
    assert sorted(name for names in found for name in names) == sorted(everything)
    assert [names for names in found if any("test_benchmarks.py" in name for name in names)] == [
        [name for name in everything if "test_benchmarks.py" in name]
    ]
    assert [name for name in everything if "pool" in name and "/gpu/" in name] in found


def test_each_kernel_is_measured_once(commands):
    options = [run_all.parsed(arguments) for arguments in of_kind(commands, KERNELS)]
    assert sorted(name for option in options for name in option.only) == run_all.NAMES
    limits = [seconds(command) - GRACE for command in commands if KERNELS in command]
    for option, limit in zip(options, limits, strict=True):
        if len(option.only) == 1:  # it takes long, and is stopped before the command is
            assert run_all.TIMEOUT + run_all.GRACE <= limit
    assert not any(option.quick for option in options)


def decode_options(commands: list[str]) -> list[argparse.Namespace]:
    parser = argparse.ArgumentParser()
    bench.add_parser(parser.add_subparsers())
    arguments = of_kind(commands, BENCH)
    return [parser.parse_args(["bench", "decode", *argv]) for argv in arguments]


def test_the_decode_benchmarks_are_in_bfloat16(commands):
    for args in decode_options(commands):
        config = EngineConfig.from_mapping(engine_options(args))
        assert (config.device, config.load_format) == ("cuda", "dummy")
        model = load_model_config(ROOT / config.model)
        assert resolve_dtype(config.dtype, model.dtype, torch.device("cuda")) == torch.bfloat16


def test_no_batch_of_the_decode_benchmarks_grows_beyond_the_longest_request(commands):
    for args in decode_options(commands):
        config = EngineConfig.from_mapping(engine_options(args))
        limits = config.step_limits(GPU_LIMITS)
        model = load_model_config(ROOT / config.model)
        longest = config.max_model_len or model.max_position_embeddings
        for context in args.context:
            for batch_size in args.batch_sizes:
                assert batch_size <= limits.max_num_seqs
                grown = growth(context, batch_size, limits.max_num_batched_tokens, args.steps)
                assert context + grown < longest, f"{batch_size} x {context}"


def test_the_large_shape_is_measured_alone_and_then_with_vllm(commands):
    first, small, *_, second = decode_options(commands)
    assert (first.peer, small.peer, second.peer) == (None, "transformers", "vllm")
    assert set(second.context) == set(first.context)
    assert set(second.batch_sizes) <= set(first.batch_sizes)
    assert (first.model, first.max_model_len) == (second.model, second.max_model_len)


def test_the_formats_differ_in_one_option_each(commands):
    formats = decode_options(printed("gpu-formats"))
    assert [(args.quantization, args.kv_cache_dtype) for args in formats] == [
        ("fp8", "auto"),
        ("int4", "auto"),
        (None, "fp8"),
        (None, "int8_per_token_head"),
        (None, "auto"),
    ]
    assert load_model_config(ROOT / formats[-1].model).moe is not None
    compared = decode_options(printed("gpu-formats PEER=--peer=vllm"))
    assert {args.peer for args in compared} == {"vllm"}


def test_tests_have_one_thread_each(commands):
    tests = [command for command in commands if PYTEST in command]
    assert all("env OMP_NUM_THREADS=1 " in command for command in tests)
