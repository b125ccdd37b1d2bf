"""Drafts on the Triton kernels: the same tokens as without them, in float32."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from checkpoints import make_checkpoint
from free_drafts import AnyDrafts, FreeDrafts, make_drafts_free, see_drafts
from lora_oracle import LoraOracle, answer_of, lora_options, run_requests
from oracle import make_engine
from padded_steps import use_shapes
from prediction_layers import DraftOracle, make_always_right, make_predicting
from safetensors.torch import load_file, save_file

from paged_backend.core.drafter import Draft, Drafter
from paged_backend.core.scheduled_batch import ScheduledBatch, ScheduledSequence
from paged_backend.core.scheduler_output import SchedulerOutput
from paged_backend.core.sequence import PLACEHOLDER, Sequence
from paged_backend.engine.engine import Engine
from paged_backend.platforms.gpu import experts as experts_module
from paged_backend.platforms.gpu import texts
from paged_backend.platforms.gpu.cuda_graphs import StepShape, captured_shapes
from paged_backend.platforms.gpu.model_runner import GpuModelRunner
from paged_backend.platforms.gpu.step_sampler import StepSampler
from paged_backend.speculation.drafting_rule import DraftingRule
from paged_backend.speculation.lookup import LookupDrafter
from paged_backend.values.options.speculation import SpeculativeConfig
from paged_backend.values.outputs import DraftCounts, SequenceOutput
from paged_backend.values.request import Request
from paged_backend.values.sampling_params import SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
Answers = dict[tuple[str, int], list[Any]]
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "n": 2},
    {"temperature": 0.9, "top_k": 20, "logprobs": 2, "repetition_penalty": 1.3},
    {"temperature": 0.0, "presence_penalty": 0.8, "frequency_penalty": 0.4, "min_tokens": 6},
    {"temperature": 0.7, "bad_words_token_ids": ((5,), (9, 4)), "logit_bias": ((17, 3.0),)},
    {"temperature": 0.0, "frequency_penalty": -0.6, "prompt_logprobs": 1},
]


class KnownAnswers(Drafter):
    """Guesses the answers of an earlier run, with a wrong token in some of the guesses."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._num_guesses = 0

    def propose(self, sequences: Iterable[Sequence], budget: int) -> dict[int, Draft]:
        guesses = {}
        for seq in sequences:
            answer = self._answers[seq.request.request_id, seq.index]
            start = seq.num_known_tokens - seq.num_prompt_tokens
            self._num_guesses += 1
            guess = [x for x in answer if isinstance(x, int)][start : start + 5]
            if self._num_guesses % 3 == 0 and len(guess) > 2:
                guess[2] += 1
            guesses[seq.seq_id] = Draft(guess if self._num_guesses % 7 else [])
        return guesses

    def awaits(self, sequences: Iterable[Sequence]) -> set[int]:
        """Let each sequence go on every second time."""
        self._num_guesses += 1
        return {seq.seq_id for seq in sequences if (seq.seq_id + self._num_guesses) % 2}

    def observe_step(self, seconds: float, output: SchedulerOutput) -> None:
        """Learn nothing."""


class AsksForMany(LookupDrafter):
    """Lets the device draw up to 5 drafts in each step, whether they pay or not."""

    def __init__(self) -> None:
        super().__init__(SpeculativeConfig(), draws_ahead=True)
        self._random, self.num_asked = random.Random(0), 0

    def propose(self, sequences: Iterable[Sequence], budget: int) -> dict[int, Draft]:
        ahead = [seq for seq in sequences if seq.num_output_placeholders]
        drafts = {seq.seq_id: Draft([PLACEHOLDER] * self._random.randrange(6)) for seq in ahead}
        self.num_asked += sum(bool(draft.token_ids) for draft in drafts.values())
        return drafts

    def awaits(self, sequences: Iterable[Sequence]) -> set[int]:
        return set()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("smollm")
    make_checkpoint("smollm", path, num_hidden_layers=2, intermediate_size=40)
    return path


def engine_for(folder: Path, **options: Any) -> Engine:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 2**21}
    engine = make_engine(folder, device=device, **{**sizes, **options})
    runner = engine.executor.model_runner
    assert isinstance(getattr(runner, "main", runner), GpuModelRunner)
    return engine


