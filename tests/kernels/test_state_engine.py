"""Models with states on the Triton kernels, with prompts that are computed in chunks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from matmul_checks import ordered_dot
from oracle import Oracle, Work, make_engine, run, tokens_of
from paged_kernels import _decayed_scan, gated_delta

from paged_backend.core.drafter import Draft, Drafter
from paged_backend.core.scheduler_output import SchedulerOutput
from paged_backend.core.sequence import Sequence
from paged_backend.engine.engine import Engine
from paged_backend.platforms.gpu import state_functions
from paged_backend.platforms.gpu.cuda_graphs import StepGraphs, StepShape
from paged_backend.platforms.gpu.model_runner import GpuModelRunner
from paged_backend.platforms.portable.linear import TorchLinear
from paged_backend.values.errors import ConfigError
from paged_backend.values.request import Request
from paged_backend.values.sampling_params import SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

TEXT = [3 + 7 * place % 190 for place in range(110)]
WORK: Work = [(TEXT[40:61], 4), (TEXT[5:110], 2)]
"""A chunk of 21 tokens; a whole chunk and 41 tokens."""

LAYERS = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
FAMILIES: dict[str, dict[str, object]] = {
    "qwen3-next": {"mlp_only_layers": [0, 1]},
    "granite-hybrid": {},
    "minimax": {"head_dim": 32},
}


def engine_for(folder: Path, **options: object) -> Engine:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 256, "mamba_block_size": 64}
    values = {"kv_cache_memory_bytes": 2**22, "device": device, **sizes, **options}
    engine = make_engine(folder, **values)
    assert isinstance(engine.executor.model_runner, GpuModelRunner)
    return engine


@pytest.fixture(scope="module", params=FAMILIES)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = tmp_path_factory.mktemp(request.param)
    return Oracle(request.param, folder, intermediate_size=40, **LAYERS, **FAMILIES[request.param])


def test_float32_equals_transformers(oracle: Oracle) -> None:
    """Row by row, with steps that divide prompts anywhere, and a prefix hit."""
    engine = engine_for(oracle.folder, max_num_batched_tokens=44)
    work: Work = [(TEXT[40:61], 3), (TEXT[:70], 2)]
    oracle.confirm(work, tokens_of(run(engine, work)))
    later: Work = [([*TEXT[:66], 4, 5], 2)]
    outputs = run(engine, later)
    oracle.confirm(later, tokens_of(outputs))
    assert outputs["0"][0].num_cached_tokens == 64


def count_chunks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of sequences without chunks, for each call with chunks."""
    calls: list[int] = []

    def counted(function):
        def call(*args, first_seq: int, **options):
            calls.append(first_seq)
            function(*args, first_seq=first_seq, **options)

        return call

    for module in (gated_delta, _decayed_scan):
        monkeypatch.setattr(module, "add_chunks", counted(module.add_chunks))
    return calls


