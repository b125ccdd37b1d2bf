"""Workloads: requests generated from a recipe and a seed, or read from a file.

The load tester and the benches share them. Begin with `making`.
"""

from __future__ import annotations

from paged_backend.tools.workloads.making import make_requests
from paged_backend.tools.workloads.options import TokenizerContext, WorkloadOptions

__all__ = ["TokenizerContext", "WorkloadOptions", "make_requests"]
