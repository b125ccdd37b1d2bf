"""float32 products of two bf16 parts, on AMX units or with their emulation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from encoders import confirm, embed, encoder_engine, make_encoder, make_prompts
from oracle import make_engine, mixed_work, run, tokens_of
from platforms.amx_emulation import amx_or_emulation
from platforms.test_linear import make

from paged_backend.engine.llm import LLM
from paged_backend.models.linear import LinearSpec
from paged_backend.platforms.cpu.amx import has_amx
from paged_backend.platforms.cpu.linear import CpuLinear
from paged_backend.platforms.cpu.platform import BFloat16Platform, CpuPlatform
from paged_backend.tools.demo import load_questions
from paged_backend.values.sampling_params import SamplingParams

# Error of a product: what rounding leaves of both factors, and the smaller parts.
ERROR = 3 * 2.0**-18
HIGH = {"float32_matmul_precision": "high"}
needs_amx = pytest.mark.skipif(not has_amx(), reason="needs a CPU with AMX")


@pytest.fixture(scope="module")
def platform() -> Iterator[CpuPlatform]:
    with amx_or_emulation():
        yield CpuPlatform(splits_float32=True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(8, 16), (33, 40), (512, 200), (1409, 257)])
@pytest.mark.parametrize("rows", [0, 1, 2, 16, 17, 33, 100])
def test_a_product_keeps_16_bits_of_its_factors(
    platform: CpuPlatform, rows: int, inputs: int, outputs: int, bias: bool
) -> None:
    linear, weight, offset = make(platform, inputs, outputs, bias=bias)
    x, residual = torch.randn(rows, inputs), torch.randn(rows, outputs)
    wanted = x.double() @ weight.t() + offset
    bound = x.double().abs() @ weight.t().abs() * ERROR + 1e-4
    assert ((linear(x).double() - wanted).abs() <= bound).all()
    total = residual.clone()
    linear.add_to(total, x)
    assert ((total.double() - residual.double() - wanted).abs() <= bound).all()


def test_a_product_is_far_more_precise_than_in_bfloat16(platform: CpuPlatform) -> None:
    """One part alone, or a third product that is left out, would fail."""
    x = torch.randn(33, 512)
    errors = []
    for layers in (platform, BFloat16Platform()):
        linear, weight, _ = make(layers, 512, 200)
        errors.append((linear(x).double() - x.double() @ weight.t()).abs().max())
    assert errors[0] < errors[1] / 100


def test_many_rows_are_computed_in_blocks(platform: CpuPlatform) -> None:
    linear, weight, _ = make(platform, 40, 70)
    x = torch.randn(1100, 40)
    together = linear(x)
    torch.testing.assert_close(together.double(), x.double() @ weight.t(), atol=1e-3, rtol=1e-4)
    for row in (0, 511, 512, 1023, 1024, 1099):
        assert torch.equal(linear(x[row : row + 1])[0], together[row])


def test_a_tied_embedding_keeps_16_bits(platform: CpuPlatform) -> None:
    linear, weight, _ = make(platform, 33, 40)
    index = torch.tensor([0, 39, 17, 17])
    found, wanted = linear.rows(index).double(), weight[index]
    assert ((found - wanted).abs() <= wanted.abs() * 2.0**-17).all()


def test_a_layer_in_full_precision_is_not_split(platform: CpuPlatform) -> None:
    spec = LinearSpec(32, {"router": 8}, full_precision=True)
    assert type(platform.linear(spec)) is CpuLinear


@needs_amx
def test_tokens_depend_on_neither_batch_nor_chunks(tmp_path: Path) -> None:
    make_checkpoint("llama3", tmp_path)
    work = mixed_work(9)
    together = tokens_of(run(make_engine(tmp_path, **HIGH), work))
    chunked = make_engine(tmp_path, max_num_batched_tokens=7, max_num_seqs=3, **HIGH)
    assert tokens_of(run(chunked, work)) == together


@needs_amx
def test_the_demo_model_answers_every_question() -> None:
    questions = load_questions()
    params = SamplingParams(temperature=0, max_tokens=64)
    answers = LLM("demo", **HIGH).generate([question.question for question in questions], params)
    assert [answer.outputs[0].text for answer in answers] == [
        f"\n{question.answer}" for question in questions
    ]


@needs_amx
@pytest.mark.parametrize("family", ["bert", "roberta", "modernbert"])
def test_embeddings_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Within 1e-5, as in float32."""
    model = make_encoder(family, tmp_path)
    engine = encoder_engine(tmp_path, pooling_type="mean", **HIGH)
    prompts = make_prompts(12)
    confirm(model, prompts, embed(engine, prompts), "mean")
