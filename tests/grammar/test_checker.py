"""What a tenant notices of the constraints of others, and what becomes of hostile ones."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile_schemas import hostile_schema

from paged_backend.grammar import offenses
from paged_backend.grammar.client import GrammarChecker
from paged_backend.grammar.offenses import MAX_OFFENSES, SHORT_LIMIT_S
from paged_backend.values.errors import InvalidRequest, RequestRefused
from paged_backend.values.output_constraint import OutputConstraint
from paged_backend.values.structured_outputs import StructuredOutputsParams


def constraint(**values: object) -> OutputConstraint:
    return OutputConstraint(StructuredOutputsParams.of(values))


def hostile(number: int) -> OutputConstraint:
    """A constraint that takes seconds, each another one."""
    return constraint(json=hostile_schema(number))


def costly(number: int) -> OutputConstraint:
    """A constraint that takes about 30 ms, and is allowed."""
    properties = {f"p{number}_{index}": {"type": "number"} for index in range(200)}
    return constraint(json={"type": "object", "properties": properties})


@pytest.fixture
def grammars() -> Iterator[GrammarChecker]:
    checked = GrammarChecker("demo", 2048)
    checked.grammar(constraint(choice=["a"]))
    yield checked


def processor_s(grammars: GrammarChecker) -> float:
    """Return the processor time of the processes; coarser clocks count in steps of 10 ms."""
    pids = [process.pid for process in grammars._sandbox._idle]
    times = (Path(f"/proc/{pid}/schedstat").read_text().split() for pid in pids)
    return sum(int(running_ns) for running_ns, *_ in times) / 1e9


def test_requests_with_other_salts_share_no_grammar(grammars: GrammarChecker) -> None:
    def used_s(salt: str) -> float:
        before = processor_s(grammars)
        grammars.grammar(costly(0), tenant="x", salt=salt)
        return processor_s(grammars) - before

    time.sleep(1.0)  # the spare process has started
    first, again, other = used_s("alice"), used_s("alice"), used_s("bob")
    assert again == 0
    assert min(first, other) > 0


def refusals(grammars: GrammarChecker, tenant: str, numbers: range) -> list[str]:
    found = []
    for number in numbers:
        with pytest.raises((InvalidRequest, RequestRefused)) as caught:
            grammars.grammar(hostile(number), tenant=tenant)
        found.append(str(caught.value))
    return found


TIMEOUT = "structured_outputs.json: schema_timeout: the structured output took over 0.5 s"


@pytest.mark.timeout(120)
def test_a_tenant_of_hostile_constraints_waits_and_the_others_do_not(
    grammars: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = refusals(grammars, "mallory", range(MAX_OFFENSES + 2))
    assert told[:MAX_OFFENSES] == [TIMEOUT] * MAX_OFFENSES
    for refusal in told[MAX_OFFENSES:]:
        assert refusal.startswith("rate_limited: 3 structured outputs of tenant 'mallory' took too")
    with pytest.raises(RequestRefused, match=r"in the last 60 s; retry after \d\d s$"):
        grammars.grammar(costly(1), tenant="mallory")
    assert grammars.grammar(constraint(choice=["a"]), tenant="mallory")  # known
    assert grammars.grammar(costly(1), tenant="alice")
    assert grammars.grammar(costly(2), tenant="")
    monkeypatch.setattr(offenses, "WINDOW_S", 0.1)
    time.sleep(0.2)
    assert grammars.grammar(costly(3), tenant="mallory")


@pytest.mark.timeout(120)
def test_clients_without_a_tenant_keep_a_part_of_the_time(grammars: GrammarChecker) -> None:
    told = refusals(grammars, "", range(10, 10 + MAX_OFFENSES + 1))
    assert told[:MAX_OFFENSES] == [TIMEOUT] * MAX_OFFENSES
    assert told[-1].startswith(
        f"rate_limited: schema_timeout: structured outputs without a tenant have {SHORT_LIMIT_S} s"
    )
    assert grammars.grammar(constraint(choice=["b"]), tenant="")


def test_a_constraint_that_took_too_long_is_not_tried_again(grammars: GrammarChecker) -> None:
    (first,) = refusals(grammars, "x", range(20, 21))
    started = time.monotonic()
    for _ in range(50):
        assert refusals(grammars, "x", range(20, 21)) == [first]
    assert time.monotonic() - started < 0.5
    assert grammars.grammar(costly(4), tenant="x")  # they were no further offenses
