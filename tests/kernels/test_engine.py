"""The engine on the Triton kernels: the same tokens as transformers, in float32.

Everything that a device runs runs here, interpreted, but for CUDA's graphs and streams:
asynchronous scheduling, tokens that never pass through the host, sampling by kernels.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from masking import MaskingExecutor
from oracle import Oracle, Work, make_engine, mixed_work, run, tokens_of
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from paged_backend.core.scheduled_batch import ScheduledBatch
from paged_backend.engine.engine import Engine
from paged_backend.platforms.gpu import model_runner, step_inputs
from paged_backend.platforms.gpu.batch import Staging
from paged_backend.platforms.gpu.cuda_graphs import StepGraphs, StepShape
from paged_backend.platforms.gpu.model_runner import GpuModelRunner
from paged_backend.platforms.gpu.sampler import DeviceSampler
from paged_backend.values.request import Request
from paged_backend.values.sampling_params import SamplingParams
from paged_backend.values.windows import Chunks, Window

# Rows of padding hold whatever was in memory, and NumPy warns of what is computed with it.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
TINY = {"num_hidden_layers": 2, "intermediate_size": 40}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory) -> Oracle:
    return Oracle("smollm", tmp_path_factory.mktemp("smollm"), **TINY)


def engine_for(oracle: Oracle, **options: object) -> Engine:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64}
    values = {"kv_cache_memory_bytes": 2**20, "device": device, **sizes, **options}
    engine = make_engine(oracle.folder, **values)
    assert isinstance(engine.executor.model_runner, GpuModelRunner)
    return engine


def short(count: int, seed: int = 0) -> Work:
    return [(prompt[:30], min(limit, 6)) for prompt, limit in mixed_work(count, seed)]


def test_warming_up_does_not_change_later_tokens(oracle):
    engine = engine_for(oracle, max_num_seqs=2, max_num_batched_tokens=32)
    engine.executor.model_runner.warm_up()
    engine.executor.model_runner.run_largest()
    work = short(3)
    oracle.confirm(work, tokens_of(run(engine, work)))


class Operations(TorchDispatchMode):
    """The operations of torch, by name and dtypes, each of which may be a kernel to load."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[object, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        dtypes = [value.dtype for value in args if isinstance(value, torch.Tensor)]
        self.seen.add((str(func), *dtypes))
        return func(*args, **(kwargs or {}))


def test_no_option_of_a_request_needs_an_operation_that_the_warm_up_has_not_run(oracle):
    engine = engine_for(oracle, max_num_seqs=2, max_num_batched_tokens=32)
    with Operations() as warm_up:
        engine.executor.model_runner.warm_up()
    common = {"max_tokens": 3, "ignore_eos": True, "seed": 1}
    options: dict[str, dict[str, object]] = {
        "plain": {},
        "filters": {"top_k": 5, "top_p": 0.9, "min_p": 0.01, "temperature": 2.0},
        "penalties": {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "min_tokens": 2},
        "bias": {"logit_bias": ((5, 1.0), (5, 2.0))},
        "allowed": {"allowed_token_ids": (4, 9, 11)},
        "bad words": {"bad_words_token_ids": ((4,), (9, 4), (9, 9, 4))},
        "logprobs": {"logprobs": 2, "prompt_logprobs": 2},
        "logits": {"return_generation_logits": True, "return_context_logits": True, "logprobs": 0},
    }
    requests = [
        Request(name, [4, 8, 15, 16, 23], SamplingParams(**common, **values))
        for name, values in options.items()
    ]
    with Operations() as serving:
        drawn(engine, requests)
    assert serving.seen - warm_up.seen == set()


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts interpreted launches")
def test_a_decode_step_launches_few_kernels(oracle, monkeypatch):
    """More than these for a layer cost a small batch much of its time."""
    launched: Counter[str] = Counter()
    launch = GridExecutor.__call__

    def counted(self: GridExecutor, *arguments: object, **named: object) -> None:
        launched[self.fn.__name__] += 1
        launch(self, *arguments, **named)

    engine = engine_for(oracle)
    for name in "abc":
        engine.add_request(Request(name, [5] * 20, SamplingParams(temperature=0, max_tokens=9)))
    for _ in range(4):
        engine.step()
    monkeypatch.setattr(GridExecutor, "__call__", counted)
    engine.step()
    assert launched == {
        "_plan_kernel": 1,
        "_fused_qk_norm_rope_cache_kernel": 2,
        "_split_kernel": 2,
        "_gated_activation_kernel": 2,
        "_rms_norm_kernel": 5,  # two in each of two layers, and the last one
        "_sample_kernel": 1,
    }


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_requests_of_mixed_lengths_equal_transformers(oracle, async_scheduling):
    engine = engine_for(oracle, async_scheduling=async_scheduling)
    work = short(6)
    oracle.confirm(work, tokens_of(run(engine, work)))
    assert engine.stats().num_used_blocks == 0