def requests() -> list[Request]:
    made = []
    for index, params in enumerate(PARAMS):
        prompt = [(7 * index + 3 * place) % 190 + 3 for place in range(5 + 4 * index)]
        chosen = SamplingParams(max_tokens=9, ignore_eos=True, seed=index, **params)
        made.append(Request(f"r{index}", prompt, chosen))
    return made


def answers_of(engine: Engine, work: list[Request] | None = None) -> Answers:
    """Tokens, then the likeliest tokens at their positions, and the reason of the end."""
    found: Answers = {}
    for request in work or requests():
        engine.add_request(request)
    while engine.has_unfinished:
        for output in engine.step():
            answer = found.setdefault((output.request_id, output.index), [])
            answer += output.new_token_ids
            answer += [(row.top_token_ids, row.rank) for row in output.logprobs or ()]
            answer += [(output.finish_reason,)] if output.finish_reason else []
        engine.scheduler.check_invariants()
    return {
        key: sorted(answer, key=lambda x: isinstance(x, tuple)) for key, answer in found.items()
    }


@pytest.fixture(scope="module")
def plain(folder: Path) -> Answers:
    return answers_of(engine_for(folder))


@pytest.mark.parametrize("steps", ["ahead", "padded"])
def test_tokens_with_right_and_wrong_drafts_are_those_without(
    folder: Path, plain: Answers, steps: str
) -> None:
    """With steps scheduled ahead, and with steps padded to the shapes of graphs."""
    options = {"drafter": KnownAnswers(plain), "speculative_config": {}}
    engine = engine_for(folder, async_scheduling=steps == "ahead", **options)
    shapes = use_shapes(engine.executor.model_runner) if steps == "padded" else []
    assert answers_of(engine) == plain
    stats = engine.stats()
    assert stats.num_draft_tokens > stats.num_accepted_tokens > 12
    if shapes:
        assert {StepShape.drafted(0, 16), StepShape.drafted(4, 16)} <= set(shapes)


@pytest.mark.parametrize("family, padded, window", [("smollm", True, 16), ("gemma2", False, 512)])
def test_tokens_are_the_same_if_the_device_draws_drafts(
    family: str, padded: bool, window: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are scheduled as if all drafts in flight were right, and most of them are wrong.

    Gemma 2 has two groups of blocks, one of them with a window. Of long texts, the device keeps the
    newest tokens.
    """
    monkeypatch.setattr(texts, "_WINDOW", window)
    make_checkpoint(family, tmp_path, num_hidden_layers=2, intermediate_size=40)
    plain = answers_of(engine_for(tmp_path))
    drafter = AsksForMany()
    engine = engine_for(tmp_path, drafter=drafter, speculative_config={}, async_scheduling=True)
    shapes = use_shapes(engine.executor.model_runner) if padded else []
    assert answers_of(engine) == plain
    stats = engine.stats()
    assert drafter.num_asked > 20
    assert stats.num_draft_tokens > stats.num_accepted_tokens > 0
    assert not padded or StepShape.drafted(4, 16) in shapes


def test_the_device_draws_drafts_from_predictions(
    folder: Path, plain: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fifth token of the predictions is wrong, and one request has none."""
    engine = engine_for(folder, drafter=AsksForMany(), speculative_config={}, async_scheduling=True)
    counts: dict[str, DraftCounts] = {}

    def counted(outputs: list[SequenceOutput]) -> list[SequenceOutput]:
        for output in outputs:
            before = counts.get(output.request_id, DraftCounts())
            counts[output.request_id] = before.plus(output.drafts or DraftCounts())
        return outputs

    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: counted(step()))
    work = []
    for request in requests():
        answer = [x for x in plain[request.request_id, 0] if isinstance(x, int)]
        predicted = [token + (place % 5 == 4) for place, token in enumerate(answer)]
        is_first = request.request_id == "r0"
        work.append(replace(request, predicted_token_ids=[] if is_first else predicted))
    assert answers_of(engine, work) == plain
    of_first = counts.pop("r0")
    assert of_first.num_tokens > of_first.num_predicted == of_first.num_predicted_accepted == 0
    for of_request in counts.values():
        assert of_request.num_accepted >= of_request.num_predicted_accepted
        assert (
            of_request.num_tokens >= of_request.num_predicted >= of_request.num_predicted_accepted
        )
    # Answers have few tokens, and each step waits for another number of drafts.
    assert sum(each.num_predicted_accepted for each in counts.values()) > 8


