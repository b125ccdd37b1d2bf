"""Which GPUs, cores and addresses each of several engines of a model gets."""

from __future__ import annotations

from typing import Any

import pytest

from paged_backend.engine.executors import open_executor
from paged_backend.engine.machine_share import Machine, take_share
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import ConfigError
from paged_backend.values.options.kv_events import KVEventsConfig


def config(**options: Any) -> EngineConfig:
    return EngineConfig(device="cpu", **options)


@pytest.mark.parametrize(
    ("num_gpus", "visible", "engines", "ranks", "expected"),
    [
        (2, None, 2, 1, ["0", "1"]),
        (4, None, 3, 1, ["0", "1", "2"]),
        (4, None, 2, 2, ["0,1", "2,3"]),
        (2, "3,5", 2, 1, ["3", "5"]),
        (4, "GPU-a,GPU-b,GPU-c,GPU-d", 2, 2, ["GPU-a,GPU-b", "GPU-c,GPU-d"]),
    ],
)
def test_engines_get_the_gpus_in_their_order(
    num_gpus: int, visible: str | None, engines: int, ranks: int, expected: list[str]
) -> None:
    options = config(data_parallel_size=engines, tensor_parallel_size=ranks)
    machine = Machine(num_gpus, visible, 8)
    assert [machine.gpus_of(options, number) for number in range(engines)] == expected


@pytest.mark.parametrize(
    ("engines", "ranks", "message"),
    [
        (4, 1, "data_parallel_size must be at most 3, as there are 3 GPUs; got 4"),
        (2, 2, "data_parallel_size must be at most 1 for engines of 2 GPUs, as there are 3 GPUs"),
    ],
)
def test_more_engines_than_gpus_are_refused(engines: int, ranks: int, message: str) -> None:
    options = config(data_parallel_size=engines, tensor_parallel_size=ranks)
    with pytest.raises(ConfigError, match=message):
        Machine(3, None, 8).gpus_of(options, 0)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"data_parallel_size": 2}, [(None, 4), (None, 4)]),
        ({"data_parallel_size": 3}, [(None, 2), (None, 2), (None, 2)]),
        ({"data_parallel_size": 2, "cpu_threads": 2}, [(None, 1), (None, 1)]),
        ({"data_parallel_size": 2, "cpu_cores": "0-3"}, [("0,1", 2), ("2,3", 2)]),
        ({"data_parallel_size": 2, "cpu_cores": "1,4,6"}, [("1", 1), ("4", 1)]),
    ],
)
def test_engines_get_equal_shares_of_the_cores(
    options: dict[str, Any], expected: list[tuple[str | None, int]]
) -> None:
    machine = Machine(0, None, 8)
    shares = [
        machine.on_cpu(config(**options), number) for number in range(options["data_parallel_size"])
    ]
    assert [(share.cpu_cores, share.cpu_threads) for share in shares] == expected


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"data_parallel_size": 9}, 8),
        ({"data_parallel_size": 3, "tensor_parallel_size": 4}, 2),
        ({"data_parallel_size": 3, "cpu_cores": "0,1"}, 2),
        ({"data_parallel_size": 3, "cpu_threads": 2}, 2),
    ],
)
def test_more_engines_than_cores_are_refused(options: dict[str, Any], most: int) -> None:
    with pytest.raises(ConfigError, match=f"data_parallel_size must be at most {most} "):
        Machine(0, None, 8).on_cpu(config(**options), 0)


def test_a_single_engine_has_all_of_the_machine() -> None:
    options = config()
    assert take_share(options, 0) is options


def test_the_share_of_an_engine_is_one_engine() -> None:
    events = {"enable_kv_cache_events": True, "endpoint": "tcp://*:5557"}
    options = config(data_parallel_size=2, cpu_threads=2, kv_events_config=events)
    share = take_share(options, 1)
    assert (share.data_parallel_size, share.cpu_threads) == (1, 1)
    assert share.kv_events().endpoint == "tcp://*:5558"


def test_each_engine_has_addresses_of_its_own() -> None:
    events = KVEventsConfig(endpoint="tcp://[::1]:5557", replay_endpoint="ipc:///tmp/replay")
    assert events.of_engine(0) == events
    third = events.of_engine(2)
    assert (third.endpoint, third.replay_endpoint, third.snapshot_endpoint) == (
        "tcp://[::1]:5559",
        "ipc:///tmp/replay_dp2",
        None,
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_inspect": True}, "enable_inspect can only be true for one engine"),
        ({"nnodes": 2}, "nnodes can only be 1 for several engines"),
        (
            {
                "kv_events_config": {
                    "enable_kv_cache_events": True,
                    "replay_endpoint": "tcp://127.0.0.1:5558",
                }
            },
            "needs ports that are at least 2",
        ),
        ({"data_parallel_size": 65}, "data_parallel_size must be an integer from 1 up to 64"),
        ({"data_parallel_size": 0}, "data_parallel_size must be an integer from 1 up to 64"),
    ],
)
def test_options_that_several_engines_cannot_have_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**{"data_parallel_size": 2, **options})


def test_outside_of_a_server_there_is_one_engine(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="data_parallel_size must be 1 outside of a server"):
        open_executor(config(data_parallel_size=2), tmp_path)
