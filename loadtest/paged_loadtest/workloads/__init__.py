"""Workloads: requests generated from a recipe and a seed, or read from a file."""

from __future__ import annotations

from paged_loadtest.workloads.making import make_requests
from paged_loadtest.workloads.options import TokenizerContext, WorkloadOptions

__all__ = ["TokenizerContext", "WorkloadOptions", "make_requests"]
