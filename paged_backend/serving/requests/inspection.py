"""The answer to the task ``inspect``."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict

from paged_backend.values.outputs import EngineView


def view_json(view: EngineView) -> str:
    """Return a view as JSON, with digests in place of request ids."""
    values = asdict(view)
    for entry in values["sequences"]:
        digest = hashlib.blake2b(entry["request_id"].encode(), digest_size=5)
        entry["request_id"] = digest.hexdigest()
    return json.dumps(values)