def test_prompts_in_chunks_equal_transformers(oracle):
    engine = engine_for(oracle, max_num_batched_tokens=7)
    work = short(3, seed=1)
    oracle.confirm(work, tokens_of(run(engine, work)))


def test_prefix_hits(oracle):
    engine = engine_for(oracle)
    first = [(7 * i + 3) % 190 + 3 for i in range(48)]
    later: Work = [(first[:40] + [5, 6], 3), (first + [9], 3)]
    run(engine, [(first, 2)])
    outputs = run(engine, later)
    oracle.confirm(later, tokens_of(outputs))
    assert [outputs[str(i)][0].num_cached_tokens for i in range(2)] == [32, 48]


# Together they have all that a family may have: see `Variant`.
@pytest.mark.parametrize(
    "family",
    [
        *("gemma2", "glm4", "olmo3", "deepseek-v3", "minicpm3", "bamba"),
        *("falcon-mamba", "zamba2-plain"),
    ],
)
def test_families_equal_transformers(tmp_path, family):
    oracle = Oracle(family, tmp_path, intermediate_size=40)
    work = [(prompt[:24], min(limit, 3)) for prompt, limit in mixed_work(2, seed=3)]
    oracle.confirm(work, tokens_of(run(engine_for(oracle, max_model_len=256), work)))


SAMPLED = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.5, "top_k": 100, "top_p": 0.9},
    {"top_p": 0.8},
    {"min_p": 0.05, "temperature": 2.0},
    {"repetition_penalty": 1.3, "top_k": 64},
    {"presence_penalty": 0.8, "frequency_penalty": 0.5, "top_p": 0.95},
    {"min_tokens": 2, "logit_bias": {2: 5.0, 17: 3.0}, "top_k": 20},
]


def test_a_seed_gives_the_same_tokens_as_on_a_cpu(oracle, monkeypatch):
    pytest.importorskip("numba", reason="the CPU's platform needs numba")
    from paged_backend.platforms.cpu.platform import CpuPlatform

    work = short(len(SAMPLED), seed=3)

    def answers(engine):
        for index, (fields, (prompt, _)) in enumerate(zip(SAMPLED, work, strict=True)):
            params = SamplingParams.from_mapping({"max_tokens": 3, "n": 2, "seed": index, **fields})
            engine.add_request(Request(str(index), prompt, params))
        tokens = {}
        while engine.has_unfinished:
            for output in engine.step():
                key = output.request_id, output.index
                tokens.setdefault(key, []).extend(output.new_token_ids)
        return tokens

    on_device = answers(engine_for(oracle, max_num_seqs=16))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    on_cpu = make_engine(oracle.folder, device="cpu", max_num_seqs=16)
    assert isinstance(on_cpu.executor.platform, CpuPlatform)
    assert on_device == answers(on_cpu)


