"""The soak's result as a table."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from callers import quantile
from soak_footprint import Footprint


@dataclass(frozen=True)
class Report:
    """What happened after the warm-up."""

    circumstances: dict[str, str]
    minutes: float
    callers: int
    calls: dict[str, dict[str, int]]  # kind -> how they ended -> number
    faults: dict[str, int]
    engines: int  # that came after the first
    lost: list[str]
    pauses_s: list[float]
    leaked_blocks: int
    before: Footprint
    after: Footprint

    def save(self, folder: Path) -> None:
        """Write ``soak-demo-cpu.json`` and the table beside it."""
        values = asdict(self) | {"pauses_s": [round(pause, 3) for pause in sorted(self.pauses_s)]}
        (folder / "soak-demo-cpu.json").write_text(json.dumps(values, indent=1) + "\n")
        (folder / "soak-demo-cpu.md").write_text(self.table())

    def table(self) -> str:
        """Markdown."""
        total: Counter[str] = Counter()
        for outcomes in self.calls.values():
            total.update(outcomes)
        rows = [
            ("minutes", f"{self.minutes:.1f}"),
            ("callers at once", f"{self.callers}, in bursts ten times as many"),
            ("calls", f"{total.total()}: {_listed(total)}"),
            *((f"- {kind}", _listed(outcomes)) for kind, outcomes in self.calls.items()),
            ("faults", str(sum(self.faults.values()))),
            *((f"- {name}", str(number)) for name, number in self.faults.items()),
            ("engines started again", str(self.engines)),
            ("**calls lost**", f"**{len(self.lost)}**"),
            ("**KV blocks leaked**", f"**{self.leaked_blocks}**"),
            ("pause of a stream when the engine ends", self._pauses()),
            *(
                (f"{name.replace('_', ' ').replace(' mib', ', MiB')}: start, end", f"{was}, {now}")
                for (name, was), now in zip(
                    asdict(self.before).items(), asdict(self.after).values(), strict=True
                )
            ),
        ]
        lines = ["| soak of the demo model | |", "|---|---|"]
        lines += [f"| {name} | {value} |" for name, value in rows]
        about = ", ".join(f"{name} {value}" for name, value in self.circumstances.items())
        return "\n".join(lines) + f"\n\n{about}\n"

    def _pauses(self) -> str:
        p50, p99, most = (quantile(self.pauses_s, part) for part in (0.5, 0.99, 1.0))
        return f"{len(self.pauses_s)}: p50 {p50:.1f} s, p99 {p99:.1f} s, max {most:.1f} s"


def _listed(outcomes: dict[str, int]) -> str:
    return ", ".join(f"{number} {outcome}" for outcome, number in sorted(outcomes.items()))
