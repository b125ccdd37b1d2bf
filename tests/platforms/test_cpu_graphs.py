"""Graphs of a CPU: a replay computes what the Python code would compute."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numba
import pytest
import torch
from checkpoints import FAMILIES, make_checkpoint
from effort import ALL
from oracle import VOCAB_SIZE, make_engine, mixed_work, run, tokens_of
from torch import Tensor

from paged_backend.engine.engine import Engine
from paged_backend.platforms.cpu import graph_runner
from paged_backend.platforms.cpu.arena import Arena, ArenaFull
from paged_backend.platforms.cpu.graphs import Graph, capture
from paged_backend.platforms.cpu.threads import JobList, ParallelKernel, claim, floats
from paged_backend.values.outputs import SequenceOutput
from paged_backend.values.request import Request
from paged_backend.values.sampling_params import SamplingParams

ROWS, SIZE = 6, 33


def _double_rows(arguments: Any) -> None:
    _, x_at, out_at, rows, size = numba.carray(arguments, 5)
    x, out = floats(x_at, (rows, size)), floats(out_at, (rows, size))
    row = claim(arguments)
    while row < rows:
        for i in range(size):
            out[row, i] = x[row, i] + x[row, i]
        row = claim(arguments)


def double(x: Tensor) -> Tensor:
    """Twice the contiguous `x`, by a kernel."""
    out = torch.empty_like(x)
    ParallelKernel(_double_rows)(x.data_ptr(), out.data_ptr(), *x.shape)
    return out


def by_kernels(x: Tensor, index: Tensor) -> Tensor:
    return double(double(double(x)))


def by_views(x: Tensor, index: Tensor) -> Tensor:
    parts = double(x).view(-1, 3).split(2)
    return double(torch.cat([part.flatten() for part in parts]).view(x.shape).t().contiguous())


def in_place(x: Tensor, index: Tensor) -> Tensor:
    out = double(x)
    out[1:3] += x[:2]
    return out.mul_(0.5).add_(out.sum())


def by_lookups(x: Tensor, index: Tensor) -> Tensor:
    rows = x[index] + torch.nn.functional.embedding(index, x)
    return double(rows) * torch.full((1, SIZE), 3.0).to(torch.float64)


@pytest.mark.parametrize("function", [by_kernels, by_views, in_place, by_lookups])
@torch.inference_mode()
def test_a_replay_computes_from_the_present_inputs(function: Callable[..., Tensor]) -> None:
    x, index = torch.randn(ROWS, SIZE), torch.randint(ROWS, (4,))
    result, graph = capture(lambda: function(x, index), Arena(2**16))
    assert graph is not None
    assert torch.equal(result, function(x, index))
    for _ in range(3):
        x.normal_()
        index.random_(ROWS)
        assert torch.equal(graph.replay(), function(x, index))


@torch.inference_mode()
def test_the_memory_of_a_tensor_that_is_gone_is_used_again() -> None:
    x = torch.randn(ROWS, SIZE)

    def function() -> Tensor:
        out = double(x)
        for _ in range(50):
            out = double(out.view(SIZE, ROWS)).view(ROWS, SIZE)
        return out

    _, graph = capture(function, Arena(2 * ROWS * SIZE * 4 + 64))
    assert graph is not None
    x.normal_()
    assert torch.equal(graph.replay(), function())


@torch.inference_mode()
def test_graphs_of_an_arena_take_turns() -> None:
    arena, x = Arena(2**16), torch.randn(ROWS, SIZE)
    captured = [
        (function, capture(lambda function=function: function(x, None), arena)[1])
        for function in (by_kernels, by_views, in_place)
    ]
    for _ in range(3):
        for function, graph in captured:
            assert graph is not None
            x.normal_()
            assert torch.equal(graph.replay(), function(x, None))


@torch.inference_mode()
def test_graphs_of_an_arena_have_the_same_memory() -> None:
    arena, x = Arena(2**12), torch.randn(ROWS, SIZE)
    graphs = [capture(lambda: by_kernels(x, x), arena)[1] for _ in range(8)]
    assert None not in graphs


@torch.inference_mode()
def test_a_tensor_keeps_its_strides() -> None:
    x = torch.randn(ROWS, SIZE)
    result, _ = capture(lambda: torch.empty_like(x.t()).fill_(1), Arena(2**12))
    assert result.stride() == x.t().stride()


def test_a_capture_does_not_import_the_compiler_of_torch() -> None:
    code = (
        "import sys, torch; from paged_backend.platforms.cpu.arena import Arena; "
        "from paged_backend.platforms.cpu.graphs import Graph, capture; "
        "_, graph = capture(lambda: torch.empty(3).add_(1), Arena(4096)); graph.replay(); "
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def by_value(x: Tensor) -> Tensor:
    return double(x) if x.sum().item() > 0 else x.clone()


def by_mask(x: Tensor) -> Tensor:
    return double(x[x[:, 0] > 0])


def by_number(x: Tensor) -> Tensor:
    return x[: int(x.argmax())]


def by_rows(x: Tensor) -> Tensor:
    rows, _ = (x > 0).nonzero(as_tuple=True)
    return x.index_select(0, rows)


@pytest.mark.parametrize("function", [by_value, by_mask, by_number, by_rows])
@torch.inference_mode()
def test_code_that_depends_on_values_has_no_graph(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(ROWS, SIZE)
    result, graph = capture(lambda: function(x), Arena(2**16))
    assert graph is None
    assert torch.equal(result, function(x))


@torch.inference_mode()
def test_what_does_not_fit_in_the_arena_has_no_graph() -> None:
    x = torch.randn(ROWS, SIZE)
    result, graph = capture(lambda: by_kernels(x, x), Arena(2 * ROWS * SIZE * 4))
    assert graph is None
    assert torch.equal(result, x * 8)


def test_parts_of_an_arena_do_not_overlap() -> None:
    arena, rng = Arena(2**14), random.Random(0)
    held: list[tuple[int, Tensor]] = []
    for number in range(2000):
        try:
            tensor = arena.empty((rng.randint(1, 300),), torch.float32).fill_(number)
        except ArenaFull:
            held.pop(rng.randrange(len(held)))
            continue
        assert tensor.data_ptr() % 64 == 0
        held.append((number, tensor))
        if rng.random() < 0.4:
            held.pop(rng.randrange(len(held)))
        assert all(bool((kept == value).all()) for value, kept in held)
    del held[:], tensor
    assert arena.empty((2**14,), torch.uint8).numel() == 2**14


def test_a_tensor_may_take_the_whole_gap_between_others() -> None:
    arena = Arena(3 * 64)
    parts = [arena.empty((16,), torch.float32) for _ in range(3)]
    place = parts.pop(1).data_ptr()
    assert arena.empty((16,), torch.float32).data_ptr() == place


def test_the_end_of_a_tensor_from_before_a_restart_takes_no_memory_away() -> None:
    arena = Arena(2**10)
    before = arena.empty((8,), torch.float32)
    arena.restart()
    first = arena.empty((8,), torch.float32).fill_(1)
    assert first.data_ptr() == before.data_ptr()
    del before
    arena.empty((8,), torch.float32).fill_(2)
    assert bool((first == 1).all())


def test_an_empty_tensor_takes_no_place_of_another_one() -> None:
    arena = Arena(2**10)
    empty = arena.empty((0, 7), torch.float32)
    first = arena.empty((8,), torch.float32).fill_(1)
    del empty
    arena.empty((8,), torch.float32).fill_(2)
    assert bool((first == 1).all())


# --- engines -------------------------------------------------------------------------------------


def answers(engine: Engine) -> dict[str, list[SequenceOutput]]:
    """All outputs of requests that come and go, some of which sample or have log-probabilities."""
    rng = random.Random(3)
    waiting = [
        Request(
            str(index),
            prompt,
            SamplingParams(
                temperature=(0.0, 0.8)[index % 2],
                seed=index,
                max_tokens=max_tokens,
                logprobs=(None, None, 3)[index % 3],
                n=1 + index % 4 // 3,
            ),
        )
        for index, (prompt, max_tokens) in enumerate(mixed_work(20 if ALL else 10))
    ]
    outputs: dict[str, list[SequenceOutput]] = {}
    while waiting or engine.has_unfinished:
        if waiting and rng.random() < 0.5:
            engine.add_request(waiting.pop())
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(replace(output, times=None))
    return outputs


def num_graphs(engine: Engine) -> int:
    runner: Any = engine.executor.model_runner
    return int(runner.num_graphs)


# These use all operations of the others.
PARTS = (
    *("llama2", "gemma3", "gpt-oss", "qwen2-moe", "deepseek-v2", "minicpm3", "qwen3-next", "lfm2"),
    *("falcon-h1", "nemotron-h", "jamba-dense", "olmo-hybrid", "recurrent-gemma", "phi4-mini"),
    *("olmo2", "smollm3"),
)


@pytest.mark.parametrize(
    "family",
    [pytest.param(n, marks=() if n in PARTS else pytest.mark.thorough) for n in FAMILIES],
)
def test_answers_do_not_depend_on_graphs(family: str, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path)
    engines = [make_engine(tmp_path, enforce_eager=eager) for eager in (True, False)]
    eager, with_graphs = (answers(engine) for engine in engines)
    assert with_graphs == eager
    assert num_graphs(engines[0]) == 0
    assert num_graphs(engines[1]) > 0


@pytest.mark.parametrize("family", ["llama3", "qwen3-next"])
def test_steps_of_decodes_run_kernels_only(family: str, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path)
    engine = make_engine(tmp_path)
    engine.add_request(Request("one", [5, 6, 7], SamplingParams(max_tokens=8)))
    parts: list[Any] = []

    def replay(graph: Any) -> Tensor:
        parts.extend(graph._parts)
        return original(graph)

    original = Graph.replay
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Graph, "replay", replay)
        while engine.has_unfinished:
            engine.step()
    assert parts and all(isinstance(part, JobList) for part in parts)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16"},
        {"quantization": "int8"},
        {"kv_cache_dtype": "int8_per_token_head"},
        {"enable_prefix_caching": False, "max_num_seqs": 3},
    ],
)
def test_answers_do_not_depend_on_graphs_in_any_format(
    options: dict[str, Any], tmp_path: Path
) -> None:
    make_checkpoint("llama3", tmp_path)
    engines = [make_engine(tmp_path, enforce_eager=eager, **options) for eager in (True, False)]
    eager, with_graphs = (answers(engine) for engine in engines)
    assert with_graphs == eager
    assert num_graphs(engines[1]) > 1


@pytest.mark.parametrize("family", ["llama3", "qwen3-window", "gemma2", "gemma3"])
def test_steps_of_long_prompts_have_graphs(family: str, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path)
    rng = random.Random(5)
    work = [
        ([rng.randrange(3, VOCAB_SIZE) for _ in range(100 * (1 + index % 4))], 1 + index % 7)
        for index in range(24)
    ]
    found = []
    for eager in (True, False):
        engine = make_engine(
            tmp_path, enforce_eager=eager, max_num_batched_tokens=100, max_num_seqs=5
        )
        found.append(tokens_of(run(engine, work)))
    assert found[0] == found[1]
    runner: Any = engine.executor.model_runner
    prompts = [
        shape
        for shape, graph in runner._graphs._by_shape.items()
        if graph is not None and not shape.is_by_tokens
    ]
    assert len(prompts) > 3
    assert 0 in {shape.num_logits for shape in prompts}  # a part of a prompt
    assert max(shape.num_seqs for shape in prompts) > 2


def test_steps_that_are_too_large_for_the_arena_run_without_a_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint("llama3", tmp_path)
    work = [([3 + index] * 90, 6) for index in range(5)]
    expected = tokens_of(run(make_engine(tmp_path, enforce_eager=True), work))
    monkeypatch.setattr(graph_runner, "_ARENA_BYTES", 2**14)
    captured = []

    def recorded(function: Callable[[], Tensor], arena: Arena) -> tuple[Tensor, Graph | None]:
        result, graph = capture(function, arena)
        captured.append(graph)
        return result, graph

    monkeypatch.setattr(graph_runner, "capture", recorded)
    engine = make_engine(tmp_path, enable_prefix_caching=False)
    for request, tokens in zip(work, expected, strict=True):
        assert tokens_of(run(engine, [request])) == [tokens]
    assert [graph is None for graph in captured] == [False, True]  # it is tried once
    runner: Any = engine.executor.model_runner
    assert runner._graphs._too_many_tokens == 90
    assert num_graphs(engine) == 1  # graph of a step of one token


def test_only_graphs_that_were_used_last_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_runner, "_MAX_SHAPES", 2)
    make_checkpoint("llama3", tmp_path)
    engine = make_engine(tmp_path, enable_prefix_caching=False)
    work = [([3 + index] * (70 + index % 3), 4) for index in range(12)]
    expected = tokens_of(run(make_engine(tmp_path, enforce_eager=True), work))
    for index, request in enumerate(work):
        assert tokens_of(run(engine, [request])) == [expected[index]]
        assert num_graphs(engine) <= 2


def test_the_shape_that_was_used_least_recently_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(graph_runner, "_MAX_SHAPES", 2)
    monkeypatch.setattr(graph_runner, "_ARENA_BYTES", 2**10)
    graphs = graph_runner._Graphs()
    a, b, c = (graph_runner._GraphShape(size, size, size) for size in (1, 2, 3))
    assert [graphs.may_run(shape) for shape in (a, b, a, c)] == [False, False, True, False]
    assert [graphs.may_run(shape) for shape in (a, c, b)] == [True, True, False]


@pytest.mark.parametrize("prompt_len", [20, 100], ids=["few tokens", "many tokens"])
def test_a_size_is_captured_when_it_comes_again(prompt_len: int, tmp_path: Path) -> None:
    make_checkpoint("llama3", tmp_path)
    engine = make_engine(tmp_path)
    found = []
    tokens = random.Random(0)  # an answer to another prompt could end with its first token
    for length in (2, 3, 4):  # a token of the prompt's step, then decodes
        prompt = [tokens.randrange(3, VOCAB_SIZE) for _ in range(prompt_len)]
        tokens_of(run(engine, [(prompt, length)]))
        found.append(num_graphs(engine))
    assert found == [0, 2, 2]


def shapes(engine: Engine) -> list[tuple[int, int, int]]:
    """The numbers of tokens, sequences and logits of the shapes of all steps so far."""
    runner: Any = engine.executor.model_runner
    return [shape[:3] for shape in runner._graphs._by_shape]


@pytest.mark.parametrize("family", ["llama3", "qwen3-next"])
def test_a_graph_computes_few_logits_that_nobody_reads(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(family, tmp_path)
    monkeypatch.setattr(graph_runner, "_MAX_UNREAD_LOGITS", 8 * VOCAB_SIZE)
    engine = make_engine(tmp_path)
    for prompt_len in (9, 10):  # the last token's logits are read
        run(engine, [(list(range(3, 3 + prompt_len)), 1)])
    assert shapes(engine) == [(9, 9, 9), (10, 1, 1)]


def test_a_step_of_which_nobody_reads_logits_computes_none(tmp_path: Path) -> None:
    make_checkpoint("llama3", tmp_path)
    engine = make_engine(tmp_path, max_num_batched_tokens=8, max_num_seqs=8)
    run(engine, [(list(range(3, 15)), 1)])
    assert shapes(engine) == [(8, 1, 0), (4, 4, 4)]


@pytest.mark.parametrize("prompt_len", [4, 5, 9])
def test_several_completions_begin_after_one_row(prompt_len: int, tmp_path: Path) -> None:
    """There may be as many samples as rows, and yet they belong to one row."""
    make_checkpoint("llama3", tmp_path)
    found = []
    for eager in (True, False):
        engine = make_engine(tmp_path, enforce_eager=eager, enable_prefix_caching=False)
        tokens: list[tuple[str, int, list[int]]] = []
        for number in range(3):  # the second and the third prompt have a graph
            params = SamplingParams(temperature=1.0, seed=number, max_tokens=2, n=5)
            engine.add_request(Request(str(number), [7 + number] * prompt_len, params))
            while engine.has_unfinished:
                tokens += [(out.request_id, out.index, out.new_token_ids) for out in engine.step()]
        found.append(tokens)
    assert found[0] == found[1]
