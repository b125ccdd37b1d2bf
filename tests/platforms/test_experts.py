"""Experts and the choice of experts on the CPU platforms, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numba
import numpy as np
import pytest
import torch
from paged_kernels.reference import choose_experts as reference
from platforms.amx_emulation import amx_or_emulation
from torch import Tensor

from paged_backend.checkpoint.moe import (
    GEGLU_TANH,
    ExpertGroups,
    ExpertLayout,
    ExpertNames,
    Routing,
    Scoring,
    SwiGLU,
)
from paged_backend.models.experts import ExpertsMethod, ExpertsSpec
from paged_backend.models.linear import LinearProduct
from paged_backend.platforms.base import Platform
from paged_backend.platforms.cpu import layers as cpu_layers
from paged_backend.platforms.cpu.arena import Arena
from paged_backend.platforms.cpu.bf16_kernels import MANY_ROWS
from paged_backend.platforms.cpu.graphs import capture
from paged_backend.platforms.cpu.platform import BFloat16Platform, CpuPlatform
from paged_backend.platforms.cpu.scored_experts import weigh_all
from paged_backend.platforms.cpu.torch_platform import TorchPlatform
from paged_backend.platforms.portable import layers as torch_layers
from paged_backend.platforms.portable.experts import swiglu
from paged_backend.quantization.forms import WeightForm
from paged_backend.quantization.weight import QuantizedWeight

CPU, TORCH = CpuPlatform(), TorchPlatform(torch.float32)
GPT_OSS = SwiGLU(alpha=1.702, limit=7.0, up_offset=1.0)


@pytest.fixture(scope="module", params=["cpu", "torch", "bf16", "amx"])
def platform(request: pytest.FixtureRequest) -> Iterator[Platform]:
    with amx_or_emulation() if request.param == "amx" else nullcontext():
        match request.param:
            case "cpu":
                yield CPU
            case "torch":
                yield TORCH
            case name:
                yield BFloat16Platform(amx=name == "amx")


def make(platform: Platform, spec: ExpertsSpec) -> tuple[ExpertsMethod, dict[str, Tensor]]:
    """Packed experts with random weights, and these weights by their names in float64."""
    torch.manual_seed(0)
    experts = platform.experts(spec)
    weights = {}
    for name, place in experts.parameters().items():
        assert isinstance(place, Tensor)
        place.normal_(0, 1.0 if "bias" in name else spec.hidden_size**-0.5)
        weights[name] = place.double()
    experts.pack()
    return experts, weights


def choose(rows: int, spec: ExpertsSpec, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random rows, with random experts and weights."""
    ids = torch.rand(rows, spec.num_experts).argsort(dim=1)[:, :top_k]
    return torch.randn(rows, spec.hidden_size), ids.int(), torch.rand(rows, top_k)


