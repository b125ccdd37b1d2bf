"""What an instance reads from its config.pbtxt."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import contextmanager

import pytest

from paged_backend.serving.deployment import Deployment, exit_timeout_s, has_model_control
from paged_backend.serving.requests.drain import drain_limit_s


def deployment(kind="MODEL", device="0", backend="vllm", **parameters):
    values = {name: {"string_value": value} for name, value in parameters.items()}
    return Deployment.from_args(
        {
            **{"model_name": "m", "model_version": "3", "model_repository": "/models/m"},
            **{"model_instance_kind": kind, "model_instance_device_id": device},
            "model_config": json.dumps(
                {
                    **{"backend": backend, "parameters": values},
                    "instance_group": [{"count": 2}, {"count": 3}],
                }
            ),
        }
    )


@pytest.mark.parametrize(
    ("kind", "device", "gpu"),
    [("GPU", "1", "1"), ("GPU", "-1", None), ("MODEL", "0", None), ("CPU", "0", None)],
)
def test_only_an_instance_on_a_gpu_has_a_device(kind, device, gpu):
    found = deployment(kind, device)
    assert found.gpu == gpu
    labels = {"model": "m", "version": "3"}
    assert found.labels == (labels if gpu is None else {**labels, "gpu": gpu})


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
    assert found.num_instances == 5


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
