"""Constrained answers of the demo model: against transformers, with and without forced tokens."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LogitsProcessor
from valid_json import validate

from paged_backend import LLM, SamplingParams
from paged_backend.checkpoint.bundled import MODEL_DIR
from paged_backend.core import step_results
from paged_backend.engine.engine import Engine
from paged_backend.grammar import limits
from paged_backend.grammar.build import build_grammar
from paged_backend.grammar.compiler import LlguidanceCompiler
from paged_backend.grammar.matcher import Matcher, compile_grammar
from paged_backend.grammar.vocabulary import load_vocabulary
from paged_backend.values.errors import InvalidRequest
from paged_backend.values.output_constraint import OutputConstraint
from paged_backend.values.request import Request
from paged_backend.values.structured_outputs import StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["function", "class", "module"]},
        "arguments": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 2},
        "score": {"type": "integer", "minimum": -10, "maximum": 1000},
    },
    "required": ["name", "kind", "arguments", "score"],
    "additionalProperties": False,
}
CONSTRAINTS = {
    "json": {"json": SCHEMA, "disable_any_whitespace": True},
    "spaced": {"json": SCHEMA},
    "regex": {"regex": r"(os|sys)\.[a-z]{2,6}\([0-9]{1,3}\)"},
    "choice": {"choice": ["yes", "no", "maybe"]},
    "gbnf": {"grammar": 'root ::= "- " [a-z]+ ("\\n- " [a-z]+){2}'},
}
PROMPTS = ("What does os.path.join do?", "Answer in JSON:", "Tell me about sorted().")


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo")


class Masking(LogitsProcessor):
    """Applies the masks of a matcher that follows the tokens after the prompt."""

    def __init__(self, matcher: Matcher, num_prompt_tokens: int) -> None:
        self._matcher = matcher
        self._num_seen = num_prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        new = input_ids[0, self._num_seen :].tolist()
        assert self._matcher.accept(new)
        self._num_seen += len(new)
        bits = np.unpackbits(np.frombuffer(self._matcher.mask(), np.uint8), bitorder="little")
        return scores.masked_fill(torch.from_numpy(bits[: scores.shape[1]] == 0), -torch.inf)


@pytest.fixture(scope="module")
def peer() -> AutoModelForCausalLM:
    return AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)


def run(
    engine: Engine, requests: list[Request], *, late: tuple[Request, ...] = ()
) -> dict[tuple[str, int], tuple[list[int], str]]:
    """The tokens and finish reason of each completion; `late` requests join after 3 steps."""
    answers: dict[tuple[str, int], tuple[list[int], str]] = {}
    for request in requests:
        engine.add_request(request)
    step = 0
    while engine.has_unfinished or late:
        if step == 3:
            for request in late:
                engine.add_request(request)
            late = ()
        for output in engine.step():
            tokens, _ = answers.setdefault((output.request_id, output.index), ([], ""))
            tokens += output.new_token_ids
            answers[output.request_id, output.index] = tokens, str(output.finish_reason)
        step += 1
    engine.scheduler.check_invariants()
    return answers


def grammar_of(constraint: dict) -> str:
    return build_grammar(OutputConstraint(StructuredOutputsParams.of(constraint)), {})


def request(llm: LLM, name: str, constraint: dict | None, prompt: str, **params) -> Request:
    grammar = "" if constraint is None else grammar_of(constraint)
    options = SamplingParams(**{"max_tokens": 60, "temperature": 0, **params})
    return Request(name, llm.tokenizer.encode(prompt), options, grammar=grammar)


@pytest.mark.parametrize("kind", CONSTRAINTS)
def test_greedy_tokens_equal_those_of_transformers_under_the_same_masks(llm, peer, kind):
    info = llm.engine.executor.info
    vocabulary = load_vocabulary(MODEL_DIR, info.vocab_size, info.eos_token_ids)
    requests = [
        request(llm, str(index), CONSTRAINTS[kind], prompt) for index, prompt in enumerate(PROMPTS)
    ]
    answers = run(llm.engine, requests)
    for asked in requests:
        matcher = Matcher(compile_grammar(vocabulary, asked.grammar), info.eos_token_ids)
        ids = torch.tensor([asked.prompt_token_ids])
        masking = Masking(matcher, ids.shape[1])
        wanted = peer.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=asked.params.max_tokens,
            logits_processor=[masking],
            pad_token_id=0,
        )
        assert answers[asked.request_id, 0][0] == wanted[0, ids.shape[1] :].tolist()


SAMPLED = {"temperature": 1.0, "seed": 7, "top_p": 0.95, "repetition_penalty": 1.1}


@pytest.mark.parametrize("params", [{}, SAMPLED, SAMPLED | {"n": 3}], ids=["greedy", "seed", "n"])
@pytest.mark.parametrize("kind", CONSTRAINTS)
def test_forced_tokens_save_steps_and_change_nothing(llm, kind, params, monkeypatch):
    asked = request(llm, "a", CONSTRAINTS[kind], PROMPTS[0], **params)
    before = llm.engine.stats()
    forced = run(llm.engine, [asked])
    between = llm.engine.stats()
    monkeypatch.setattr(step_results, "can_be_forced", lambda seq: False)
    sampled = run(llm.engine, [asked])
    after = llm.engine.stats()
    assert forced == sampled
    num_saved = (after.num_steps - between.num_steps) - (between.num_steps - before.num_steps)
    assert num_saved > 0 or kind == "gbnf"
    assert (
        between.num_generation_tokens - before.num_generation_tokens
        == after.num_generation_tokens - between.num_generation_tokens
    )


def test_documents_are_valid(llm):
    params = SamplingParams(
        temperature=1.0,
        seed=3,
        n=8,
        max_tokens=200,
        structured_outputs=StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True),
    )
    [answer] = llm.generate(PROMPTS[1], params)
    finished = [part.text for part in answer.outputs if part.finish_reason == "stop"]
    assert len(finished) >= 6
    for text in finished:
        validate(json.loads(text), SCHEMA)


def test_other_requests_get_the_same_tokens_beside_constrained_ones(llm):
    free = [request(llm, f"free{i}", None, prompt) for i, prompt in enumerate(PROMPTS)]
    bound = [request(llm, kind, CONSTRAINTS[kind], PROMPTS[0]) for kind in CONSTRAINTS]
    alone = run(llm.engine, free) | run(llm.engine, bound)
    assert run(llm.engine, [*free, *bound[:2]], late=tuple(bound[2:])) == alone


@pytest.mark.parametrize("kind", CONSTRAINTS)
def test_a_resumed_answer_goes_on_as_if_nothing_had_happened(llm, kind):
    asked = request(llm, "a", CONSTRAINTS[kind], PROMPTS[0], n=2, **SAMPLED)
    whole = run(llm.engine, [asked])
    for cut in range(1, min(len(tokens) for tokens, _ in whole.values()), 4):
        progress = [whole["a", 0][0][:cut], whole["a", 1][0][: cut // 2]]
        llm.engine.add_request(replace(asked, request_id="b"), progress)
        rest = run(llm.engine, [])
        assert [before + rest["b", i][0] for i, before in enumerate(progress)] == [
            whole["a", 0][0],
            whole["a", 1][0],
        ]


def test_preempted_answers_are_the_same(llm):
    """A pool that is too small for all of them."""
    requests = [
        request(llm, str(index), CONSTRAINTS["spaced"], PROMPTS[0], temperature=1.0, seed=index)
        for index in range(6)
    ]
    roomy = run(llm.engine, requests)
    pool = LLM("demo", kv_cache_memory_bytes=2**24).engine.executor.info
    block_bytes = 2**24 // pool.num_blocks
    small = LLM("demo", max_model_len=128, kv_cache_memory_bytes=14 * block_bytes).engine
    assert run(small, requests) == roomy
    assert small.stats().num_preemptions > 0


def test_parameters_that_leave_no_token_end_the_request_with_a_reason(llm):
    asked = request(llm, "a", {"regex": "[0-9]+"}, PROMPTS[0], allowed_token_ids=[5])
    assert run(llm.engine, [asked]) == {("a", 0): ([], "error")}


def test_so_they_do_after_some_tokens(llm):
    digits = [llm.tokenizer.token_id(digit) for digit in "0123456789"]
    constraint = {"regex": "[0-9]{6}[a-z]"}
    asked = request(llm, "a", constraint, PROMPTS[0], allowed_token_ids=digits)
    tokens, reason = run(llm.engine, [asked])["a", 0]
    assert (len(tokens), reason) == (6, "error")
    assert set(tokens) <= set(digits)
    assert llm.engine.stats().num_used_blocks == 0


def test_a_grammar_that_meets_a_limit_ends_the_request_with_a_reason(llm, monkeypatch):
    monkeypatch.setattr(limits, "STEP_LEXER_FUEL", 50_000)
    schema = {"type": "object", "patternProperties": {"^.{1,255}$": {}}, "minProperties": 1}
    constraint = {"json": schema, "whitespace_pattern": r"[ \t]{0,2}(\r?\n[ \t]{0,40})?"}
    assert run(llm.engine, [request(llm, "a", constraint, PROMPTS[0])])["a", 0][1] == "error"


def test_the_offline_api_names_the_limit_beside_other_answers(llm):
    """A mask of this grammar is more work than one token may take, after the first token."""
    rules = " | ".join(" ".join("s" * length) for length in range(2, 20))
    grammar = f'start: "x" s\ns: {rules} | " " | ""'
    params = [
        SamplingParams(max_tokens=5, ignore_eos=True),
        SamplingParams(
            n=2, temperature=1.0, structured_outputs=StructuredOutputsParams(grammar=grammar)
        ),
    ]
    free, constrained = llm.generate([PROMPTS[0]] * 2, params)
    assert [(out.finish_reason, out.problem) for out in free.outputs] == [("length", "")]
    problem = "structured_outputs: the grammar needs too much work for one token"
    assert {(out.finish_reason, out.problem) for out in constrained.outputs} == {("error", problem)}


def test_ignore_eos_goes_on_where_the_grammar_can(llm):
    longer = request(llm, "a", {"regex": "(ab)+"}, PROMPTS[0], ignore_eos=True, max_tokens=9)
    tokens, reason = run(llm.engine, [longer])["a", 0]
    assert (len(tokens), reason) == (9, "length")
    for more in ({}, {"logprobs": 0}):
        ended = request(llm, "b", {"choice": ["ab"]}, PROMPTS[0], ignore_eos=True, **more)
        tokens, reason = run(llm.engine, [ended])["b", 0]
        assert (llm.tokenizer.decode(tokens), reason) == ("ab", "stop")


def test_a_grammar_that_fails_in_the_engine_ends_its_request_alone(llm):
    free = request(llm, "free", None, PROMPTS[0])
    broken = replace(request(llm, "broken", None, PROMPTS[0], n=2), grammar="start: [")
    answers = run(llm.engine, [broken, free])
    assert answers["broken", 0] == answers["broken", 1] == ([], "error")
    assert len(answers["free", 0][0]) > 0


def test_requests_can_be_ended_while_their_grammars_are_compiled(llm):
    engine = llm.engine
    for end in (engine.abort_request, engine.cancel_request):
        engine.add_request(request(llm, "a", CONSTRAINTS["json"], PROMPTS[0], n=2))
        assert engine.is_open("a") and engine.has_unfinished
        outputs = end("a")
        assert not engine.is_open("a") and not engine.has_unfinished
    assert [(out.index, out.finish_reason) for out in outputs] == [(0, "abort"), (1, "abort")]
    assert engine.step() == []


def test_without_a_compiler_a_grammar_is_refused(llm):
    engine = Engine(llm.config, llm.engine.executor)
    with pytest.raises(InvalidRequest, match="^structured_outputs: "):
        engine.add_request(request(llm, "a", CONSTRAINTS["json"], PROMPTS[0]))
    assert isinstance(llm.engine._grammars, LlguidanceCompiler)
