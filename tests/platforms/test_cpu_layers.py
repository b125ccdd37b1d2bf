"""The CPU's compiled functions against the plain ones."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from paged_backend.platforms.cpu import layers as cpu_layers
from paged_backend.platforms.cpu.rows import CpuEmbedding, contiguous
from paged_backend.platforms.portable import layers

ROWS = [0, 1, 5, 64]


@pytest.mark.parametrize("rows", ROWS)
def test_rms_norm(rows: int) -> None:
    x, weight = torch.randn(rows, 70), torch.randn(70)
    normed = cpu_layers.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(normed, layers.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("rows", ROWS)
def test_norm_heads_leaves_the_values_alone(rows: int) -> None:
    qkv, weight = torch.randn(rows, 5 * 24), torch.randn(3, 24)
    ours, theirs = qkv.clone(), qkv.clone()
    cpu_layers.norm_heads(ours, weight, 1e-6)
    layers.norm_heads(theirs, weight, 1e-6)
    torch.testing.assert_close(ours, theirs)
    assert torch.equal(ours[:, 72:], qkv[:, 72:])


@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_tanh_and_mul"])
@pytest.mark.parametrize("rows", ROWS)
def test_gated_activations(rows: int, name: str) -> None:
    gate_up = torch.randn(rows, 2 * 37) * 5
    ours, theirs = getattr(cpu_layers, name)(gate_up), getattr(layers, name)(gate_up)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_tanh_and_mul"])
def test_gated_activations_of_extremes(name: str) -> None:
    gates = torch.tensor([[-1e4, -200.0, -87.0, -1e-20, 0.0, 1e-20, 88.0, 1e18]])
    gate_up = torch.cat((gates, torch.ones_like(gates)), dim=1)
    ours, theirs = getattr(cpu_layers, name)(gate_up), getattr(layers, name)(gate_up)
    torch.testing.assert_close(ours, theirs, atol=1e-30, rtol=1e-6)


@pytest.mark.parametrize("rows", ROWS)
def test_layer_norm(rows: int) -> None:
    x, weight, bias = torch.randn(rows, 70) * 3 + 50, torch.randn(70), torch.randn(70)
    exact = F.layer_norm(x.double(), (70,), weight.double(), bias.double(), 1e-5)
    normed = cpu_layers.layer_norm(x, weight, bias, 1e-5)
    torch.testing.assert_close(normed, exact.float(), atol=2e-5, rtol=1e-5)
    assert normed.shape == layers.layer_norm(x, weight, bias, 1e-5).shape


def test_gelu() -> None:
    x = torch.linspace(-12, 12, 100_000).view(-1, 100)
    exact = F.gelu(x.double())
    torch.testing.assert_close(cpu_layers.gelu(x), exact.float(), atol=4e-7, rtol=3e-7)
    torch.testing.assert_close(layers.gelu(x), exact.float())


def test_gelu_of_extremes() -> None:
    x = torch.tensor([[-math.inf, -1e30, -200.0, -1e-20, 0.0, 1e-20, 200.0, 1e30, math.inf]])
    found = cpu_layers.gelu(x)
    assert found[0, 1:].tolist() == pytest.approx([0, 0, -5e-21, 0, 5e-21, 200, 1e30, math.inf])
    assert cpu_layers.gelu(torch.tensor([[math.nan]])).isnan()


def test_a_row_does_not_depend_on_its_batch() -> None:
    rows, weight = torch.randn(33, 96), torch.randn(96)
    together = cpu_layers.rms_norm(rows, weight, 1e-5)
    alone = cpu_layers.rms_norm(rows[7:8], weight, 1e-5)
    assert torch.equal(together[7:8], alone)
    for function in (cpu_layers.silu_and_mul, cpu_layers.gelu):
        assert torch.equal(function(rows)[7], function(rows[7:8])[0])
    together = cpu_layers.layer_norm(rows, weight, weight, 1e-5)
    assert torch.equal(together[7:8], cpu_layers.layer_norm(rows[7:8], weight, weight, 1e-5))


def test_rows_are_added_and_multiplied_in_place() -> None:
    """Rows of a gate may be apart; no bit of a row depends on the number of rows."""
    out, x, both = torch.randn(5, 40), torch.randn(5, 40), 4 * torch.randn(5, 100)
    gate = both[:, 60:]
    product, alone, total = out.clone(), out[2:3].clone(), out.clone()
    cpu_layers.multiply_silu(product, gate)
    torch.testing.assert_close(product, out * F.silu(gate), rtol=2e-6, atol=1e-7)
    cpu_layers.multiply_silu(alone, gate[2:3])
    assert torch.equal(alone[0], product[2])
    product, alone = out.clone(), out[2:3].clone()
    cpu_layers.multiply_sigmoid(product, gate)
    torch.testing.assert_close(product, out * gate.sigmoid(), rtol=2e-6, atol=1e-7)
    cpu_layers.multiply_sigmoid(alone, gate[2:3])
    assert torch.equal(alone[0], product[2])
    cpu_layers.add(total, x)
    assert torch.equal(total, out + x)


@pytest.mark.parametrize("rows", ROWS)
def test_rows_without_gaps(rows: int) -> None:
    wide = torch.randn(rows, 70)
    for x in (wide[:, 3:40], wide[::2], wide.t(), torch.randn(70, 1).expand(70, rows)):
        assert contiguous(x).is_contiguous() and torch.equal(contiguous(x), x)
    assert contiguous(wide) is wide


@pytest.mark.parametrize("rows", ROWS)
def test_embeddings_are_rows_of_the_table(rows: int) -> None:
    embedding = CpuEmbedding(19, 70, torch.float32, torch.device("cpu"))
    embedding.table.normal_()
    index = torch.randint(0, 19, (rows, 2))[:, 1]
    assert torch.equal(embedding.rows(index), embedding.table[index])