ALLOWED = [2, *range(40, 80), 198]


def answers_of_four(engine, **params):
    """The tokens of four requests; the second and the fourth may have further parameters."""
    requests = [
        Request(
            str(index),
            prompt,
            SamplingParams(
                max_tokens=4, seed=index, temperature=index % 3, **(params if index % 2 else {})
            ),
        )
        for index, (prompt, _) in enumerate(short(4))
    ]
    return drawn(engine, requests)


@pytest.fixture(scope="module")
def answers_with_allowed_tokens(oracle):
    expected = answers_of_four(engine_for(oracle), allowed_token_ids=ALLOWED)
    assert any(set(tokens) - set(ALLOWED) for tokens in expected.values())
    return expected


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_mask_restricts_its_sequence_only(oracle, answers_with_allowed_tokens, async_scheduling):
    masked = engine_for(oracle, async_scheduling=async_scheduling)
    masked.executor = MaskingExecutor(masked.executor, ALLOWED)
    assert answers_of_four(masked) == answers_with_allowed_tokens


def test_preemption(oracle):
    block_bytes = 2**20 // engine_for(oracle).executor.info.num_blocks
    engine = engine_for(oracle, max_model_len=48, kv_cache_memory_bytes=5 * block_bytes)
    work: Work = [(prompt[:14], 5) for prompt, _ in mixed_work(4, seed=2)]
    oracle.confirm(work, tokens_of(run(engine, work)))
    assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_windows_and_norms_of_heads(family, tmp_path):
    oracle = Oracle(family, tmp_path, **TINY)
    engine = engine_for(oracle)
    work = [(prompt[:40], 3) for prompt, _ in mixed_work(2, seed=3)]
    oracle.confirm(work, tokens_of(run(engine, work)))


@pytest.fixture(scope="module", params=[9, Chunks(9)], ids=str)
def window(request) -> Window:
    return request.param


@pytest.fixture(scope="module")
def window_oracle(window, tmp_path_factory) -> Oracle:
    """A window of 9 tokens, or chunks of them, in the first of two layers."""
    folder = tmp_path_factory.mktemp("window")
    if isinstance(window, Chunks):
        chunks = {"attention_chunk_size": window.size, "no_rope_layers": [1, 0]}
        return Oracle("llama4", folder, **TINY, **chunks)
    options = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": window}
    return Oracle("qwen3-window", folder, **TINY, **options)


def test_blocks_before_the_window_are_freed_and_not_read(window, window_oracle):
    engine = engine_for(
        window_oracle,
        block_size=8,
        max_num_batched_tokens=16,
        enable_prefix_caching=False,
    )
    kv, pool = engine.scheduler.kv, engine.executor.model_runner._attention._pool.memory
    assert kv.layout.windows == (window, None)
    free, freed = kv.free_invisible_blocks, []

    def free_and_spoil(sequences):
        num_used = kv.pool.num_used
        free(sequences)
        freed.append(num_used - kv.pool.num_used)
        pool[:, [0, *kv.pool._free]] = torch.nan

    kv.free_invisible_blocks = free_and_spoil
    work: Work = [(prompt[:28], 3) for prompt, _ in mixed_work(3, seed=4)]
    window_oracle.confirm(work, tokens_of(run(engine, work)))
    assert sum(freed) > 0
    assert kv.pool.num_used == 0


def test_groups_with_prefix_hits_and_a_graph(window_oracle):
    """As graphs do, with the launches of each shape made anew instead of replayed."""
    engine = engine_for(window_oracle, block_size=8)
    steps, replayed = engine.executor.model_runner, []

    def capture(shape: StepShape):
        def replay() -> torch.Tensor:
            replayed.append(shape)
            return steps._run(shape)

        return replay

    steps._graphs = StepGraphs([StepShape.decodes(3), StepShape.mixed(2, 32)], capture)
    first = [(7 * i + 3) % 190 + 3 for i in range(25)]
    run(engine, [(first, 2)])
    later: Work = [(first[:20] + [5, 6], 2), (first + [9], 3)]
    outputs = run(engine, later)
    window_oracle.confirm(later, tokens_of(outputs))
    assert [outputs[str(i)][0].num_cached_tokens for i in range(2)] == [16, 24]
    assert set(replayed) == {StepShape.decodes(3), StepShape.mixed(2, 32)}


