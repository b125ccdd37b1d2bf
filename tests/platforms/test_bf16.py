"""bf16 on the CPU: products with vector instructions and on AMX units, which may be emulated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from oracle import make_engine, mixed_work, run, tokens_of
from platforms.amx_emulation import amx_or_emulation
from platforms.test_cpu_low_rank import check_sums_of_a_gated_layer
from platforms.test_linear import ACTIVATIONS, make

from paged_backend.checkpoint.shape import Activation
from paged_backend.engine.llm import LLM
from paged_backend.platforms.base import Platform
from paged_backend.platforms.cpu.bf16_linear import BFloat16Linear
from paged_backend.platforms.cpu.platform import BFloat16Platform
from paged_backend.platforms.select import select_platform
from paged_backend.tools.demo import load_questions
from paged_backend.values.sampling_params import SamplingParams


@pytest.fixture(scope="module", params=[False, True], ids=["vectors", "amx"])
def platform(request: pytest.FixtureRequest) -> Iterator[Platform]:
    with amx_or_emulation() if request.param else nullcontext():
        yield BFloat16Platform(amx=request.param)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(8, 16), (33, 40), (512, 200), (1409, 257)])
@pytest.mark.parametrize("rows", [0, 1, 2, 16, 17, 33, 100])
def test_a_product_is_exact_but_for_its_float32_sums(
    platform: Platform, rows: int, inputs: int, outputs: int, bias: bool
) -> None:
    linear, weight, offset = make(platform, inputs, outputs, bias=bias)
    x, residual = torch.randn(rows, inputs), torch.randn(rows, outputs)
    wanted = x.bfloat16().double() @ weight.t() + offset
    torch.testing.assert_close(linear(x).double(), wanted, atol=2e-4, rtol=1e-5)
    total = residual.clone()
    linear.add_to(total, x)
    torch.testing.assert_close(total.double(), residual.double() + wanted, atol=2e-4, rtol=1e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize(("inputs", "inner"), [(8, 32), (33, 96), (512, 64), (64, 40)])
@pytest.mark.parametrize("rows", [0, 1, 16, 17, 33, 100])
def test_gate_and_up_are_computed_as_one(
    platform: Platform, rows: int, inputs: int, inner: int, activation: Activation, bias: bool
) -> None:
    linear, weight, offset = make(platform, inputs, 2 * inner, bias=bias, gated=True)
    down, down_weight, _ = make(platform, inner, 20)
    x = torch.randn(rows, inputs)
    gate_up = x.bfloat16().double() @ weight.t() + offset
    torch.testing.assert_close(linear(x).double(), gate_up, atol=2e-4, rtol=1e-5)
    total = torch.ones(rows, 2 * inner)
    linear.add_to(total, x)
    torch.testing.assert_close(total.double(), gate_up + 1, atol=2e-4, rtol=1e-5)
    gated = platform.layers.gated(linear, x, activation)
    gate, up = linear(x).chunk(2, dim=1)
    wanted = ACTIVATIONS[activation](gate) * up
    step = 2.0**-8 if gated.dtype == torch.bfloat16 else 1e-5
    assert ((gated.float() - wanted).abs() <= wanted.abs() * step + 1e-5).all()
    torch.testing.assert_close(
        down(gated).double(), gated.bfloat16().double() @ down_weight.t(), atol=2e-3, rtol=1e-5
    )


@pytest.mark.parametrize("bias", [False, True])
def test_a_gated_layer_begins_with_sums(bias: bool) -> None:
    with amx_or_emulation():
        check_sums_of_a_gated_layer(BFloat16Platform(amx=True), bias=bias)


@pytest.mark.parametrize("size", [40, 64])
@pytest.mark.parametrize("rows", [0, 1, 17, 100])
def test_a_norm_has_the_dtype_that_its_reader_reads(
    platform: Platform, rows: int, size: int
) -> None:
    linear, reader = make(platform, 24, size)[0], make(platform, size, 30)[0]
    x, hidden, weight = torch.randn(rows, 24), torch.randn(rows, size), torch.rand(size) + 0.5
    total = hidden.clone()
    plain = platform.layers.add_norm(total, linear, x, weight, 1e-6)
    read = platform.layers.add_norm(hidden, linear, x, weight, 1e-6, reader)
    assert torch.equal(hidden, total)
    is_read_in_bf16 = isinstance(reader, BFloat16Linear) and reader.reads_bfloat16
    assert torch.equal(read, plain.bfloat16() if is_read_in_bf16 else plain)
    assert torch.equal(reader(read), reader(plain))


def test_a_product_does_not_depend_on_the_other_rows(platform: Platform) -> None:
    linear, _, _ = make(platform, 70, 125)
    x = torch.randn(60, 70)
    one_by_one = torch.cat([linear(row) for row in x.split(1)])
    for rows in (2, 15, 16, 17, 33, 60):
        assert torch.equal(linear(x[:rows]), one_by_one[:rows])


@pytest.mark.parametrize("family", ["llama3", "qwen3-moe"])
def test_tokens_depend_on_neither_batch_nor_chunks(tmp_path: Path, family: str) -> None:
    make_checkpoint(family, tmp_path)
    work = mixed_work(9)
    together = tokens_of(run(make_engine(tmp_path, dtype="bfloat16"), work))
    chunked = make_engine(tmp_path, dtype="bfloat16", max_num_batched_tokens=7, max_num_seqs=3)
    assert chunked.executor.info.dtype == "bfloat16"
    assert tokens_of(run(chunked, work)) == together


def test_the_demo_model_answers_every_question_as_in_float32() -> None:
    questions = load_questions()
    prompts = [question.question for question in questions]
    params = SamplingParams(temperature=0, max_tokens=64)
    answers = LLM("demo", dtype="bfloat16").generate(prompts, params)
    assert [answer.outputs[0].text for answer in answers] == [
        f"\n{question.answer}" for question in questions
    ]


def test_cpus_compute_in_bf16_if_asked() -> None:
    platform = select_platform("cpu", "bfloat16", torch.float32)
    assert type(platform) is BFloat16Platform
    assert platform.linear_dtype == torch.bfloat16
