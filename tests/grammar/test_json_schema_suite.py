"""JSON-Schema-Test-Suite: no invalid document is accepted, and each refusal names its reason."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from json_documents import accepts, compile_schema, load_samples, names_reason

GROUPS = load_samples(Path(__file__).parent / "data" / "json_schema_test_suite.jsonl.xz")
NUM_SERVED = 264


def test_no_invalid_document_is_accepted():
    counts: Counter[str] = Counter()
    accepted = []
    for group in GROUPS:
        try:
            matcher = compile_schema(group.schema)
        except ValueError as error:
            assert names_reason(str(error), group.schema), (group.name, str(error))
            counts["refused"] += 1
            continue
        counts["served"] += 1
        for test in group.tests:
            accepts_it = accepts(matcher, test["data"])
            counts[f"{'valid' if test['valid'] else 'invalid'}, accepted: {accepts_it}"] += 1
            if accepts_it and not test["valid"]:
                accepted.append((group.name, test["data"]))
    print(dict(counts))
    assert not accepted
    assert (counts["served"], counts["refused"]) == (NUM_SERVED, len(GROUPS) - NUM_SERVED)
    assert counts["valid, accepted: True"] > 500
