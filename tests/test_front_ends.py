"""The number of front ends that `serve` starts if the user does not choose it."""

from __future__ import annotations

import pytest

from paged_backend.cli import main
from paged_backend.launch import front_ends


@pytest.fixture
def machine(monkeypatch):
    """Sets the number of cores, and whether there is a driver for a GPU."""

    def change(num_cores: int, *, has_gpu: bool) -> None:
        monkeypatch.setattr(front_ends.os, "sched_getaffinity", lambda pid: set(range(num_cores)))
        monkeypatch.setattr(front_ends, "has_nvidia_driver", lambda: has_gpu)

    return change


@pytest.mark.parametrize(
    ("num_cores", "expected"), [(1, 1), (3, 1), (4, 2), (7, 3), (8, 4), (128, 4)]
)
def test_with_a_gpu_the_cores_decide(machine, num_cores, expected):
    machine(num_cores, has_gpu=True)
    assert front_ends.choose_num_front_ends("auto") == expected
    assert front_ends.choose_num_front_ends("cuda") == expected
    assert front_ends.choose_num_front_ends("cpu") == 1


def test_without_a_gpu_the_cores_belong_to_the_engine(machine):
    machine(128, has_gpu=False)
    assert front_ends.choose_num_front_ends("auto") == 1


@pytest.mark.parametrize(("flags", "expected"), [([], 4), (["--instances", "2"], 2)])
def test_the_user_may_choose_another_number(machine, tmp_path, capsys, flags, expected):
    machine(16, has_gpu=True)
    assert main(["serve", "demo", "--write-to", str(tmp_path), *flags]) == 0
    config = (tmp_path / "models" / "paged_llm" / "config.pbtxt").read_text()
    assert f"instance_group [{{ count: {expected} kind: KIND_CPU }}]" in config
