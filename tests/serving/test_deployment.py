"""What an instance reads from its config.pbtxt."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import contextmanager

import pytest

from paged_backend.serving.deployment import Deployment, exit_timeout_s, has_model_control
from paged_backend.serving.requests.drain import drain_limit_s
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import ConfigError


def deployment(backend="vllm", groups=({"kind": "KIND_MODEL", "count": 1},), **parameters):
    values = {name: {"string_value": value} for name, value in parameters.items()}
    return Deployment.from_args(
        {
            **{"model_name": "m", "model_version": "3", "model_repository": "/models/m"},
            "model_config": json.dumps(
                {"backend": backend, "parameters": values, "instance_group": list(groups)}
            ),
        }
    )


def gpu(*gpus, count=1):
    return {"kind": "KIND_GPU", "gpus": list(gpus), "count": count}


def other(kind, count=1):
    return {"kind": kind, "gpus": [], "count": count}


# groups -> CUDA_VISIBLE_DEVICES of the engines, number of engines, number of instances
GROUPS = [
    ([other("KIND_CPU", 2)], None, 1, 2),
    ([other("KIND_MODEL")], None, 1, 1),
    ([other("KIND_MODEL"), other("KIND_CPU", 3)], None, 1, 4),
    ([gpu(0)], "0", 1, 1),
    ([gpu(1, count=3)], "1", 1, 3),
    ([gpu(0, 1)], "0,1", 2, 2),
    ([gpu(0, 1, count=2)], "0,1", 2, 4),
    ([gpu(0), gpu(3, count=2)], "0,3", 2, 3),
    ([gpu(2, 1), gpu(1)], "2,1", 2, 3),
    ([gpu(0), other("KIND_CPU", 2)], "0", 1, 3),
]


@pytest.mark.parametrize(("groups", "visible", "engines", "instances"), GROUPS)
def test_a_model_has_an_engine_for_each_gpu_of_its_groups(groups, visible, engines, instances):
    found = deployment(groups=groups).groups
    config = found.engines(EngineConfig())
    assert found.visible_gpus(None) == visible
    assert (config.data_parallel_size, found.num_instances) == (engines, instances)
    assert config.device == ("auto" if visible is None else "cuda")


@pytest.mark.parametrize(
    ("groups", "parameters", "visible"),
    [
        ([gpu(1)], {}, "5"),
        ([gpu(1, 0)], {}, "5,3"),
        ([other("KIND_MODEL")], {}, "3,5"),
        ([other("KIND_MODEL")], {"GPU_DEVICE_IDS": "2, 0"}, "2,0"),
    ],
)
def test_the_server_may_see_some_gpus_only(groups, parameters, visible):
    found = deployment(groups=groups, **parameters).groups
    assert found.visible_gpus("3,5") == visible


KIND_GPU = "KIND_GPU is currently for single-GPU models, please specify KIND_MODEL in the model's "


@pytest.mark.parametrize(
    ("groups", "options", "parameters", "message"),
    [
        ([gpu(0)], {"tensor_parallel_size": 2}, {}, KIND_GPU),
        ([gpu(0, 1)], {"tensor_parallel_size": 2}, {}, KIND_GPU),
        ([gpu(0)], {"data_parallel_size": 2}, {}, "data_parallel_size must be 1 with KIND_GPU"),
        ([gpu(0)], {"device": "cpu"}, {}, "device is cpu, but the instance group has the kind"),
        ([gpu(0, 1)], {"enable_inspect": True}, {}, "enable_inspect can only be true for one"),
        ([gpu(0)], {}, {"GPU_DEVICE_IDS": "0"}, "GPU_DEVICE_IDS cannot be used with KIND_GPU"),
    ],
)
def test_options_that_do_not_fit_the_groups_are_refused(groups, options, parameters, message):
    found = deployment(groups=groups, **parameters).groups
    with pytest.raises(ConfigError, match=message):
        found.engines(EngineConfig(**options))


@pytest.mark.parametrize("value", ["0,0", "0,00", "a", "0,", "-1", "0 1", "GPU-1"])
def test_device_ids_are_a_list_of_different_numbers(value):
    found = deployment(GPU_DEVICE_IDS=value).groups
    with pytest.raises(ConfigError, match="GPU_DEVICE_IDS must be a list of different numbers"):
        found.visible_gpus(None)


@pytest.mark.parametrize(
    ("groups", "more"), [([gpu(1)], {"gpu": "1"}), ([gpu(0, 1)], {}), ([other("KIND_CPU")], {})]
)
def test_the_metrics_of_an_engine_on_a_gpu_name_it(groups, more):
    assert deployment(groups=groups).labels == {"model": "m", "version": "3", **more}


@pytest.mark.parametrize(
    ("value", "expected"), [("true", True), ("True", True), ("false", False), ("1", False)]
)
def test_parameters_are_true_in_any_case(value, expected):
    found = deployment(REPORT_CUSTOM_METRICS=value, ENABLE_VLLM_HEALTH_CHECK=value)
    assert (found.report_vllm_metrics, found.unload_if_dead) == (expected, expected)


def test_nothing_is_switched_on_by_default():
    found = deployment(backend="python")
    assert (found.report_vllm_metrics, found.unload_if_dead) == (False, False)
    assert (found.backend, str(found.folder)) == ("paged", "/models/m/3")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], False),
        (["--model-control-mode=none"], False),
        (["--model-control-mode=explicit"], True),
        (["--log-verbose=0", "--model-control-mode", "explicit"], True),
        (["--model-control-mode=none", "--model-control-mode=explicit"], True),
    ],
    ids=str,
)
def test_model_control_is_read_from_the_servers_command_line(flags, expected):
    with process_with(flags) as pid:
        assert has_model_control(pid) is expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], 30.0),
        (["--exit-timeout-secs=7"], 7.0),
        (["--exit-timeout-secs=7", "--exit-timeout-secs", "8"], 8.0),
        (["--exit-timeout-secs", "0", "--log-verbose=0"], 0.0),
        (["--exit-timeout-secs"], 30.0),
    ],
    ids=str,
)
def test_so_is_its_exit_timeout(flags, expected):
    with process_with(flags) as pid:
        assert exit_timeout_s(pid) == expected


def test_requests_end_before_the_server_cuts_them():
    assert drain_limit_s(20, exit_timeout_s=30, num_instances=2) == 20
    assert drain_limit_s(100, exit_timeout_s=30, num_instances=2) == 24
    assert drain_limit_s(20, exit_timeout_s=5, num_instances=4) == 0


@contextmanager
def process_with(flags):
    command = [sys.executable, "-c", "print(flush=True); input()", *flags]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:
        process.stdout.readline()  # it runs
        yield process.pid
        process.communicate(b"\n")
