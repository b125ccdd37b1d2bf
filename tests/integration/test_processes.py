"""What a server leaves behind, and a client that is interrupted. Deaths: see tests/faults."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from callers import Crowd, greedy
from paged_client import Client
from pipelines import OWN, write_part_of_pipeline
from servers import (
    MODEL,
    engine_of,
    is_alive,
    processes_of,
    region_prefix_of,
    serve_repository,
    wait_for,
)

from paged_backend.launch.repository import write_model_repository
from paged_backend.launch.server_process import launch_server
from paged_backend.process.lifetime import ProcessId
from paged_backend.values.server_memory import REGION_PREFIX, regions_with, remove_regions

pytestmark = pytest.mark.server
SECRET = "zebra-in-the-prompt"
SEED_OF_A_LONG_ANSWER = "7"  # at a temperature at which the model says anything


def folder_of(engine):
    """The folder in which the engine keeps its sockets."""
    command = engine.cmdline()
    return Path(command[command.index("--run-dir") + 1])


def regions_of(server):
    """The names of the memory that the server shares with its Python processes."""
    return {
        word
        for process in processes_of(server)
        for word in process.cmdline()
        if word.startswith("triton_python_backend_shm_region")
    }


def left_in_memory(names):
    return names & set(os.listdir("/dev/shm"))


def kill_family(process):
    """Kill a process and all below it; each is stopped first, so that none notices another's end.

    A parent is stopped before its children are listed, so it starts no further one. A child that
    runs for a moment only, like one that lists libraries, may have ended by itself.
    """
    family, unlisted = [], [process]
    while unlisted:
        member = unlisted.pop()
        with suppress(psutil.NoSuchProcess):
            member.suspend()
            family.append(member)
            unlisted += member.children()
    for member in family:
        member.kill()


@contextmanager
def a_pipeline(folder):
    """A server with a model and the steps around it, which have no engine."""
    write_part_of_pipeline(folder / "repository", MODEL, {"model": "demo"}, OWN)
    with serve_repository(folder) as server:
        with Client(server.grpc_url, timeout=60) as client:
            client.generate(SECRET * 80, max_tokens=1)  # more would overwrite it
        yield server


def test_nothing_is_left_of_servers_that_were_killed(tmp_path):
    """The next one removes it when all processes were killed, and they do when one server was."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    with a_pipeline(tmp_path / "first") as first:
        regions = regions_of(first)
        folder = folder_of(engine_of(first)).parent
        others = [psutil.Process(first.pid), *processes_of(first)]
        for process in others:  # stopped first, so that none notices the end of another
            process.suspend()
        for process in others:
            process.kill()
        wait_for(lambda: not any(map(is_alive, others)), 30)
        assert left_in_memory(regions) == regions
        assert folder.exists()
        with a_pipeline(tmp_path / "second") as second:
            assert not left_in_memory(regions)
            assert not folder.exists()
            engine = engine_of(second)
            folder = folder_of(engine)
            assert (folder / "engine.pid").read_text() == str(ProcessId.of(engine.pid))
            assert folder.stat().st_mode & 0o077 == 0
            kill_and_look_for_prompts(second)
        assert not is_alive(engine)
        assert not folder.parent.exists()


def kill_and_look_for_prompts(server):
    """Kill a server alone, within answers."""
    regions = regions_of(server)
    assert len(left_in_memory(regions)) > 2
    with ExitStack() as stack:
        crowd = stack.enter_context(Crowd(server, [greedy(i, 1500) for i in range(8)]))
        wait_for(lambda: crowd.have_tokens(10), 60)
        # A process that opened a file in time can read nothing in it later.
        files = [stack.enter_context(Path("/dev/shm", name).open("rb")) for name in regions]
        assert all(os.fstat(file.fileno()).st_size for file in files)
        os.kill(server.pid, signal.SIGKILL)
        # The server's own processes do it, so it works without our launcher, too.
        wait_for(lambda: not left_in_memory(regions), 30, "a region outlives the server")
        assert not any(os.fstat(file.fileno()).st_size for file in files)
    assert all(call.error is not None for call in crowd.calls)


def test_a_launcher_removes_the_memory_of_a_server_that_was_killed_while_it_loaded(tmp_path):
    write_model_repository(tmp_path / "repository", MODEL, {"model": "demo"}, 1)
    with launch_server(tmp_path / "repository") as server:
        process = psutil.Process(server.pid)
        wait_for(lambda: process.name() == "tritonserver", 30)  # it has its command line
        prefix = region_prefix_of(server)
        wait_for(lambda: regions_with(prefix), 60)
        kill_family(process)
        assert regions_with(prefix)
    assert not regions_with(prefix)


def test_a_region_in_use_and_a_region_of_another_user_stay(tmp_path):
    name = f"{REGION_PREFIX}test-{os.getpid()}"
    path = Path("/dev/shm", name)
    path.write_bytes(b"x" * 4096)
    try:
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
            assert remove_regions([name]) == {name}
        link = path.with_name(f"{name}-link")
        link.symlink_to(tmp_path / "target")
        (tmp_path / "target").write_text("kept")
        assert remove_regions([link.name, f"../../{tmp_path}/target"]) == {link.name}
        assert (tmp_path / "target").read_text() == "kept"
        link.unlink()
        assert remove_regions([name]) == set()
        assert not path.exists()
    finally:
        path.unlink(missing_ok=True)


def test_ctrl_c_in_generate_cancels_on_the_server(server):
    command = [sys.executable, "-m", "paged_backend.cli", "generate", "What does"]
    command += ["--url", server.running.grpc_url, "--max-tokens", "1900"]
    command += ["--temperature", "100", "--seed", SEED_OF_A_LONG_ANSWER]
    with server.aborting(1), subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