def test_forks_copy_what_they_write(oracle):
    """Greedy answers to one prompt are the same; each has blocks of its own where they differ."""
    engine = engine_for(oracle)
    prompt = [5, 9, 33, 120, 7]
    params = SamplingParams(temperature=0, max_tokens=5, n=3, ignore_eos=True)
    engine.add_request(Request("forked", prompt, params))
    tokens = {0: [], 1: [], 2: []}
    while engine.has_unfinished:
        for output in engine.step():
            tokens[output.index] += output.new_token_ids
        engine.scheduler.check_invariants()
    assert tokens[0] == tokens[1] == tokens[2] == oracle.generate(prompt, 5)


def drawn(engine: Engine, requests: list[Request]) -> dict[str, list[int]]:
    for request in requests:
        engine.add_request(request)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    while engine.has_unfinished:
        for output in engine.step():
            tokens[output.request_id] += output.new_token_ids
    return tokens


def test_seeded_tokens_do_not_depend_on_the_batch(oracle):
    def request(name: str, seed: int) -> Request:
        params = SamplingParams(
            temperature=1.5, top_k=50, top_p=0.95, seed=seed, max_tokens=4, ignore_eos=True
        )
        return Request(name, [4, 8, 15, 16, 23, 42], params)

    alone = drawn(engine_for(oracle), [request("a", 7)])["a"]
    others = [request("b", 1), request("a", 7), request("c", 2**64 - 1)]
    together = drawn(engine_for(oracle), others)
    assert together["a"] == alone
    assert together["b"] != alone


def test_most_tokens_of_bfloat16_equal_float32(tmp_path):
    """Tokens may differ where two are almost as likely; most do not."""
    oracle = Oracle("qwen3", tmp_path, **TINY)
    work = [(prompt[:24], 4) for prompt, _ in mixed_work(3)]
    answers = tokens_of(run(engine_for(oracle, dtype="bfloat16"), work))
    wanted = [oracle.generate(*item) for item in work]
    assert sum(a == b for a, b in zip(answers, wanted, strict=True)) >= 2


def settings(name: str, seed: int, **options: object) -> Request:
    params = SamplingParams(
        temperature=2.0, top_k=40, seed=seed, max_tokens=7, ignore_eos=True, **options
    )
    return Request(name, [seed, 8, 15, 16, 23, 42, 4, 8, 15, 16, 23, 42], params)


def test_a_preempted_sequence_keeps_its_settings(oracle):
    """It comes back in another row of the device's buffers."""
    requests = [settings("a", 3), settings("b", 4), settings("c", 5, presence_penalty=2.0)]
    block_bytes = 2**20 // engine_for(oracle).executor.info.num_blocks
    engine = engine_for(oracle, max_model_len=48, kv_cache_memory_bytes=5 * block_bytes)
    crowded = drawn(engine, requests)
    assert engine.stats().num_preemptions > 0
    assert crowded == drawn(engine_for(oracle), requests)


def test_completions_of_a_request_differ_whether_or_not_they_share_a_block(oracle):
    """They share a block, or not, by its size alone; the tokens are the same."""
    answers = []
    for block_size in (8, 16):
        engine = engine_for(oracle, block_size=block_size)
        params = SamplingParams(temperature=2.0, seed=1, max_tokens=6, n=3, ignore_eos=True)
        engine.add_request(Request("forked", [5, 9, 33, 120, 7, 6, 5, 4], params))
        tokens = {0: [], 1: [], 2: []}
        while engine.has_unfinished:
            for output in engine.step():
                tokens[output.index] += output.new_token_ids
        answers.append(tokens)
    assert answers[0] == answers[1]
    assert len({tuple(tokens) for tokens in answers[0].values()}) == 3


