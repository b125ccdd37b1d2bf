"""Embeddings on the Triton kernels: the same numbers as transformers, in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from embedding_models import expected
from encoders import encoder_engine, make_encoder
from oracle import make_engine
from rerankers import DOCUMENTS, QUERY, classifier_scores, make_reranker

from paged_backend import LLM
from paged_backend.embeddings.vectors import make_embedding
from paged_backend.engine.engine import Engine
from paged_backend.platforms.gpu.device import GpuDevice
from paged_backend.platforms.gpu.model_runner import GpuModelRunner
from paged_backend.platforms.gpu.platform import GpuPlatform
from paged_backend.values.pooling_params import PoolingParams
from paged_backend.values.request import Request

PROMPTS = [[5], list(range(3, 40)), list(range(3, 25)), [9, 8], list(range(50, 81))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("smollm")


@pytest.fixture(scope="module")
def model(folder):
    return make_checkpoint("smollm", folder, num_hidden_layers=1, intermediate_size=40)


def engine_for(folder: Path, **options: object) -> Engine:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    values = {"task": "embed", "kv_cache_memory_bytes": 2**20, "device": device, **options}
    engine = make_engine(folder, max_num_seqs=4, **values)
    assert isinstance(engine.executor.model_runner, GpuModelRunner)
    return engine


def run(engine: Engine) -> dict[str, bytes | None]:
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(Request(str(index), prompt, pooling=PoolingParams()))
    pooled = {}
    while engine.has_unfinished:
        pooled |= {output.request_id: output.pooled for output in engine.step()}
    assert engine.stats().num_used_blocks == 0
    return pooled


@pytest.mark.parametrize(
    ("kind", "async_scheduling"), [("last", True), ("mean", False), ("mean", True), ("cls", True)]
)
def test_embeddings_of_a_decoder_equal_transformers(folder, model, kind, async_scheduling):
    pooled = [
        run(
            engine_for(
                folder,
                pooling_type=kind,
                max_num_batched_tokens=budget,
                async_scheduling=async_scheduling,
            )
        )
        for budget in (9, 64)
    ]
    for index, prompt in enumerate(PROMPTS):
        for found in pooled:
            content = found[str(index)]
            assert content is not None
            vector = make_embedding(content, PoolingParams(), normalize=True)
            wanted = expected(model, prompt, kind)
            torch.testing.assert_close(torch.from_numpy(vector), wanted, rtol=0, atol=1e-5)


def test_warming_up_leaves_no_pooled_sums(folder, model):
    engine = engine_for(folder, max_num_batched_tokens=16)
    runner = engine.executor.model_runner
    runner.warm_up()
    runner.capture(GpuDevice(torch.device("cuda")))
    runner.run_largest()
    assert runner.num_graphs == 0
    assert not runner._pooler._sums
    assert len(run(engine)) == len(PROMPTS)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_embeddings_of_an_encoder_equal_transformers(tmp_path, async_scheduling):
    model = make_encoder("roberta", tmp_path)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    engine = encoder_engine(
        tmp_path,
        device=device,
        pooling_type="mean",
        async_scheduling=async_scheduling,
        max_num_batched_tokens=96,
    )
    assert isinstance(engine.executor.platform, GpuPlatform)
    pooled = run(engine)
    for index, prompt in enumerate(PROMPTS):
        found = make_embedding(pooled[str(index)] or b"", PoolingParams(), normalize=True)
        torch.testing.assert_close(
            torch.from_numpy(found), expected(model, prompt, "mean"), rtol=0, atol=1e-5
        )


def test_scores_of_a_reranker_equal_transformers(tmp_path):
    model = make_reranker("smollm", tmp_path, num_hidden_layers=2, intermediate_size=40)
    wanted = torch.tensor(classifier_scores(model, tmp_path)).sigmoid().tolist()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    llm = LLM(str(tmp_path), dtype="float32", device=device, kv_cache_memory_bytes=2**20)
    assert isinstance(llm.engine.executor.model_runner, GpuModelRunner)
    scores = [output.outputs.score for output in llm.score(QUERY, DOCUMENTS)]
    assert scores == pytest.approx(wanted, abs=1e-5)
