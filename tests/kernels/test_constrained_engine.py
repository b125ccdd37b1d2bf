"""Constrained answers of the engine with the Triton kernels equal those of the CPU's platform."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from free_drafts import make_drafts_free
from oracle import EOS, make_engine
from padded_steps import DRAFTED, use_shapes

from paged_backend.core.grammar_budget import StepTime
from paged_backend.core.scheduler_output import DrawnDrafts
from paged_backend.engine.engine import Engine
from paged_backend.platforms.gpu.cuda_graphs import StepShape
from paged_backend.platforms.gpu.model_runner import GpuModelRunner
from paged_backend.platforms.gpu.texts import DeviceTexts
from paged_backend.speculation.lookup import LookupDrafter
from paged_backend.speculation.step_costs import StepCosts
from paged_backend.values.output_constraint import OutputConstraint
from paged_backend.values.outputs import TokenLogprobs
from paged_backend.values.request import Request
from paged_backend.values.sampling_params import SamplingParams
from paged_backend.values.structured_outputs import StructuredOutputsParams

pytest.importorskip("llguidance", reason="compiles the grammars")
pytest.importorskip("numba", reason="the CPU's platform needs it")
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402

from paged_backend.grammar.build import build_grammar  # noqa: E402
from paged_backend.grammar.compiler import LlguidanceCompiler  # noqa: E402

# Rows of padding hold whatever was in memory, and NumPy warns of what is computed with it.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

VOCAB_SIZE = 320  # more than the tokenizer has; llguidance adds a word to masks of n * 32 tokens
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["class", "module"]}, "score": {"type": "integer"}},
    "required": ["kind", "score"],
    "additionalProperties": False,
}
JSON = {"json": SCHEMA, "disable_any_whitespace": True}
ASKED: list[tuple[dict[str, object] | None, dict[str, object]]] = [
    (JSON, {"temperature": 0}),
    (None, {"temperature": 1.0}),
    ({"regex": "[a-f]{4,9}-[0-9]{2,4}"}, {"n": 2, "top_p": 0.9}),
    (JSON, {"temperature": 1.5, "logprobs": 3}),
    ({"choice": ["yes", "yesterday", "no"]}, {"top_k": 40, "ignore_eos": True}),
    (None, {"temperature": 0, "logprobs": 2, "prompt_logprobs": 1}),
    (
        {"regex": "[a-z ]*"},
        {
            "repetition_penalty": 1.4,
            "presence_penalty": 0.8,
            "frequency_penalty": 0.5,
            "top_k": 30,
        },
    ),
    (
        {"regex": "[0-9]{3,12}"},
        {"logit_bias": {21: 4.0}, "bad_words_token_ids": ((20, 21),), "logprobs": 0},
    ),
    # The output may end with any of several tokens, so the end is not forced.
    ({"choice": ["y", "n", "o"]}, {"temperature": 1.5, "stop_token_ids": [*range(250, 310)]}),
    # Penalties count forced tokens.
    ({"regex": "(a[bc]deaf|abab){4}"}, {"temperature": 0, "frequency_penalty": 1.5}),
    # They do not count tokens that were dropped: most of them are sampled again.
    ({"regex": "(?s:.)*"}, {"temperature": 0, "frequency_penalty": 2.0, "presence_penalty": 2.0}),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights, and a tokenizer whose words are mostly single bytes."""
    folder: Path = tmp_path_factory.mktemp("llama3")
    make_checkpoint(
        "llama3", folder, num_hidden_layers=1, intermediate_size=40, vocab_size=VOCAB_SIZE
    )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 12,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(['{"kind":"class","score":12}', "yesterday, a module"], trainer)
    assert tokenizer.token_to_id("</s>") == EOS
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


Answers = dict[tuple[str, int], Answer]


def grammar_of(constraint: dict[str, object]) -> str:
    return build_grammar(OutputConstraint(StructuredOutputsParams.of(constraint)), {})


def answers(engine: Engine) -> Answers:
    """The completions of all requests, in fewer seats than there are requests."""
    for number, (constraint, more) in enumerate(ASKED):
        params = SamplingParams.from_mapping({"max_tokens": 14, "seed": number, **more})
        grammar = grammar_of(constraint) if constraint else ""
        prompt = [5 + (7 * number + step) % 90 for step in range(3 + 5 * number)]
        engine.add_request(Request(str(number), prompt, params, grammar=grammar))
    found: Answers = {}
    while engine.has_unfinished:
        for output in engine.step():
            answer = found.setdefault((output.request_id, output.index), Answer())
            answer.tokens += output.new_token_ids
            answer.reason = output.finish_reason
            answer.logprobs += output.logprobs or []
            answer.prompt_logprobs += output.prompt_logprobs or []
        engine.scheduler.check_invariants()
    return found


def constrained_engine(folder: Path, device: str, **options: object) -> Engine:
    grammars = LlguidanceCompiler(folder, VOCAB_SIZE, [EOS])
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 2**20}
    return make_engine(folder, grammars=grammars, device=device, **sizes, **options)