def expected(
    spec: ExpertsSpec, weights: dict[str, Tensor], x: Tensor, ids: Tensor, factors: Tensor
) -> Tensor:
    """The result in float64, for experts that are separate tensors."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    limit = spec.activation.limit or float("inf")

    def linear(name: str, x: Tensor) -> Tensor:
        bias = weights[f"{name}.bias"] if spec.bias else 0.0
        return weights[f"{name}.weight"] @ x + bias

    for row, experts in enumerate(ids.tolist()):
        for expert, factor in zip(experts, factors[row].double(), strict=True):
            up = linear(f"{expert}.up_proj", x[row].double())
            if spec.plain:
                inner = up.relu().square()
            else:
                gate = linear(f"{expert}.gate_proj", x[row].double()).clamp(max=limit)
                up = up.clamp(-limit, limit)
                inner = spec.activation.alpha * gate + spec.activation.cubic * gate**3
                sigmoid = torch.sigmoid(inner)
                inner = (up + spec.activation.up_offset) * gate * sigmoid
            out[row] += factor * linear(f"{expert}.down_proj", inner)
    return out


def assert_close(platform: Platform, out: Tensor, wanted: Tensor) -> None:
    """Compare within the error of float32, or of inputs that are rounded to bf16 twice."""
    error = 2e-2 if isinstance(platform, BFloat16Platform) else 2e-6
    scale = wanted.abs().amax(1, keepdim=True) + 1.0
    assert bool(((out.double() - wanted).abs() <= error * scale).all())


# (experts, top_k, hidden, intermediate): sizes of whole panels, and others; all experts.
SIZES = [(8, 2, 64, 32), (5, 3, 33, 21), (3, 3, 130, 50), (4, 1, 17, 70)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("rows", [0, 1, 3, 40])
@pytest.mark.parametrize("plain", [False, True])
def test_equals_float64(platform: Platform, plain: bool, rows: int, sizes: tuple[int, ...]) -> None:
    num_experts, top_k, hidden, inner = sizes
    with_bias = hidden % 2 == 1
    activation = GPT_OSS if with_bias else SwiGLU()
    spec = ExpertsSpec(num_experts, hidden, inner, activation, with_bias, plain=plain)
    experts, weights = make(platform, spec)
    call = choose(rows, spec, top_k)
    out = experts(*call)
    assert out.shape == (rows, hidden)
    assert_close(platform, out, expected(spec, weights, *call))


def test_all_rows_choose_one_expert(platform: Platform) -> None:
    spec = ExpertsSpec(3, 40, 24)
    experts, weights = make(platform, spec)
    x, ids, factors = choose(110, spec, 1)  # more than a block of rows
    ids.fill_(2)
    assert_close(platform, experts(x, ids, factors), expected(spec, weights, x, ids, factors))


def test_the_limit_is_applied(platform: Platform) -> None:
    spec = ExpertsSpec(3, 40, 24, SwiGLU(1.702, 0.5, 1.0))
    experts, weights = make(platform, spec)
    call = choose(5, spec, 2)
    assert_close(platform, experts(*call), expected(spec, weights, *call))
    unlimited = ExpertsSpec(3, 40, 24, SwiGLU(1.702, None, 1.0))
    with pytest.raises(AssertionError):
        assert_close(platform, experts(*call), expected(unlimited, weights, *call))


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_row_alone_is_the_row_in_a_batch(platform: Platform, bias: bool, plain: bool) -> None:
    spec = ExpertsSpec(4, 70, 45, GPT_OSS if bias else SwiGLU(), bias, plain=plain)
    experts, _ = make(platform, spec)
    x, ids, factors = choose(64, spec, 2)
    assert int(ids.flatten().bincount().min()) >= MANY_ROWS
    together = experts(x, ids, factors)
    for first, last in [(row, row + 1) for row in range(64)] + [(3, 10), (20, 53)]:
        part = slice(first, last)
        assert torch.equal(experts(x[part], ids[part], factors[part]), together[part])


def test_a_row_that_is_not_a_number_leaves_the_others_as_they_are(platform: Platform) -> None:
    """Tiles hold rows of the next expert, too."""
    spec = ExpertsSpec(4, 64, 32)
    experts, _ = make(platform, spec)
    x, ids, factors = choose(21, spec, 2)
    before = experts(x, ids, factors)
    x[::5] = float("nan")
    after = experts(x, ids, factors)
    others = torch.arange(len(x)) % 5 != 0
    assert torch.equal(after[others], before[others])
    assert not after[::5].isfinite().any()


def test_experts_of_other_ranks_count_as_zeros(platform: Platform) -> None:
    """Their rows come after those of the last expert, in the same tile."""
    spec = ExpertsSpec(3, 40, 24, first=0)
    experts, _ = make(platform, spec)
    x, ids, factors = choose(9, spec, 2)
    present, weights = ids.clone(), factors.clone()
    ids[::2, 1], weights[::2, 1] = 3, 0.0
    assert torch.equal(experts(x, ids, factors), experts(x, present, weights))


@pytest.mark.parametrize("plain", [False, True])
def test_products_on_amx_differ_from_those_on_vectors_by_the_order_of_sums(plain: bool) -> None:
    """Rows that were not rounded to bf16 between the products would differ by more."""
    spec = ExpertsSpec(4, 70, 45, GPT_OSS, bias=True, plain=plain)
    call = choose(50, spec, 2)
    outs = []
    with amx_or_emulation():
        for amx in (False, True):
            experts, _ = make(BFloat16Platform(amx=amx), spec)
            outs.append(experts(*call))
    torch.testing.assert_close(*outs, rtol=0, atol=3e-4)


@pytest.mark.parametrize("platform", ["cpu", "bf16", "amx"], indirect=True)
@torch.inference_mode()
def test_a_graph_computes_other_experts_and_other_numbers_of_rows(platform: Platform) -> None:
    spec = ExpertsSpec(5, 64, 32)
    experts, _ = make(platform, spec)
    x, ids, factors = choose(40, spec, 2)
    _, graph = capture(lambda: experts(x, ids, factors), Arena(2**20))
    assert graph is not None
    for alike in (0, 3, 35):
        for place, value in zip((x, ids, factors), choose(40, spec, 2), strict=True):
            place.copy_(value)
        ids[:alike] = torch.tensor([4, 1], dtype=torch.int32)
        assert torch.equal(graph.replay(), experts(x, ids, factors))


def test_fused_tensors_are_those_of_gpt_oss(platform: Platform) -> None:
    """Gate and up are in turns, and inputs come before outputs."""
    separate = ExpertsSpec(3, 24, 20, GPT_OSS, bias=True)
    fused = ExpertsSpec(3, 24, 20, GPT_OSS, bias=True, names=ExpertNames(layout=ExpertLayout.TURNS))
    experts, weights = make(platform, fused)
    names: dict[str, Tensor] = {}
    for expert in range(3):
        for suffix, kind in (("", "weight"), ("_bias", "bias")):
            gate_up = weights[f"gate_up_proj{suffix}"][expert]
            names[f"{expert}.gate_proj.{kind}"] = gate_up[..., ::2].t()
            names[f"{expert}.up_proj.{kind}"] = gate_up[..., 1::2].t()
            names[f"{expert}.down_proj.{kind}"] = weights[f"down_proj{suffix}"][expert].t()
    call = choose(6, fused, 2)
    assert_close(platform, experts(*call), expected(separate, names, *call))


def test_fused_tensors_are_those_of_granite(platform: Platform) -> None:
    """Gate is before up, and outputs come before inputs."""
    spec = ExpertsSpec(3, 24, 20)
    fused = replace(spec, names=ExpertNames(layout=ExpertLayout.HALVES))
    experts, weights = make(platform, fused)
    names: dict[str, Tensor] = {}
    for expert in range(3):
        names[f"{expert}.gate_proj.weight"] = weights["gate_up_proj"][expert, :20]
        names[f"{expert}.up_proj.weight"] = weights["gate_up_proj"][expert, 20:]
        names[f"{expert}.down_proj.weight"] = weights["down_proj"][expert]
    call = choose(6, spec, 2)
    assert_close(platform, experts(*call), expected(spec, names, *call))


def test_fused_tensors_are_those_of_llama4(platform: Platform) -> None:
    """Gate is before up, and inputs come before outputs."""
    spec = ExpertsSpec(3, 24, 20)
    fused = replace(spec, names=ExpertNames(layout=ExpertLayout.COLUMNS))
    experts, weights = make(platform, fused)
    names: dict[str, Tensor] = {}
    for expert in range(3):
        names[f"{expert}.gate_proj.weight"] = weights["gate_up_proj"][expert, :, :20].t()
        names[f"{expert}.up_proj.weight"] = weights["gate_up_proj"][expert, :, 20:].t()
        names[f"{expert}.down_proj.weight"] = weights["down_proj"][expert].t()
    call = choose(6, spec, 2)
    assert_close(platform, experts(*call), expected(spec, names, *call))


def test_the_cube_makes_gelu_of_the_activation(platform: Platform) -> None:
    spec = ExpertsSpec(3, 40, 24, GEGLU_TANH)
    experts, weights = make(platform, spec)
    x, *choice = choose(6, spec, 2)
    call = 20 * x, *choice  # where GELU is far from its linear part
    assert_close(platform, experts(*call), expected(spec, weights, *call))
    gate, up = torch.linspace(-6, 6, 200), torch.ones(200)
    wanted = torch.nn.functional.gelu(gate.double(), approximate="tanh")
    torch.testing.assert_close(swiglu(gate, up, GEGLU_TANH).double(), wanted, atol=1e-6, rtol=1e-5)
    linear = ExpertsSpec(3, 40, 24, replace(GEGLU_TANH, cubic=-1.0))
    with pytest.raises(AssertionError):
        assert_close(platform, experts(*call), expected(linear, weights, *call))


def test_packing_frees_the_plain_weights() -> None:
    experts, _ = make(CPU, ExpertsSpec(2, 20, 12))
    assert not hasattr(experts, "_gate_up") and not hasattr(experts, "_down")


def test_other_dtypes() -> None:
    experts, _ = make(TorchPlatform(torch.float16), spec := ExpertsSpec(2, 20, 12))
    x, ids, factors = choose(3, spec, 1)
    assert experts(x.half(), ids, factors).dtype == torch.float16


def int8_product(platform: TorchPlatform, outputs: int, inputs: int) -> LinearProduct:
    """A product with random int8 weights and a bias."""
    values = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
    scales = torch.empty(outputs, 1).uniform_(0.001, 0.003)
    weight = QuantizedWeight(values, scales, (1, inputs))
    return platform.quantized_linear(WeightForm.W8A8_INT8, weight, torch.rand(outputs) / 100)


@pytest.mark.parametrize("plain", [False, True])
def test_int8_experts_of_both_platforms_are_equal(plain: bool) -> None:
    spec = ExpertsSpec(3, 70, 40, GPT_OSS, bias=True, plain=plain)
    x, ids, factors = choose(40, spec, 2)
    outs = []
    for platform in (CPU, TORCH):
        torch.manual_seed(1)
        pairs = [
            (int8_product(platform, 40 if plain else 80, 70), int8_product(platform, 70, 40))
            for _ in range(spec.num_experts)
        ]
        experts = platform.product_experts(spec, pairs)
        out = experts(x, ids, factors)
        for row in range(40):
            part = slice(row, row + 1)
            assert torch.equal(experts(x[part], ids[part], factors[part]), out[part])
        outs.append(out)
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-5)


FUNCTIONS = pytest.mark.parametrize("functions", [cpu_layers, torch_layers], ids=["cpu", "torch"])


def weights_of(logits: Tensor, ids: Tensor, routing: Routing) -> Tensor:
    """The weights of chosen experts in float64."""
    logits = logits.double()
    chosen = logits.gather(1, ids.long())
    weights = {
        Scoring.SOFTMAX: logits.softmax(1).gather(1, ids.long()),
        Scoring.SIGMOID: chosen.sigmoid(),
        Scoring.SOFTMAX_OF_TOP: chosen.softmax(1),
    }[routing.scoring]
    return weights / weights.sum(1, keepdim=True) if routing.norm_topk_prob else weights


@pytest.mark.sampled(2)
@FUNCTIONS
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("scoring", Scoring)
@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (8, 2), (60, 4), (7, 7)])
def test_choice(
    functions: Any, num_experts: int, top_k: int, scoring: Scoring, normalize: bool
) -> None:
    torch.manual_seed(0)
    logits = 3 * torch.randn(64, num_experts)
    routing = Routing(top_k, scoring, normalize)
    ids, weights = functions.choose_experts(logits, routing)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    assert torch.equal(ids.long(), logits.topk(top_k).indices)
    wanted = weights_of(logits, ids, routing)
    torch.testing.assert_close(weights.double(), wanted, rtol=2e-6, atol=1e-9)
    for row in range(64):
        alone = functions.choose_experts(logits[row : row + 1], routing)
        assert torch.equal(alone[0][0], ids[row]) and torch.equal(alone[1][0], weights[row])


@pytest.mark.sampled(2)
@FUNCTIONS
@pytest.mark.parametrize("scoring", [Scoring.SOFTMAX, Scoring.SIGMOID])
@pytest.mark.parametrize("groups", [None, ExpertGroups(5, 3, 2), ExpertGroups(8, 2, 1)])
@pytest.mark.parametrize("biased", [False, True])
def test_choice_within_groups(
    functions: Any, biased: bool, groups: ExpertGroups | None, scoring: Scoring
) -> None:
    torch.manual_seed(0)
    logits, bias = 3 * torch.randn(64, 40), 0.3 * torch.randn(40) if biased else None
    routing = Routing(6, scoring, True, 2.5, biased, groups)
    ids, weights = functions.choose_experts(logits, routing, bias)
    numbers = None if groups is None else (groups.count, groups.chosen, groups.num_scored)
    options: dict[str, Any] = {"scoring": scoring.value, "normalize": True, "scale": 2.5}
    wanted_ids, wanted = reference.choose_experts(logits, 6, **options, bias=bias, groups=numbers)
    assert torch.equal(ids.long(), wanted_ids)
    torch.testing.assert_close(weights.double(), wanted, rtol=2e-6, atol=1e-9)
    for row in range(64):
        alone = functions.choose_experts(logits[row : row + 1], routing, bias)
        assert torch.equal(alone[0][0], ids[row]) and torch.equal(alone[1][0], weights[row])
    none, _ = functions.choose_experts(logits[:0], routing, bias)
    assert none.shape == (0, 6)


@FUNCTIONS
def test_of_equal_logits_the_lowest_id_comes_first(functions: Any) -> None:
    logits = torch.zeros(3, 40)
    logits[1, 5:] = 2.0
    logits[2, [3, 9]] = 1.0
    ids, _ = functions.choose_experts(logits, Routing(3))
    assert ids.tolist() == [[0, 1, 2], [5, 6, 7], [3, 9, 0]]


@numba.njit  # type: ignore[untyped-decorator]  # numba has no types
def _weigh_at(numbers: Any, place: int, count: int) -> None:
    weigh_all(numbers[:count], numbers[place : place + count], 0)


def test_weights_do_not_depend_on_where_they_are_in_memory() -> None:
    """The compiler makes another version of a loop for arrays that are close together."""
    logits = torch.randn(40, 40, generator=torch.Generator().manual_seed(0)).numpy()
    for row in logits:
        found = set()
        for place in range(40, 240):
            numbers = np.concatenate((row, np.zeros(240, np.float32)))
            _weigh_at(numbers, place, 40)
            found.add(numbers[place : place + 40].tobytes())
        assert len(found) == 1
