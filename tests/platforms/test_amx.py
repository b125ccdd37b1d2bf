"""Linear layers in bf16 on AMX units."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from oracle import make_engine, mixed_work, run, tokens_of
from platforms.test_linear import make, needs_amx

from paged_backend.llm import LLM
from paged_backend.platforms.cpu.amx import has_amx
from paged_backend.platforms.cpu.platform import AmxPlatform
from paged_backend.platforms.select import select_platform
from paged_backend.platforms.torch.platform import TorchPlatform
from paged_backend.sampling_params import SamplingParams
from paged_backend.tools.demo import load_questions


@needs_amx
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(8, 16), (33, 40), (512, 1000), (1409, 257)])
@pytest.mark.parametrize("rows", [0, 1, 2, 16, 17, 33, 100])
def test_a_product_is_exact_but_for_its_float32_sums(
    rows: int, inputs: int, outputs: int, bias: bool
) -> None:
    linear, weight, offset = make(AmxPlatform(), inputs, outputs, bias=bias)
    x, residual = torch.randn(rows, inputs), torch.randn(rows, outputs)
    wanted = x.bfloat16().double() @ weight.t() + offset
    torch.testing.assert_close(linear(x).double(), wanted, atol=2e-4, rtol=1e-5)
    total = residual.clone()
    linear.add_to(total, x)
    torch.testing.assert_close(total.double(), residual.double() + wanted, atol=2e-4, rtol=1e-5)


@needs_amx
def test_tokens_depend_on_neither_batch_nor_chunks(tmp_path: Path) -> None:
    make_checkpoint("llama3", tmp_path)
    work = mixed_work(9)
    together = tokens_of(run(make_engine(tmp_path, dtype="bfloat16"), work))
    chunked = make_engine(tmp_path, dtype="bfloat16", max_num_batched_tokens=7, max_num_seqs=3)
    assert chunked.executor.info.dtype == "bfloat16"
    assert tokens_of(run(chunked, work)) == together


@needs_amx
def test_the_demo_model_answers_every_question_as_in_float32() -> None:
    questions = load_questions()
    prompts = [question.question for question in questions]
    params = SamplingParams(temperature=0, max_tokens=64)
    answers = LLM("demo", dtype="bfloat16").generate(prompts, params)
    assert [answer.outputs[0].text for answer in answers] == [
        f"\n{question.answer}" for question in questions
    ]


def test_amx_is_used_where_it_is_there() -> None:
    platform = select_platform("cpu", "bfloat16", torch.float32)
    assert type(platform) is (AmxPlatform if has_amx() else TorchPlatform)
    assert platform.linear_dtype == torch.bfloat16
