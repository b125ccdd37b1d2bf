"""Blocks of attention and an MLP that several layers share (Zamba 2)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from oracle import make_engine
from safetensors.torch import load_file, save_file
from test_variants import LENGTH, logits

from paged_backend.checkpoint.model_config import load_model_config
from paged_backend.models.shared_block import BlockUse
from paged_backend.values.errors import ConfigError


@pytest.fixture
def wanted(tmp_path: Path) -> torch.Tensor:
    """The logits of transformers; the checkpoint of two blocks and three uses is in the folder."""
    model = make_checkpoint("zamba2", tmp_path)
    with torch.no_grad():
        expected: torch.Tensor = model(torch.arange(LENGTH).unsqueeze(0)).logits[0]
    return expected


def change(folder: Path, part: str, change_to: float | None) -> int:
    """Fill the tensors of names with a part, or copy them to layer 4; returns their number."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    names = [name for name in tensors if part in name]
    for name in names:
        if change_to is None:
            tensors[name.replace("layers.1.", "layers.4.")] = torch.randn_like(tensors[name])
        else:
            tensors[name] = torch.full_like(tensors[name], change_to)
    save_file(tensors, path)
    return len(names)


@pytest.mark.parametrize(
    "part",
    [f"linear_{name}_adapter_list.2.1" for name in "qkv"] + ["gate_up_proj_adapter_list.2.1"],
)
def test_an_adapter_that_is_left_out_shows(wanted: torch.Tensor, part: str, tmp_path: Path) -> None:
    """The adapter belongs to the third use of a block, the second use of that block."""
    torch.testing.assert_close(logits(tmp_path, {}), wanted, atol=1e-4, rtol=1e-4)
    assert change(tmp_path, part, 0.0) == 1
    assert (logits(tmp_path, {}) - wanted).abs().max() > 1e-2


@pytest.mark.parametrize("mutant", ["use", "embeddings"])
def test_a_use_with_another_input_shows(
    wanted: torch.Tensor, mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mix = BlockUse.mix

    def changed(self: BlockUse, x: torch.Tensor, *others: object) -> torch.Tensor:
        if mutant == "use":
            self._use %= 2  # the third use has the adapters of the first one
        else:
            x = torch.cat((x[:, :64], x[:, :64]), dim=1)
        return mix(self, x, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(BlockUse, "mix", changed)
    assert (logits(tmp_path, {}) - wanted).abs().max() > 1e-2


def test_copies_of_a_block_are_not_read(wanted: torch.Tensor, tmp_path: Path) -> None:
    """Layer 4 uses the block of layer 1; transformers ignores another one in the files, too."""
    assert change(tmp_path, "layers.1.shared_transformer.", None) > 10
    torch.testing.assert_close(logits(tmp_path, {}), wanted, atol=1e-4, rtol=1e-4)
    shared = load_model_config(tmp_path).variant.shared_blocks
    assert shared is not None and shared.owners == (1, 3)
    assert [shared.block_of(layer) for layer in shared.layers] == [0, 1, 0]


def test_adapters_of_requests_are_refused(tmp_path: Path) -> None:
    make_checkpoint("zamba2", tmp_path)
    message = "enable_lora can only be false for a model with blocks that layers share"
    with pytest.raises(ConfigError, match=message):
        make_engine(tmp_path, enable_lora=True)