def test_penalties_see_tokens_that_the_host_does_not_know_yet(oracle):
    params = SamplingParams(
        temperature=0, presence_penalty=2, frequency_penalty=2, max_tokens=6, ignore_eos=True
    )
    prompt = [4, 8, 15, 16]
    answers = [
        drawn(engine_for(oracle, async_scheduling=later), [Request("a", prompt, params)])["a"]
        for later in (False, True)
    ]
    assert answers[0] == answers[1]
    context, expected = torch.tensor([prompt]), []
    for _ in range(6):
        with torch.inference_mode():
            logits = oracle.model(context).logits[0, -1].numpy().copy()
        for token in expected:
            logits[token] -= 2 + 2 / expected.count(token)  # once for each of its occurrences
        expected.append(int(logits.argmax()))
        context = torch.tensor([prompt + expected])
    assert answers[0] == expected


def test_log_probabilities_are_those_of_the_model(oracle):
    """Of sampled tokens before any adjustment, and of a prompt that comes in chunks."""
    prompt = [4, 8, 15, 16, 23, 42, 9, 9, 7]
    plain = {"max_tokens": 4, "ignore_eos": True}
    asked = {"logprobs": 3, "prompt_logprobs": 2, "temperature": 0, "presence_penalty": 2}
    for later in (False, True):
        engine = engine_for(oracle, async_scheduling=later, max_num_batched_tokens=8)
        engine.add_request(Request("plain", prompt, SamplingParams(temperature=0, **plain)))
        engine.add_request(Request("asked", prompt, SamplingParams(**asked, **plain)))
        outputs = [output for output in run(engine, []).get("asked", ())]
        oracle.confirm_logprobs(prompt, outputs)


def test_bad_words_end_in_tokens_that_the_host_does_not_know_yet(oracle):
    prompt = [4, 8, 15, 16]
    free = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
    usual = drawn(engine_for(oracle), [Request("a", prompt, SamplingParams(**free))])["a"]
    params = SamplingParams(
        **free, bad_words_token_ids=(tuple(usual[1:3]), tuple(usual[2:6])), logit_bias={5: 1.0}
    )
    answers = [
        drawn(engine_for(oracle, async_scheduling=later), [Request("a", prompt, params)])["a"]
        for later in (False, True)
    ]
    assert answers[0] == answers[1]
    assert answers[0][:2] == usual[:2]
    assert answers[0][2] != usual[2]


def test_a_padded_step_of_nothing_changes_nothing(oracle):
    """Graphs are captured on such a step, and smaller batches are padded with its rows.

    The warm-up, which a device has behind it, leaves counts in rows of sequences.
    """
    shape = StepShape.decodes(3)
    steps = engine_for(oracle, max_num_seqs=3, max_num_batched_tokens=16).executor.model_runner
    steps.warm_up()
    pool, counts = steps._attention._pool.memory, steps._sampler._sampler._counts
    pool_before, counts_before = pool.clone(), counts.clone()
    steps._inputs.send(steps._inputs.update(ScheduledBatch.of([])), shape)
    with torch.inference_mode():
        steps._run(shape)
        steps._sampler._change_and_sample(shape, None, [])
    assert torch.equal(pool, pool_before)
    assert torch.equal(counts, counts_before)
    assert counts[:-1].any() and not counts[-1].any()  # the last row is padding


