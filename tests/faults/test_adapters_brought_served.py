"""Requests of tensorrtllm_backend's clients bring adapters, and later ones name them by number."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_folders import make_adapter
from packed_adapters import pack
from pipelines import write_part_of_pipeline
from safetensors.torch import load_file, save_file
from servers import LOAD_TIMEOUT_S, MODEL, kill_engine, serve_repository, wait_for, wait_loaded
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from paged_backend import LLM, LoRARequest, SamplingParams
from paged_backend.launch.server_process import RunningServer

pytestmark = pytest.mark.server

PROMPT, NUM_TOKENS = "What does len do?", 40


@dataclass
class World:
    """A server with room for two brought adapters, and PEFT's folders of three adapters."""

    server: RunningServer
    folders: list[Path]
    expected: list[str]  # the answers with these adapters

    def ask(
        self, task: int, packed: tuple[Any, Any] | None = None, tokens: int = NUM_TOKENS
    ) -> str:
        tensors = {
            "text_input": np.array([[PROMPT.encode()]], object),
            "max_tokens": np.array([[tokens]], np.int32),
            "end_id": np.array([[-1]], np.int32),
            "exclude_input_in_output": np.array([[True]]),
            "lora_task_id": np.array([[task]], np.uint64),
        }
        if packed is not None:
            tensors |= {"lora_weights": packed[0][None], "lora_config": packed[1][None]}
        inputs = []
        for name, array in tensors.items():
            inputs.append(InferInput(name, array.shape, np_to_triton_dtype(array.dtype)))
            inputs[-1].set_data_from_numpy(array)
        with InferenceServerClient(self.server.grpc_url) as client:
            answer = client.infer("ensemble", inputs).as_numpy("text_output")
        return str(answer[0].decode())

    def is_known(self, task: int) -> bool:
        """Return whether requests can name an adapter by its number only."""
        try:
            self.ask(task, tokens=1)
        except InferenceServerException as error:
            assert "not found in cache. Please send LoRA weights with request" in str(error)
            return False
        return True


def round_weights(folder: Path) -> None:
    """Round the weights of an adapter to numbers that float16 can hold."""
    file = folder / "adapter_model.safetensors"
    save_file({name: value.half().float() for name, value in load_file(file).items()}, file)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("brought")
    folders = [Path(make_adapter(root / name, seed)) for seed, name in enumerate("abc", 21)]
    for folder in folders:
        round_weights(folder)
    llm = LLM("demo", enable_lora=True)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    expected = [
        llm.generate(PROMPT, params, LoRARequest(folder.name, number, str(folder)))[0]
        .outputs[0]
        .text
        for number, folder in enumerate(folders, 1)
    ]
    assert len(set(expected)) == 3
    weights, config = pack(folders[0])
    options = {
        "model": "demo",
        "enable_lora": True,
        "max_request_lora_bytes": int(2.5 * (weights.nbytes + config.nbytes)),
    }
    write_part_of_pipeline(
        root / "repository", MODEL, options, ("preprocessing", "postprocessing", "ensemble")
    )
    path = root / "repository" / "ensemble" / "config.pbtxt"
    path.write_text(path.read_text().replace("decoupled: true", "decoupled: false"))
    with serve_repository(root) as server:
        yield World(server, folders, expected)


def test_answers_are_those_of_the_same_adapter_in_a_folder(world: World) -> None:
    """The first request brings it, later ones name it, and some send it again."""
    assert not world.is_known(1)
    packed = pack(world.folders[0])
    with ThreadPoolExecutor() as pool:  # at the same time
        first = [pool.submit(world.ask, 1, packed) for _ in range(2)]
        assert {answer.result() for answer in first} == {world.expected[0]}
    assert world.ask(1) == world.ask(1, packed) == world.expected[0]
    other = pack(world.folders[1])
    with pytest.raises(InferenceServerException, match="lora_task_id: 1 stands for another"):
        world.ask(1, other)
    assert world.ask(2, other) == world.ask(2) == world.expected[1]


def test_an_engine_that_ends_loses_no_adapter(world: World) -> None:
    world.ask(1, pack(world.folders[0]), tokens=1)
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(world.ask, 1) for _ in range(4)]
        kill_engine(world.server)
        wait_loaded(world.server, 1)
        assert {answer.result() for answer in asked} == {world.expected[0]}
    assert world.ask(1) == world.expected[0]


def test_the_oldest_adapter_makes_room(world: World) -> None:
    for task, (folder, expected) in enumerate(zip(world.folders, world.expected, strict=True), 11):
        assert world.ask(task, pack(folder)) == expected
    wait_for(lambda: not world.is_known(11), LOAD_TIMEOUT_S)
    assert world.is_known(12) and world.is_known(13)
    assert world.ask(11, pack(world.folders[0])) == world.expected[0]


def test_an_adapter_that_does_not_fit_is_refused_by_its_tensor(world: World) -> None:
    weights, config = pack(world.folders[0])
    wrong = config.copy()
    wrong[3, 2] = 17
    large = np.ones((3, weights.size), np.float16)
    for packed, said in [
        ((weights, wrong), "lora_config: row 3 has the rank 17; it must be from 1 to max_lora_r"),
        ((weights[:, :8], config), "lora_weights: row 0 has 8 numbers; the model and the rank ask"),
        ((weights[1:], config), "lora_weights: must have a row for each of the"),
        ((large, config[:3]), "lora_weights: has .* bytes .* at most .*max_request_lora_bytes"),
    ]:
        with pytest.raises(InferenceServerException, match=said):
            world.ask(21, packed)
    assert not world.is_known(21)
