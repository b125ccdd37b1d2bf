"""Real schemas: each is served or refused for a named reason, and finished documents are valid."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from json_documents import (
    ExactValidator,
    Sample,
    accepts_text,
    compile_schema,
    load_samples,
    names_reason,
    random_document,
)
from llguidance import LLMatcher

from paged_backend import LLM, SamplingParams
from paged_backend.values.structured_outputs import StructuredOutputsParams

STORE = load_samples(Path(__file__).parent / "data" / "schemastore.jsonl.xz")
NUM_STORE_SERVED = 56
BENCH = os.environ.get("JSONSCHEMABENCH", "")  # made by draw_json_schemas.py
NUM_BENCH_SERVED = 239
Served = list[tuple[Sample, LLMatcher]]


def compile_all(samples: Sequence[Sample]) -> tuple[Served, Counter[str]]:
    """Return the schemas that are served, and the number of refusals by their reason."""
    served: Served = []
    refused: Counter[str] = Counter()
    for sample in samples:
        try:
            served.append((sample, compile_schema(sample.schema)))
        except ValueError as error:
            assert names_reason(str(error), sample.schema), (sample.name, str(error))
            refused[str(error)[:60]] += 1
    return served, refused


def walk_all(served: Served, num_walks: int) -> Counter[str]:
    """Check the documents of random walks; returns how many ended."""
    counts: Counter[str] = Counter()
    for sample, matcher in served:
        validator, rng = ExactValidator(sample.schema), random.Random(sample.name)
        for _ in range(num_walks):
            text = random_document(matcher, rng, max_tokens=300)
            counts["finished" if text else "unfinished"] += 1
            assert text is None or not validator.problem(text), (sample.name, text)
    return counts


def ask_all(served: Served, n: int) -> Counter[str]:
    """Check the documents of the demo model; returns how the answers ended."""
    prompts = ["Answer in JSON:"] * len(served)
    params = [
        SamplingParams(
            temperature=1.0,
            seed=index,
            n=n,
            max_tokens=256,
            structured_outputs=StructuredOutputsParams(json=sample.schema),
        )
        for index, (sample, _) in enumerate(served)
    ]
    counts: Counter[str] = Counter()
    answers = LLM("demo").generate(prompts, params)
    for (sample, _), answer in zip(served, answers, strict=True):
        validator = ExactValidator(sample.schema)
        for output in answer.outputs:
            counts[str(output.finish_reason)] += 1
            if output.finish_reason == "stop":
                assert not validator.problem(output.text), (sample.name, output.text)
    return counts


def test_schemas_of_schemastore():
    served, refused = compile_all(STORE)
    assert (len(served), refused.total()) == (NUM_STORE_SERVED, len(STORE) - NUM_STORE_SERVED)
    assert walk_all(served, 2)["finished"] > 90
    assert ask_all(served[:16], 1)["stop"] > 3


@pytest.mark.soak
@pytest.mark.skipif(not BENCH, reason="JSONSCHEMABENCH names no file of draw_json_schemas.py")
def test_schemas_of_jsonschemabench():
    samples = load_samples(Path(BENCH))
    served, refused = compile_all(samples)
    tests: Counter[str] = Counter()
    for sample, matcher in served:
        for test in sample.tests:
            is_accepted = accepts_text(matcher, json.dumps(test["data"], ensure_ascii=False))
            tests[f"{'valid' if test['valid'] else 'invalid'}, accepted: {is_accepted}"] += 1
            assert test["valid"] or not is_accepted, (sample.name, test["data"])
    walks, answers = walk_all(served, 3), ask_all(served, 2)
    print(f"\n{len(served)} of {len(samples)} served; refused:")
    for reason, count in refused.most_common():
        print(f"{count:4} {reason}")
    print(f"instances: {dict(tests)}\nwalks: {dict(walks)}\nanswers: {dict(answers)}")
    assert len(served) == NUM_BENCH_SERVED