def test_steps_padded_to_captured_shapes_give_the_same_tokens(oracle):
    """As graphs do, with the launches of each shape made anew instead of replayed.

    Each step, with decodes, prompts or both, is one graph.
    """
    engine = engine_for(oracle, max_num_seqs=5, async_scheduling=True)
    steps, replayed, launched = engine.executor.model_runner, [], []

    def capture(shape: StepShape):
        def replay() -> torch.Tensor:
            replayed.append(shape)
            return steps._run(shape)

        return replay

    def launch(output, guide=None):
        launched.append(output)
        return launch_step(output, guide)

    launch_step, engine.executor.launch = engine.executor.launch, launch
    decodes = [StepShape.decodes(3), StepShape.decodes(5)]
    steps._graphs = StepGraphs([*decodes, StepShape.mixed(0, 64), StepShape.mixed(5, 64)], capture)
    for work in (short(1, seed=6), short(6, seed=5)):
        oracle.confirm(work, tokens_of(run(engine, work)))
    assert set(replayed) == set(steps._graphs._shapes)
    assert len(replayed) == len(launched)


def test_only_steps_whose_logits_a_request_changes_are_sampled_again(oracle, monkeypatch):
    """The others are sampled by their graph, also if they return logprobs."""
    engine = engine_for(oracle, async_scheduling=True)
    again, change = [], DeviceSampler.change_and_sample
    monkeypatch.setattr(
        DeviceSampler, "change_and_sample", lambda *args: again.append(change(*args))
    )

    def steps_again(**options: object) -> int:
        again.clear()
        params = [
            SamplingParams(max_tokens=4, ignore_eos=True, seed=1, **more) for more in ({}, options)
        ]
        drawn(engine, [Request(str(i), [4, 8, 15], each) for i, each in enumerate(params)])
        return len(again)

    assert steps_again() == steps_again(top_k=5, logprobs=2) == 0
    changes = [{"presence_penalty": 1.0}, {"min_tokens": 2}, {"logit_bias": ((5, 1.0),)}]
    assert [steps_again(**options) for options in changes] == [4, 4, 4]
    assert steps_again(temperature=0) == 0


def test_steps_of_decodes_use_smaller_buffers_than_prompts(oracle, monkeypatch):
    """Decodes have buffers without room for a prompt; both kinds of steps take turns."""
    for module in (step_inputs, model_runner):  # a device captures these shapes, too
        monkeypatch.setattr(module, "captured_shapes", lambda *_: [StepShape.decodes(4)])
    engine = engine_for(oracle, max_num_batched_tokens=2048)
    sent = []
    send = Staging.send

    def note(self: Staging, values: dict) -> None:
        sent.append((len(values["input_ids"]), self._device_bytes.nbytes))
        send(self, values)

    monkeypatch.setattr(Staging, "send", note)
    work = short(3, seed=5)
    oracle.confirm(work, tokens_of(run(engine, work)))
    assert {num_tokens <= 4 for num_tokens, _ in sent} == {True, False}
    for num_tokens, num_bytes in sent:
        assert num_bytes < 4096 if num_tokens <= 4 else num_bytes > 2048 * 8
    inputs = engine.executor.model_runner._inputs
    assert inputs.buffers(StepShape.decodes(4)) is inputs.buffers(StepShape.decodes(1))


def test_int8_weights(oracle):
    work = short(2)
    together = tokens_of(run(engine_for(oracle, quantization="int8"), work))
    chunked = engine_for(oracle, quantization="int8", max_num_batched_tokens=7, max_num_seqs=3)
    assert tokens_of(run(chunked, work)) == together


def test_prompt_logprobs_of_a_model_that_transformers_computes(oracle):
    """Its last hidden states are logits, of which a row may begin at any address."""
    found = []
    for impl in ("auto", "transformers"):
        engine = engine_for(oracle, model_impl=impl)
        params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2)
        engine.add_request(Request("r", [5, 9, 14, 3], params))
        rows = []
        while engine.has_unfinished:
            rows += [row for output in engine.step() for row in output.prompt_logprobs or ()]
        found.append([row.top_token_ids for row in rows])
    assert found[0] == found[1] and len(found[0]) == 3