def test_float16_in_chunks_equals_transformers(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts beside decodes, as a graph would launch them: padded to a larger shape."""
    calls = count_chunks(monkeypatch)
    engine = engine_for(oracle.folder, dtype="float16", enable_prefix_caching=False)
    runner = engine.executor.model_runner
    replayed: list[StepShape] = []

    def capture(shape: StepShape):
        def replay() -> torch.Tensor:
            replayed.append(shape)
            return runner._run(shape)

        return replay

    shapes = [StepShape.decodes(4), StepShape.mixed(4, 128)]
    runner._graphs = StepGraphs(shapes, capture)
    calls.clear()  # those of the warm-up on a device
    oracle.confirm(WORK, tokens_of(run(engine, WORK)))
    assert calls and set(calls) == {4}  # no decode is in a chunk, and no step of decodes has any
    assert set(replayed) == set(shapes)


def logits_of(engine: Engine, work: Work) -> list[list[bytes]]:
    """The logits of each token of each answer."""
    found: list[list[bytes]] = [[] for _ in work]
    for index, (prompt, max_tokens) in enumerate(work):
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, return_generation_logits=True
        )
        engine.add_request(Request(str(index), prompt, params))
    while engine.has_unfinished:
        for output in engine.step():
            found[int(output.request_id)] += [each.logits for each in output.logprobs or ()]
    return found


@pytest.fixture
def rows_of_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no row of a product of torch depend on the number of rows, as on a device."""

    def product(self: TorchLinear, x: torch.Tensor) -> torch.Tensor:
        exact = x.double() @ self._weight.double().T
        return (exact if self._bias is None else exact + self._bias.double()).to(x.dtype)

    monkeypatch.setattr(TorchLinear, "__call__", product)


def logits_alone_and_beside_others(oracle: Oracle) -> list[list[bytes]]:
    """The logits of the last prompt of `WORK`: alone in a step, and cut beside the others."""
    options = {"dtype": "float16", "enable_prefix_caching": False}
    with ordered_dot():
        (alone,) = logits_of(engine_for(oracle.folder, **options), WORK[1:])
        crowded = engine_for(oracle.folder, max_num_batched_tokens=100, **options)
        together = logits_of(crowded, WORK)
    assert len(alone) == 2
    return [alone, together[1]]


@pytest.mark.usefixtures("rows_of_products")
@pytest.mark.parametrize(
    "oracle",
    [pytest.param(n, marks=() if n == "qwen3-next" else pytest.mark.thorough) for n in FAMILIES],
    indirect=True,
)
def test_no_bit_depends_on_how_other_sequences_cut_a_prompt(oracle: Oracle) -> None:
    alone, together = logits_alone_and_beside_others(oracle)
    assert alone == together


@pytest.mark.usefixtures("rows_of_products")
@pytest.mark.parametrize("oracle", ["qwen3-next"], indirect=True)
def test_a_cut_within_a_chunk_changes_bits(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """A negative control: the scheduler knows of no chunks."""
    monkeypatch.setattr(state_functions, "chunks", lambda dtype: None)
    alone, together = logits_alone_and_beside_others(oracle)
    assert alone != together


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mamba_block_size": 96}, "mamba_block_size must be a multiple of 64 .* got 96"),
        ({"max_num_batched_tokens": 67}, "max_num_batched_tokens must be at least 64 more than"),
        (
            {"max_num_batched_tokens": 131, "speculative_config": {}},
            "max_num_batched_tokens must be at least 128 more than max_num_seqs .4. .* got 131",
        ),
    ],
)
def test_options_that_divide_chunks(
    oracle: Oracle, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_for(oracle.folder, dtype="float16", **options)
    engine_for(oracle.folder, **options)  # in float32, no tokens are computed together


def test_states_after_every_block_are_those_after_chunks(oracle: Oracle) -> None:
    engine = engine_for(oracle.folder, dtype="float16", mamba_cache_mode="all")
    assert engine.executor.info.kv_layout.states.interval == 64


class KnownAnswer(Drafter):
    """Guesses 20 tokens of a known answer; a token of every second guess is wrong."""

    def __init__(self, answer: list[int]) -> None:
        self._answer, self._num_guesses = answer, 0

    def propose(self, sequences: Iterable[Sequence], budget: int) -> dict[int, Draft]:
        guesses = {}
        for seq in sequences:
            self._num_guesses += 1
            start = seq.num_known_tokens - seq.num_prompt_tokens
            guess = self._answer[start : start + 20]
            if self._num_guesses % 2 == 0 and len(guess) > 4:
                guess[4] = 3
            guesses[seq.seq_id] = Draft(guess)
        return guesses

    def awaits(self, sequences: Iterable[Sequence]) -> set[int]:
        """Let all sequences go on."""
        return set()

    def observe_step(self, seconds: float, output: SchedulerOutput) -> None:
        """Learn nothing."""


@pytest.mark.parametrize("oracle", ["qwen3-next"], indirect=True)
def test_drafts_are_computed_as_the_tokens_are_one_by_one(oracle: Oracle) -> None:
    """So they do not change a token in float16, either."""
    work: Work = [(TEXT[:70], 30)]
    options = {"dtype": "float16", "async_scheduling": False}
    (plain,) = tokens_of(run(engine_for(oracle.folder, **options), work))
    engine = engine_for(oracle.folder, drafter=KnownAnswer(plain), speculative_config={}, **options)
    assert tokens_of(run(engine, work)) == [plain]
    stats = engine.stats()
    assert stats.num_draft_tokens / stats.num_drafts <= 15
    assert stats.num_draft_tokens > stats.num_accepted_tokens > 15
    assert stats.num_steps < 12
