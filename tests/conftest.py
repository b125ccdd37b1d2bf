"""Fixtures and settings of all tests, and the folders of their helpers."""

from __future__ import annotations

import ctypes
import gc
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:  # a machine with a GPU has neither of their packages
    from demo_server import Server
    from paged_client import Client
    from xdist.scheduler import Scheduling

for folder in ("", "core", "faults", "grammar", "process", "ranks"):
    sys.path.insert(0, str(Path(__file__).parent / folder))

from effort import examples, left_out  # noqa: E402  # needs the path
from file_order import mixed  # noqa: E402

# The time that an example takes depends on the machine and on what else it does.
settings.register_profile(
    "tests",
    deadline=None,
    max_examples=examples(100),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("tests")

# A shell that runs the tests in the background makes them ignore Ctrl-C, and so would every
# program that they start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Of modules and tests, which stay, there is nothing to collect: see pytest_collection_finish.
gc.disable()

_PIPELINE_STOP_S = 15.0  # a server that waits for requests it has lost count of takes twice as long


@pytest.hookimpl(tryfirst=True)  # before any test is deselected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only runs when everything is tried, and mix files with servers and others."""
    dropped = left_out(items)
    config.hook.pytest_deselected(items=[item for item in items if item in dropped])
    items[:] = mixed([item for item in items if item not in dropped])


@pytest.hookimpl(optionalhook=True)  # pytest-xdist has it
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling | None:
    """Divide tests by files such that those with a common server come to one process."""
    if config.getoption("dist") != "loadfile":
        return None
    from shared_servers import SharedServerScheduling

    return SharedServerScheduling(config, log)


def pytest_collection_finish() -> None:
    """Keep the garbage collector from looking at the modules and tests again and again.

    This saves 5% of the processor time, and as much of the collection's. What the collection has
    left for the collector is little, and looking for it takes a second.
    """
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Keep what sentencepiece 0.2.1 cannot free; the process ended by a fault after its report."""
    capsule = getattr(sys.modules.get("swig_runtime_data4"), "type_pointer_capsule", None)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(capsule))


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the demo model, for all tests that need no other options."""
    from demo_server import demo_server

    with demo_server(tmp_path_factory.mktemp("repository")) as server:
        yield server


@pytest.fixture(scope="session")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The demo model, with two instances, and its pipeline, also slow; it stops in time."""
    from demo_server import MAX_NUM_SEQS, MODEL, Server
    from pipelines import add_slow_models

    from paged_backend.launch.repository import write_pipeline
    from paged_backend.launch.server_process import start_server

    repository = tmp_path_factory.mktemp("pipeline")
    write_pipeline(repository, MODEL, {"model": "demo", "max_num_seqs": MAX_NUM_SEQS}, instances=2)
    add_slow_models(repository, MODEL)
    with start_server(repository) as running:
        yield Server(running)
        stopped = time.monotonic()
    assert time.monotonic() - stopped < _PIPELINE_STOP_S


@pytest.fixture(scope="session")
def tool_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model with tools that is served alone and in pipelines, and gets over many crashes."""
    from demo_server import MODEL, Server
    from pipelines import OWN, write_part_of_pipeline
    from tool_models import write_tool_model

    from paged_backend.launch.server_process import start_server

    folder = write_tool_model(tmp_path_factory.mktemp("models") / "tools")
    repository = tmp_path_factory.mktemp("repository")
    options = {"model": str(folder), "max_num_seqs": 16, "max_crashes_per_request": 100}
    write_part_of_pipeline(repository, MODEL, options, (*OWN, "llm_bls", "ensemble"))
    with start_server(repository) as running:
        yield Server(running)


@pytest.fixture(scope="session")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model of embeddings: two instances over one engine that computes prompts in chunks."""
    from demo_server import MODEL, Server
    from servers import marked

    from paged_backend.launch.repository import write_model_repository
    from paged_backend.launch.server_process import start_server

    repository = tmp_path_factory.mktemp("embedder")
    options = {"model": "demo", "task": "embed", "pooling_type": "mean"}
    options |= {"max_num_batched_tokens": 64, "max_num_seqs": 4}
    write_model_repository(repository, MODEL, options, instances=2)
    with start_server(repository, environment=marked(repository)) as running:
        yield Server(running)


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    from paged_client import Client

    with Client(server.running.grpc_url, "paged_llm", timeout=60) as client:
        yield client


@pytest.fixture(autouse=True, scope="session")
def tokenizer_process() -> Iterator[None]:
    """Let one process read the tokenizers of all tests, because its start takes a second."""
    from paged_backend.sandbox.client import Sandbox
    from paged_backend.text import resolution

    idle: list[Sandbox] = []

    class Kept(Sandbox):
        def close(self) -> None:
            idle.append(self)

    def take(*args: Any, **options: Any) -> Sandbox:
        return idle.pop() if idle else Kept(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resolution, "Sandbox", take)
        yield
    for sandbox in idle:
        Sandbox.close(sandbox)


@pytest.fixture(autouse=True, scope="session")
def template_process() -> Iterator[None]:
    """Let the same processes render the chat templates of all tests; a start takes a second."""
    from paged_backend.text import chat
    from paged_backend.text.template_client import TemplateClient

    class Shared(TemplateClient):
        def close(self) -> None:
            """Keep the processes for the next test."""

    shared = Shared()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat, "TemplateClient", lambda: shared)
        yield
    TemplateClient.close(shared)
