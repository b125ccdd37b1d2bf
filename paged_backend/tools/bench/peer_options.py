"""The peers that `bench offline` and `bench decode` know, and the choice among them."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass

from paged_backend.values.errors import ConfigError

_FLOATS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class PeerKind:
    """What the benchmark must know of an engine."""

    script: str
    dtypes: tuple[str, ...]
    runs_on_gpu: bool
    decodes: bool = False  # whether `bench decode` measures it, too


PEERS = {
    "transformers": PeerKind("transformers_peer.py", _FLOATS, True, decodes=True),
    "vllm": PeerKind("vllm_peer.py", _FLOATS, True, decodes=True),
    "openvino": PeerKind("openvino_peer.py", ("float32", "bfloat16", "int8"), False),
    "llama.cpp": PeerKind("llama_cpp_peer.py", ("float32", "bfloat16", "int8"), False),
}
DTYPES = ("float32", "bfloat16", "int8")  # that a user may ask for


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """Which peer to measure.

    Raises:
        ConfigError: the peer needs an interpreter, or does not have the number format.
    """

    name: str
    python: str | None = None  # None: our own interpreter, for transformers only
    dtype: str | None = None  # None: our engine's

    def __post_init__(self) -> None:
        if self.python is None and self.name != "transformers":
            raise ConfigError(
                f"--peer {self.name} needs --peer-python, the interpreter of an environment with "
                "that engine (docs/benchmarks.md shows how to make one)"
            )
        if self.dtype is not None:
            self.check_dtype(self.dtype)

    def interpreter(self) -> str:
        """The Python that runs the peer.

        Raises:
            ConfigError: it cannot be started.
        """
        python = self.python or sys.executable
        if shutil.which(python) is None:
            raise ConfigError(f"--peer-python {python}: No such file, or it cannot be executed")
        return python

    @property
    def kind(self) -> PeerKind:
        """What the benchmark knows of this engine."""
        return PEERS[self.name]

    def check_dtype(self, dtype: str) -> None:
        """Check that the engine has a number format.

        Raises:
            ConfigError: it has not.
        """
        if dtype not in self.kind.dtypes:
            known = ", ".join(self.kind.dtypes)
            raise ConfigError(f"--peer-dtype {dtype}: {self.name} takes {known}")
