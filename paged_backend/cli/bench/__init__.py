"""``paged-backend bench``: measure the engine, against a peer on the same work and the device.

Each kind of bench is a module of this package; `options` holds what they share. The measurements of
a running server belong to the load tester, and other packages may add more: an entry point of the
group `paged_backend.bench` names a module with a function ``add_parser``.
"""

from __future__ import annotations

from importlib.metadata import entry_points

from paged_backend.cli.bench import (
    adapters,
    beams,
    decode,
    experts,
    host,
    offline,
    quality,
    speculation,
    states,
)
from paged_backend.cli.options import Subparsers

GROUP = "paged_backend.bench"
KINDS = (offline, decode, host, quality, experts, states, speculation, adapters, beams)


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's flags."""
    parser = subparsers.add_parser(
        "bench",
        help="measure speed, alone or compared with another engine",
        description="Measure the engine, against a peer on the same work and the device.",
    )
    kinds = parser.add_subparsers(required=True, metavar="KIND")
    for kind in KINDS:
        kind.add_parser(kinds)
    for entry in entry_points(group=GROUP):
        entry.load().add_parser(kinds)
