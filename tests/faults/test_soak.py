"""Mixed load for a while, with a fault every 30 seconds."""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from servers import metrics, serve_demo, wait_for
from soak_calls import Known, learn
from soak_faults import FAULTS, Harm
from soak_footprint import Footprint
from soak_load import MIXED, Load, Tally
from soak_report import Report

from paged_backend.launch.server_process import RunningServer
from paged_backend.tools.machine import circumstances

pytestmark = [pytest.mark.server, pytest.mark.soak]

MINUTES = float(os.environ.get("SOAK_MINUTES", "20"))
NUM_CALLERS = 16
FAULT_EVERY_S = min(30.0, MINUTES * 60 / (2 * len(FAULTS)))  # in a short one, two rounds
MEMORY_GROWTH = 0.05
OPTIONS = {"step_timeout_s": 3, "max_waiting_requests": 64, "max_num_seqs": 32}


@pytest.mark.timeout(60 * (MINUTES + 10))
def test_soak(tmp_path: Path) -> None:
    with serve_demo(tmp_path, instances=2, **OPTIONS) as server:
        known = learn(server)
        warm_up_s = len(FAULTS) * FAULT_EVERY_S
        warm_up, _, _ = harmed(server, known, warm_up_s)
        assert not warm_up.lost, warm_up.lost
        before, restarts = quiet(server), metrics(server)["engine_restarts_total"]
        tally, harm, took_s = harmed(server, known, MINUTES * 60 - warm_up_s)
        after = quiet(server)
        shown = metrics(server)
        report = Report(
            circumstances=circumstances(["torch", "nvidia-pytriton"]),
            minutes=round(took_s / 60, 1),
            callers=NUM_CALLERS,
            calls=by_kind(tally),
            faults=dict(Counter(harm.done)),
            engines=int(shown["engine_restarts_total"] - restarts),
            lost=tally.lost,
            pauses_s=tally.pauses(harm.engine_ends),
            leaked_blocks=int(shown["kv_blocks_used"]),
            before=before,
            after=after,
        )
    print("\n" + report.table())
    if "SOAK_SAVE" in os.environ:
        report.save(Path(os.environ["SOAK_SAVE"]))
    assert not report.lost, report.lost
    assert report.leaked_blocks == 0
    assert not after.growth_over(before, memory=MEMORY_GROWTH)
    assert set(MIXED) <= set(report.calls)
    assert report.engines > 0


def harmed(server: RunningServer, known: Known, duration_s: float) -> tuple[Tally, Harm, float]:
    """Callers ask for so long, and are harmed; what became of it, and how long it really took."""
    tally = Tally()
    started = time.monotonic()
    with (
        Load(server, known, tally, NUM_CALLERS),
        Harm(server, known, tally, NUM_CALLERS) as harm,
    ):
        while (due := (len(harm.done) + 0.5) * FAULT_EVERY_S) < duration_s:
            time.sleep(max(0.0, started + due - time.monotonic()))
            harm.do_next()
            print(f"{due:6.0f} s: {harm.done[-1]}; {tally.outcomes.total()} calls", flush=True)
        time.sleep(max(0.0, started + duration_s - time.monotonic()))
    return tally, harm, time.monotonic() - started


def quiet(server: RunningServer) -> Footprint:
    """What the server holds when nobody asks."""
    gauges = ("num_requests_running", "num_requests_waiting", "kv_blocks_used")

    def is_quiet() -> bool:
        shown = metrics(server)
        return shown["engine_up"] == 1 and not any(shown[name] for name in gauges)

    wait_for(is_quiet, 60, f"requests or blocks are left: {metrics(server)}")
    time.sleep(5)  # connections of clients that are gone are closed
    return Footprint.of(server)


def by_kind(tally: Tally) -> dict[str, dict[str, int]]:
    calls: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for (kind, outcome), number in sorted(tally.outcomes.items()):
        calls[kind][outcome] = number
    return dict(calls)
