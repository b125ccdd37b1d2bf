"""Several ranks draw the same drafts, so their tokens are those of one rank without drafts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from comparison import EP2, EVEN, STEPS, TP2, TP2_PP2, assert_equal
from free_drafts import make_drafts_free
from prediction_layers import make_always_right
from ranks_in_threads import make_ranks_engine, torch_threads_restored
from requests_of_every_sort import answers_of

from paged_backend.values.errors import ConfigError

MTP = {"method": "mtp", "num_speculative_tokens": 3}


@pytest.fixture(autouse=True)
def torch_threads() -> Iterator[None]:
    """Leave torch's number of threads to other tests as it was."""
    with torch_threads_restored():
        yield


def compare(folder: Path, layout: dict[str, Any], drafts: dict[str, Any]) -> float:
    """Compare ranks with drafts and one rank without; returns the share of right drafts."""
    one = answers_of(make_ranks_engine(folder, **STEPS))
    engine = make_ranks_engine(folder, speculative_config=drafts, **STEPS, **layout)
    assert_equal(one, answers_of(engine), preempted=False)
    stats = engine.stats()
    assert stats.num_draft_tokens > 100
    return stats.num_accepted_tokens / stats.num_draft_tokens


@pytest.mark.parametrize("layout", [pytest.param(TP2, marks=pytest.mark.thorough), TP2_PP2])
def test_each_rank_has_the_whole_draft_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: dict[str, Any]
) -> None:
    make_drafts_free(monkeypatch)
    make_checkpoint("llama3", tmp_path, **EVEN)
    drafts = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 3}
    assert compare(tmp_path, layout, drafts) > 0.95


@pytest.mark.parametrize(
    ("family", "layout"), [("deepseek-v3", TP2), ("glm4-moe", EP2)], ids=["parts", "experts"]
)
def test_an_mtp_layer_is_divided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, layout: dict[str, Any]
) -> None:
    make_drafts_free(monkeypatch)
    make_always_right(family, tmp_path, **EVEN)
    assert compare(tmp_path, layout, MTP) > 0.95


def test_stages_have_no_hidden_states_for_an_mtp_layer(tmp_path: Path) -> None:
    make_checkpoint("llama3", tmp_path)
    with pytest.raises(ConfigError, match="mtp only with a pipeline_parallel_size of 1; got 2"):
        make_ranks_engine(tmp_path, speculative_config=MTP, **TP2_PP2)
