"""Readings of servers that a test makes up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paged_client import EngineView, SequenceView

from paged_backend.tools.scrape import parse_page
from paged_backend.tools.top.source import Reading

LABELS = 'model="paged_llm",version="1"'
COUNTS = {
    "num_requests_running": 0,
    "num_requests_waiting": 0,
    "kv_cache_usage_perc": 0,
    "kv_cache_utilization_perc": 1,
    "kv_blocks_total": 99,
    "kv_bytes_per_token": 1024,
    "kv_blocks_used": 0,
    "engine_up": 1,
    "num_preemptions_total": 0,
    "prompt_tokens_total": 0,
    "generation_tokens_total": 0,
    "prefix_cache_queries_total": 0,
    "prefix_cache_hits_total": 0,
    "engine_steps_total": 0,
}
BOUNDS = (0.01, 0.1, 1.0, 10.0)


def page(counts: Mapping[str, float] | None = None, **histograms: Sequence[float]) -> str:
    """A metrics page; a histogram is given by all that it has observed."""
    lines = [f"paged_{name}{{{LABELS}}} {n}" for name, n in {**COUNTS, **(counts or {})}.items()]
    for reason in ("stop", "length"):
        lines.append(f'paged_request_success_total{{finished_reason="{reason}",{LABELS}}} 3')
    for name, values in histograms.items():
        for bound in (*BOUNDS, float("inf")):
            number = sum(value <= bound for value in values)
            lines.append(f'paged_{name}_bucket{{le="{bound}",{LABELS}}} {number}')
        lines.append(f"paged_{name}_sum{{{LABELS}}} {sum(values)}")
    return "\n".join(lines)


def reading(
    at_s: float,
    counts: Mapping[str, float] | None = None,
    view: EngineView | None = None,
    why_no_view: str = "",
    **histograms: Sequence[float],
) -> Reading:
    return Reading(at_s, parse_page(page(counts, **histograms)), view, why_no_view)


def sequence(
    name: str, block_ids: Sequence[int] = (), status: str = "running", index: int = 0
) -> SequenceView:
    """One that decodes, its blocks full but for the last slot."""
    num_tokens = 16 * len(block_ids) if block_ids else 40
    return SequenceView(
        request_id=name,
        index=index,
        status=status,
        num_prompt_tokens=num_tokens - 5,
        num_tokens=num_tokens,
        num_computed_tokens=num_tokens - 1 if block_ids else 0,
        block_ids=tuple(block_ids),
    )


def view(*sequences: SequenceView, cached: Sequence[int] = (), num_blocks: int = 100) -> EngineView:
    return EngineView(16, num_blocks, sequences, tuple(cached))
