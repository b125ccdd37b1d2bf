"""What an instance reads from its config.pbtxt."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from paged_backend.serving.deployment import Deployment, has_model_control


def deployment(kind="MODEL", device="0", backend="vllm", **parameters):
    values = {name: {"string_value": value} for name, value in parameters.items()}
    return Deployment.from_args(
        {
            **{"model_name": "m", "model_version": "3", "model_repository": "/models/m"},
            **{"model_instance_kind": kind, "model_instance_device_id": device},
            "model_config": json.dumps({"backend": backend, "parameters": values}),
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


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], False),
        (["--model-control-mode=none"], False),
        (["--model-control-mode=explicit"], True),
        (["--log-verbose=0", "--model-control-mode", "explicit"], True),
    ],
    ids=str,
)
def test_model_control_is_read_from_the_servers_command_line(flags, expected):
    command = [sys.executable, "-c", "print(flush=True); input()", *flags]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:
        process.stdout.readline()  # it runs
        assert has_model_control(process.pid) is expected
        process.communicate(b"\n")
