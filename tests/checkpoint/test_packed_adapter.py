"""Adapters in TensorRT-LLM's packed form, compared with PEFT's folders, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packed_adapters import pack, write_packed
from safetensors.torch import save_file

from paged_backend.checkpoint.packed_adapter import is_packed, read_packed
from paged_backend.checkpoint.peft import ModuleSizes, read_adapter
from paged_backend.values.errors import ConfigError

RANK, HIDDEN = 4, 24
SIZES = {
    f"model.layers.{layer}.{module}": ModuleSizes(inputs, outputs)
    for layer in range(2)
    for module, inputs, outputs in [
        ("self_attn.q_proj", HIDDEN, 32),
        ("self_attn.k_proj", HIDDEN, 16),
        ("self_attn.v_proj", HIDDEN, 8),
        ("self_attn.o_proj", 32, HIDDEN),
        ("mlp.gate_proj", HIDDEN, 40),
        ("mlp.up_proj", HIDDEN, 40),
        ("mlp.down_proj", 40, HIDDEN),
        ("mlp.shared_expert.up_proj", HIDDEN, 40),
    ]
}


@pytest.fixture(scope="module")
def peft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter for all modules but the shared expert's, with numbers that float16 can hold."""
    folder = tmp_path_factory.mktemp("peft")
    tensors = {}
    random = torch.Generator().manual_seed(5)
    for name, size in SIZES.items():
        if "shared" not in name:
            for part, shape in (("A", (RANK, size.inputs)), ("B", (size.outputs, RANK))):
                values = torch.randn(shape, generator=random).half().float()
                tensors[f"base_model.model.{name}.lora_{part}.weight"] = values
    save_file(tensors, folder / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder


def test_the_matrices_are_those_of_the_folder(peft_folder: Path, tmp_path: Path) -> None:
    expected = read_adapter(peft_folder, SIZES, RANK)
    folder = write_packed(tmp_path / "packed", *pack(peft_folder))
    assert is_packed(folder) and not is_packed(peft_folder)
    found = read_packed(folder, SIZES, RANK)
    assert found.modules.keys() == expected.modules.keys()
    for name, (a, b) in expected.modules.items():
        torch.testing.assert_close(found.modules[name].a, a, rtol=0, atol=0)
        torch.testing.assert_close(found.modules[name].b, b, rtol=0, atol=0)
        assert found.modules[name].a.is_contiguous() and found.modules[name].b.is_contiguous()


def test_one_row_for_queries_keys_and_values(tmp_path: Path) -> None:
    outputs = 32 + 16 + 8
    a, b = np.random.default_rng(0).standard_normal((2, RANK, max(HIDDEN, outputs)))
    a, b = a[:, :HIDDEN], b[:, :outputs].T
    row = np.concatenate([a.flatten(), b.flatten()]).astype(np.float16)
    folder = write_packed(tmp_path / "packed", row[None], np.array([[0, 1, RANK]], np.int32))
    modules = read_packed(folder, SIZES, RANK).modules
    start = 0
    for part, size in (("q_proj", 32), ("k_proj", 16), ("v_proj", 8)):
        low_rank = modules[f"model.layers.1.self_attn.{part}"]
        np.testing.assert_array_equal(low_rank.a.numpy(), a.astype(np.float16).T)
        expected = b[start : start + size].astype(np.float16).T
        np.testing.assert_array_equal(low_rank.b.numpy(), expected)
        start += size
    assert len(modules) == 3


def test_rows_of_other_stages_are_left_out_but_belong_to_the_digest(
    peft_folder: Path, tmp_path: Path
) -> None:
    folder = write_packed(tmp_path / "packed", *pack(peft_folder))
    here = {name: size for name, size in SIZES.items() if "layers.0" in name}
    part = read_packed(folder, here, RANK, lambda name: "layers.1" in name)
    whole = read_packed(folder, SIZES, RANK)
    assert part.digest == whole.digest and len(part.modules) == len(whole.modules) / 2
    weights, config = pack(peft_folder)
    weights[0, 0] += 1
    other = write_packed(tmp_path / "other", weights, config)
    assert read_packed(other, SIZES, RANK).digest != whole.digest


Change = Callable[[Any, Any], None]


def set_config(place: tuple[int, int], value: int) -> Change:
    def change(_: Any, config: Any) -> None:
        config[place] = value

    return change


def double_first(_: Any, config: Any) -> None:
    config[1] = config[0]


def fill_padding(weights: Any, _: Any) -> None:
    weights[:, -1] = 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (set_config((3, 2), 9), r"lora_config: row 3 has the rank 9; .*max_lora_rank \(4\)"),
        (set_config((3, 2), 0), "lora_config: row 3 has the rank 0"),
        (set_config((2, 0), 13), "lora_config: row 2 has the module 13; only 0, 1, 2"),
        (set_config((0, 1), 7), "lora_config: row 0 stands for .* of layer 7, which can have no"),
        (set_config((0, 1), -1), "lora_config: row 0 stands for .* of layer -1"),
        (set_config((0, 2), 1), "lora_weights: row 0 goes on after the .* numbers"),
        (double_first, "lora_config: row 1 is the second one for model.layers"),
        (fill_padding, "lora_weights: row . goes on after the"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(
    peft_folder: Path, tmp_path: Path, change: Change, said: str
) -> None:
    weights, config = pack(peft_folder)
    change(weights, config)
    with pytest.raises(ConfigError, match=said) as caught:
        read_packed(write_packed(tmp_path / "packed", weights, config), SIZES, RANK)
    assert "\n" not in str(caught.value)


def test_rows_that_are_too_short_are_refused(peft_folder: Path, tmp_path: Path) -> None:
    weights, config = pack(peft_folder)
    folder = write_packed(tmp_path / "packed", weights[:, :100], config)
    with pytest.raises(ConfigError, match="lora_weights: row 0 has 100 numbers; .* ask for"):
        read_packed(folder, SIZES, RANK)