class GivesReferences(AsksForMany):
    """Lets the device draw drafts from references: first from wrong ones, then from right ones.

    Args:
        answers: the answers by request and index.
    """

    def __init__(self, answers: Answers) -> None:
        super().__init__()
        tokens = {key: [x for x in row if isinstance(x, int)] for key, row in answers.items()}
        keys = list(tokens)
        self._wrong = {key: tokens[keys[place - 1]] for place, key in enumerate(keys)}
        self._right = tokens

    def propose(self, sequences: Iterable[Sequence], budget: int) -> dict[int, Draft]:
        ahead = {seq.seq_id: seq for seq in sequences if seq.num_output_placeholders}
        return {
            seq_id: draft._replace(reference=self._reference_of(ahead[seq_id]))
            for seq_id, draft in super().propose(ahead.values(), budget).items()
        }

    def _reference_of(self, seq: Sequence) -> list[int]:
        given = self._wrong if seq.num_output_tokens < 3 else self._right
        return given[seq.request.request_id, seq.index]


def test_the_device_draws_drafts_from_references(folder: Path, plain: Answers) -> None:
    """A new reference takes the place of the one before it, from which drafts are wrong."""
    own, given = (
        engine_for(folder, drafter=drafter, speculative_config={}, async_scheduling=True)
        for drafter in (AsksForMany(), GivesReferences(plain))
    )
    assert answers_of(own) == answers_of(given) == plain
    # Each answer has 9 tokens, and each step waits for another number of drafts.
    assert given.stats().num_accepted_tokens > own.stats().num_accepted_tokens + 8