@pytest.fixture(scope="module")
def expected(folder: Path) -> Answers:
    """The answers of the CPU's platform."""
    from paged_backend.platforms.cpu.platform import CpuPlatform

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        engine = constrained_engine(folder, "cpu")
        assert isinstance(engine.executor.platform, CpuPlatform)
    found = answers(engine)
    assert engine.stats().num_forced_tokens > 0
    assert {answer.reason for answer in found.values()} == {"stop", "length"}
    return found


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param("ahead", marks=pytest.mark.thorough),
        *("padded", "late", "drafted", "drafted late", "drafted padded"),
    ],
)
def test_constrained_answers_equal_those_of_the_cpu(folder, expected, monkeypatch, steps):
    """With steps scheduled ahead, padded to the shapes of graphs, with drafts, with late masks.

    All but the padded ones without drafts are scheduled ahead.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options: dict[str, object] = {"async_scheduling": steps != "padded"}
    shapes = DRAFTED if "drafted" in steps else [StepShape.decodes(4)]
    if "drafted" in steps:
        monkeypatch.setattr(StepCosts, "token_s", 0.0)  # verify each guess
        options["speculative_config"] = {"method": "suffix"}
    if "late" in steps:  # another thread computes a mask, and what was sampled is dropped
        left = itertools.cycle([True, True, False])
        monkeypatch.setattr(StepTime, "is_left", property(lambda _: next(left)))
    engine = constrained_engine(folder, device, **options)
    runner = engine.executor.model_runner
    assert isinstance(runner, GpuModelRunner)
    replayed = use_shapes(runner, shapes) if "padded" in steps else []
    taken, take = list[DrawnDrafts](), engine.scheduler.take_drafts
    monkeypatch.setattr(
        engine.scheduler, "take_drafts", lambda drawn: taken.append(drawn) or take(drawn)
    )
    found = answers(engine)
    assert found.keys() == expected.keys()
    for key, answer in found.items():
        assert (answer.tokens, answer.reason) == (expected[key].tokens, expected[key].reason)
        confirm_logprobs(answer.logprobs, expected[key].logprobs)
        confirm_logprobs(answer.prompt_logprobs, expected[key].prompt_logprobs)
    assert (engine.stats().num_draft_tokens > 0) == ("drafted" in steps)
    assert (len(taken) > 5) == ("drafted" in steps)  # drafts after tokens in flight, with masks
    assert set(replayed) >= (set(shapes[-1:]) if "padded" in steps else set())


def test_the_device_has_forced_tokens_and_references(folder, monkeypatch):
    """Sequences wait now and then, and then their grammars force tokens; some count them, too."""
    monkeypatch.setattr(StepCosts, "token_s", 0.0)
    waits, awaits, draw = random.Random(5), LookupDrafter.awaits, DeviceTexts.draw

    def wait_more(self, sequences):
        sequences = list(sequences)
        more = {seq.seq_id for seq in sequences if waits.random() < 0.3}
        return awaits(self, sequences) | more

    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = {"method": "suffix"}
    engine = constrained_engine(folder, device, async_scheduling=True, speculative_config=config)
    rows, seen = engine.executor.model_runner._inputs.rows, {"texts": 0, "references": 0}

    def compared(self, slices, sent, input_ids):
        seq_ids = {row: seq_id for seq_id, row in rows._by_seq.items()}
        for row in {row for row, *_, draws in slices.tolist() if draws}:
            seq = engine.scheduler.sequences.running[seq_ids[row]]
            known = seq.token_ids[: seq.num_known_tokens]
            assert self._texts.tokens[row, : len(known)].tolist() == known
            seen["texts"] += 1
            if seq.sent_reference:
                assert self._num_before[row] > 0
                seen["references"] += 1
        return draw(self, slices, sent, input_ids)

    monkeypatch.setattr(LookupDrafter, "awaits", wait_more)
    monkeypatch.setattr(DeviceTexts, "draw", compared)
    grammar = grammar_of({"regex": "(a[bc]deaf|abab){8}"})
    for number in range(6):
        params = {"temperature": 0.8 if number < 3 else 0, "seed": number, "max_tokens": 40}
        params |= {"frequency_penalty": 0.1} if number % 2 else {}
        prompt = [5 + number, 9, *range(11, 13 + number)]
        request = Request(str(number), prompt, SamplingParams.from_mapping(params), grammar=grammar)
        engine.add_request(request)
        while engine.has_unfinished:
            engine.step()
    assert engine.stats().num_forced_tokens > 20
    assert seen["texts"] > 20 and seen["references"] > 5


# Another rank's process does not have the fast interpreter of these tests.
@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_draft_model_and_constrained_answers(folder, expected, monkeypatch, num_ranks):
    """Other ranks do not know the grammars; the first one waits for drafts that masks follow."""
    num_gpus = torch.cuda.device_count()
    if num_gpus == 1 < num_ranks:
        pytest.skip("one GPU is not enough for two ranks")
    make_drafts_free(monkeypatch)
    draft = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3}
    options = {"enforce_eager": True, "tensor_parallel_size": num_ranks}
    engine = constrained_engine(
        folder, "cuda" if num_gpus else "cpu", speculative_config=draft, **options
    )
    assert engine.executor.info.step_limits.async_scheduling
    found = answers(engine)
    assert found.keys() == expected.keys()
    for key, answer in found.items():
        assert (answer.tokens, answer.reason) == (expected[key].tokens, expected[key].reason)
    assert engine.stats().num_draft_tokens > 40


def confirm_logprobs(found: list[TokenLogprobs], expected: list[TokenLogprobs]) -> None:
    """Those of the model, which no mask changes."""
    assert len(found) == len(expected)
    for entry, other in zip(found, expected, strict=True):
        assert (entry.rank, entry.top_token_ids) == (other.rank, other.top_token_ids)
        assert entry.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert entry.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-4)
