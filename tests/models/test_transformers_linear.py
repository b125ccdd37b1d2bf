"""Layers of transformers' models that read the same rows are one product, with the same outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paged_backend.models.transformers_linear import replace_linear_layers, watch_linear_layers
from paged_backend.platforms.cpu.torch_platform import TorchPlatform

X = torch.arange(10.0).view(1, 5, 2)


class Block(nn.Module):
    """Three layers, and the order in which they are called."""

    def __init__(self, calls: Sequence[str], *, bias: bool = True) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(2, 3), nn.Linear(2, 4, bias), nn.Linear(2, 5)
        self.calls = calls

    def forward(self, x: Tensor) -> Tensor:
        """Concatenate outputs; "-" makes another tensor, "+" changes it, "w" reads a weight."""
        outputs = []
        for call in self.calls:
            if call == "-":
                x = x + 1
            elif call == "+":
                x += 1
            elif call == "w":
                outputs.append(x @ self.k.weight.t())
            else:
                outputs.append(getattr(self, call)(x))
        return torch.cat(outputs, dim=-1)


@pytest.mark.parametrize(
    ("calls", "groups"),
    [
        ("qkv", ["qkv"]),
        ("vq-k", ["k", "vq"]),
        ("q-k-v", ["k", "q", "v"]),
        ("qkv-qkv", ["qkv"]),  # as in models whose layers share their weights
        ("qkv-qk", ["k", "q", "v"]),
        ("qqk", ["k", "q"]),
        ("q+kv", ["kv", "q"]),
        ("qkvw", ["qv"]),  # the model reads the weight
        ("wv", ["v"]),
    ],
)
def test_layers_with_the_same_input_are_one_product(calls: str, groups: list[str]) -> None:
    model = nn.Sequential(Block(calls), nn.Identity())
    with watch_linear_layers(model) as called, torch.inference_mode():
        expected = model(X.clone())
    assert called.groups() == [tuple(f"0.{name}" for name in group) for group in groups]
    replace_linear_layers(model, called.groups(), TorchPlatform(torch.float32))
    for _ in range(2):
        with torch.inference_mode():
            torch.testing.assert_close(model(X.clone()), expected)


def test_layers_with_and_without_a_bias_stay_apart() -> None:
    model = nn.Sequential(Block("qkv", bias=False))
    with watch_linear_layers(model) as called:
        model(X)
    assert called.groups() == [("0.k",), ("0.q",), ("0.v",)]


@pytest.mark.parametrize("calls", ["kq", "q-kv", "q+qkv", "qk+qkv", "vv+v"])
def test_other_calls_than_the_watched_ones_are_right(calls: str) -> None:
    model: Any = Block("qkv")
    with watch_linear_layers(model) as called:
        model(X)
    model.calls = calls
    with torch.inference_mode():
        expected = model(X.clone())
        replace_linear_layers(model, called.groups(), TorchPlatform(torch.float32))
        torch.testing.assert_close(model(X.clone()), expected)