@pytest.mark.parametrize("window", [16, 32])
def test_a_reference_overwrites_no_token_of_the_text(
    window: int, folder: Path, plain: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the room that the text leaves, which is less than it has tokens."""
    monkeypatch.setattr(texts, "_WINDOW", window)
    admit, num_seen = StepSampler.admit, 0

    def checked(self: StepSampler, inputs: Any, items: list[ScheduledSequence]) -> None:
        nonlocal num_seen
        assert self.texts is not None
        before, known = self.texts._texts.tokens.clone(), set(self._sampled)
        admit(self, inputs, items)
        for item in items:
            if item.reference_token_ids and item.seq_id in known:
                length, row = item.start + 1, self._inputs.rows[item.seq_id]
                places = [place % window for place in range(max(length - window, 0), length)]
                after = self.texts._texts.tokens
                assert torch.equal(after[row, places], before[row, places])
                num_seen += 1

    monkeypatch.setattr(StepSampler, "admit", checked)
    drafter = GivesReferences(plain)
    engine = engine_for(folder, drafter=drafter, speculative_config={}, async_scheduling=True)
    assert answers_of(engine) == plain
    assert num_seen > 5


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen2")
    make_checkpoint("qwen2", path, num_hidden_layers=1)
    return path


@pytest.mark.parametrize("is_own", [True, False])
def test_tokens_with_a_draft_model_are_those_without(
    folder: Path,
    other_model: Path,
    plain: Answers,
    is_own: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model that drafts for itself is right, also about sampled tokens and with penalties."""
    make_drafts_free(monkeypatch)
    draft = folder if is_own else other_model
    config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    engine = engine_for(folder, speculative_config=config, async_scheduling=True)
    runner = engine.executor.model_runner
    shapes = [use_shapes(each) for each in (runner.main, runner.draft)]
    give_drafts = Mock(side_effect=runner.draft.give_drafts)
    monkeypatch.setattr(runner.draft, "give_drafts", give_drafts)
    assert answers_of(engine) == plain
    stats = engine.stats()
    assert stats.num_draft_tokens > 40
    # The host knows the drafts while there are bad words.
    assert 3 < give_drafts.call_count < stats.num_draft_tokens
    if is_own:
        assert stats.num_accepted_tokens == stats.num_draft_tokens
    else:
        assert stats.num_accepted_tokens < stats.num_draft_tokens / 4
    assert {StepShape.drafted(0, 16), StepShape.drafted(4, 16)} & set(shapes[0])
    assert {StepShape.decodes(4), StepShape.mixed(4, 64)} <= set(shapes[1])


def tokens_of(engine: Engine, work: list[Request]) -> list[list[int]]:
    """The answers to requests, in their order."""
    outputs = run_requests(engine, work)
    return [answer_of(outputs[request.request_id]) for request in work]


def make_similar(folder: Path, other: Path) -> None:
    """Copy a checkpoint with other weights, which often choose the same tokens."""
    shutil.copytree(folder, other)
    generator = torch.Generator().manual_seed(0)
    for path in other.glob("*.safetensors"):
        weights = load_file(path)
        for weight in weights.values():
            weight += 0.1 * weight.std() * torch.randn(weight.shape, generator=generator)
        save_file(weights, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "family, padded, rule", [("smollm", True, AnyDrafts), ("gemma2", False, FreeDrafts)]
)
def test_a_draft_model_guesses_after_drafts_in_flight(
    family: str,
    padded: bool,
    rule: type[DraftingRule],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its guesses are what it would generate itself, however many of those before were wrong.

    Gemma 2 has two groups of blocks, of which the draft model uses one.
    """
    seen = see_drafts(monkeypatch, rule)
    folder, draft = tmp_path / "model", tmp_path / "draft"
    make_checkpoint(family, folder, num_hidden_layers=2, intermediate_size=40)
    make_similar(folder, draft)
    config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 4}
    engine = engine_for(folder, speculative_config=config, async_scheduling=True)
    runner = engine.executor.model_runner
    if padded:
        for each in (runner.main, runner.draft):
            use_shapes(each)
    draw = Mock(side_effect=runner.draft.draw)
    monkeypatch.setattr(runner.draft, "draw", draw)
    work = []
    for index, request in enumerate(requests()):
        params = SamplingParams(
            max_tokens=20,
            ignore_eos=True,
            seed=index,
            temperature=index % 2,
            repetition_penalty=1.3 if index > 3 else 1,
            logprobs=2 if index == 1 else None,
            logit_bias=((17, 3.0),) if index == 2 else (),
            bad_words_token_ids={3: ((5,), (9,)), 5: ((5, 6),)}.get(index, ()),
        )
        # The words of the last one have to be looked for, but it has no drafts.
        work.append(replace(request, params=params, speculate=index < 5))
    assert tokens_of(engine, work) == tokens_of(engine_for(folder), work)
    stats = engine.stats()
    assert 0.2 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.8
    rows = [row for call in draw.call_args_list for row in call.args[0].scheduled]
    assert sum(row.max_move > 0 for row in rows) > len(rows) / 4
    guessing = []
    for number, (text, drafts) in enumerate(seen[::2]):
        params = next(req.params for req in work if text[:5] == req.prompt_token_ids[:5])
        guessing.append(Request(str(number), text, replace(params, max_tokens=len(drafts))))
    assert [drafts for _, drafts in seen[::2]] == tokens_of(engine_for(draft), guessing)


@pytest.mark.parametrize("draws", [False, True])
def test_given_answers_take_the_place_of_what_is_sampled(folder: Path, draws: bool) -> None:
    """So that a benchmark knows which drafts are right."""
    config: dict[str, Any] = {"method": "suffix"}
    if draws:
        config = {"method": "draft_model", "model": str(folder)}
    engine = engine_for(folder, speculative_config=config, async_scheduling=True)
    runner = engine.executor.model_runner
    models = [runner.main, runner.draft] if draws else [runner]
    given = [model.give_answers(8, 24) for model in models]
    prompts = {seed: [5 + seed + place % 7 for place in range(20 + seed)] for seed in (11, 12)}
    texts = {seed: (prompt * 2)[2:26] for seed, prompt in prompts.items()}
    for seed, text in texts.items():
        for answers in given:
            answers.give(seed, len(prompts[seed]), text)
        params = SamplingParams(temperature=0.5, max_tokens=24, ignore_eos=True, seed=seed)
        engine.add_request(Request(str(seed), prompts[seed], params))
    answers = {str(seed): [] for seed in texts}
    while engine.has_unfinished:
        for output in engine.step():
            answers[output.request_id] += output.new_token_ids
    assert answers == {str(seed): text for seed, text in texts.items()}
    stats = engine.stats()
    assert stats.num_accepted_tokens > 10
    assert not draws or stats.num_accepted_tokens == stats.num_draft_tokens


def test_drafts_of_an_mtp_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are transformers' own, after right and wrong ones in flight, in padded steps."""
    seen = see_drafts(monkeypatch, AnyDrafts)
    product = Mock(side_effect=experts_module.experts)
    monkeypatch.setattr(experts_module, "experts", product)
    make_predicting("glm4-moe", tmp_path, num_likely=4)
    config = {"method": "mtp", "num_speculative_tokens": 2}
    engine = engine_for(
        tmp_path, speculative_config=config, async_scheduling=True, enable_prefix_caching=False
    )
    runner = engine.executor.model_runner
    shapes = [use_shapes(each) for each in (runner.main, runner.draft)]
    oracle = DraftOracle(tmp_path)
    for index in range(4):
        prompt = [(7 * index + 3 * place) % 190 + 3 for place in range(1 + 9 * index)]
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        engine.add_request(Request(f"r{index}", prompt, params))
    while engine.has_unfinished:
        engine.step()
    stats = engine.stats()
    assert 10 < stats.num_accepted_tokens < 0.8 * stats.num_draft_tokens
    assert sum(bool(drafts) for _, drafts in seen) > 20
    oracle.confirm(seen)
    assert {StepShape.drafted(0, 16), StepShape.drafted(4, 16)} & set(shapes[0])
    assert {StepShape.decodes(4), StepShape.mixed(4, 64)} <= set(shapes[1])
    # The experts of all layers but the last know which rows are padding.
    slots = [call.kwargs["slots"] for call in product.call_args_list]
    padded = [each for each in slots if each is not None and bool((each < 0).any())]
    assert len(padded) > 5 and None in slots


def test_tokens_with_an_mtp_layer_are_those_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_drafts_free(monkeypatch)
    make_always_right("glm4-moe", tmp_path)
    config = {"method": "mtp", "num_speculative_tokens": 3}
    engine = engine_for(tmp_path, speculative_config=config, async_scheduling=True)
    assert answers_of(engine) == answers_of(engine_for(tmp_path))
    stats = engine.stats()
    assert stats.num_draft_tokens > 40
    assert stats.num_accepted_tokens > 0.95 * stats.num_draft_tokens


def test_tokens_of_adapters_with_an_mtp_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_drafts_free(monkeypatch)
    sizes = {"num_hidden_layers": 2, "first_k_dense_replace": 2}
    oracle = LoraOracle("glm4-moe", tmp_path, **sizes)
    make_predicting("glm4-moe", oracle.folder, **sizes)
    config = {"method": "mtp", "num_speculative_tokens": 3}
    options = lora_options(oracle, speculative_config=config, async_scheduling=True)
    engine = engine_for(oracle.folder, **options)
    work = oracle.requests(4, 30, 8)
    oracle.confirm(work, run_requests(engine, work))
    assert engine.stats().num_draft_tokens > 20


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_graphs_of_an_mtp_layer_are_captured_on_padding(tmp_path: Path) -> None:
    """A graph is captured without any sequence, and an idle step may be as long as a sequence.

    What is computed of padding depends on what the memory holds, and may be no number.
    """
    make_predicting("glm4-moe", tmp_path, num_hidden_layers=2)
    config = {"method": "mtp"}
    sizes = {"max_num_batched_tokens": 48, "max_model_len": 48, "max_num_seqs": 1}
    engine = engine_for(tmp_path, speculative_config=config, async_scheduling=True, **sizes)
    runner = engine.executor.model_runner
    for each in (runner.main, runner.draft):
        each.run_largest()
        with torch.inference_mode():
            nothing = each._inputs.update(ScheduledBatch.of([]))
            for shape in captured_shapes(each._limits):
                each._inputs.send(nothing, shape)
                each._run(shape)


class Event:
    """An event of a device that computes nothing before it has to."""

    num_recorded = num_complete = 0

    def record(self) -> None:
        Event.num_recorded += 1
        self.number = Event.num_recorded

    def synchronize(self) -> None:
        Event.num_complete = max(Event.num_complete, self.number)

    def elapsed_time(self, end: Event) -> float:
        assert max(self.number, end.number) <= Event.num_complete, "the device has not come so far"
        return 1.0


def recorded() -> Event:
    event = Event()
    event.record()
    return event


def test_the_time_of_a_pass_is_read_once_it_is_known(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_drafts_free(monkeypatch)
    config = {"method": "draft_model", "model": str(folder)}
    engine = engine_for(folder, speculative_config=config)
    device = Mock(new_event=Event, record_time=recorded)
    monkeypatch.setattr(engine.executor.model_runner.draft._transfer, "_gpu", device)
    for bias in ((), ((17, 3.0),)):  # the host waits for each pass where logits have a bias
        engine.add_request(Request("r", [5, 6, 7], SamplingParams(max_tokens=6, logit_bias=bias)))
        while engine.has_unfinished:
            engine.step()
    assert Event.num_complete > 4
