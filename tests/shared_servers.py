"""Files of tests that share a server run in one process, where the server starts once."""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling

FILES_OF = {
    "embedder": (
        "faults/test_embedding_faults.py",
        "gateway/test_embeddings_api.py",
        "integration/test_embeddings_served.py",
    ),
    "pipeline": ("integration/test_ensemble.py", "integration/test_equal_doors.py"),
    "tool_server": (
        "faults/test_bad_constraints.py",
        "gateway/test_gateway_tools.py",
        "integration/test_tools.py",
    ),
    "tools_gateway": (
        "gateway/test_inference_api.py",
        "gateway/test_messages_api.py",
        "gateway/test_recorded_requests.py",
        "gateway/test_responses_api.py",
    ),
}
"""The files of tests that use a session's fixture, by its name."""

_GROUP_OF = {f"tests/{file}": fixture for fixture, files in FILES_OF.items() for file in files}


class SharedServerScheduling(LoadFileScheduling):
    """Divides tests by files, but all files of a fixture in `FILES_OF` are one piece of work."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return _GROUP_OF.get(file, file)
