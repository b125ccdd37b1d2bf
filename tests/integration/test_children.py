"""What the launcher's children inherit: no secrets, and no code from the working directory."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import psutil
import pytest
from demo_server import Server
from numba.core.caching import UserProvidedCacheLocator
from paged_client import Client
from paged_client.gateway import KEYS_VARIABLE
from servers import wait_for

from paged_backend.launch.ports import ReservedEndpoints
from paged_backend.platforms.cpu import threads
from paged_backend.sampling import masking

pytestmark = pytest.mark.server

PAGED_BACKEND = Path(sys.executable).parent / "paged-backend"
PORTS = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0", "--openai-port", "0")
NO_PORTS = PORTS[:-2]
SECRET = "key-that-only-the-gateway-may-see"
FIRST_START = (
    "paged-backend: compiling kernels for this processor: this start takes longer than the next\n"
    "paged-backend: the engine runs demo: float32 with .* on cpu with CpuAttention, .* s\n"
    "paged-backend: the small model demo knows little: .*\n"
)
LEFT_OUT = "threads._wake_helpers-"  # begin of the names of a kernel's files
# Modules and packages that the launcher's children import.
HOSTILE = (
    *("uvicorn", "fastapi", "numpy", "zmq", "msgspec", "json", "logging", "transformers", "torch"),
    *("jinja2", "tritonclient", "grpc", "numba", "site", "sitecustomize", "usercustomize"),
    *("triton_python_backend_utils", "paged_backend", "paged_client", "paged_kernels"),
)


@dataclass(frozen=True)
class Launched:
    """A launcher whose children listen, and what it has said."""

    process: subprocess.Popen[str]
    line: str
    hostile_folder: Path

    @property
    def openai_url(self) -> str:
        return self.line.rpartition("OpenAI ")[2].strip()

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


def make_hostile(folder: Path) -> None:
    """Fill a folder with modules that leave a mark where something imports them."""
    for name in HOSTILE:
        mark = f"open({str(folder / f'{name}.imported')!r}, 'w').close()\n"
        (folder / f"{name}.py").write_text(mark)
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(mark)


def imported(folder: Path) -> list[str]:
    """The modules of a hostile folder that were imported."""
    return sorted(mark.stem for mark in folder.glob("*.imported"))


def cache_without_a_kernel(folder: Path) -> Path:
    """Copy what numba has compiled to a folder, except one small kernel; returns the folder."""
    for module in (threads, masking):
        source = Path(module.__file__)
        place = UserProvidedCacheLocator.get_suitable_cache_subpath(str(source))
        compiled = shutil.ignore_patterns(f"{LEFT_OUT}*", "*.pyc")
        shutil.copytree(source.parent / "__pycache__", folder / place, ignore=compiled)
    assert not [*folder.glob(f"*/{LEFT_OUT}*")]
    return folder


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Iterator[Launched]:
    """`paged-backend serve` in a hostile folder, with API keys, and a kernel not compiled before.

    The other kernels are those of the server that all tests share.
    """
    folder = tmp_path_factory.mktemp("hostile")
    make_hostile(folder)
    errors = tmp_path_factory.mktemp("errors") / "stderr"
    environment = os.environ | {
        KEYS_VARIABLE: SECRET,
        "NUMBA_CACHE_DIR": str(cache_without_a_kernel(tmp_path_factory.mktemp("kernels"))),
        "http_proxy": "http://127.0.0.1:1",  # nobody is there: children speak to this machine only
    }
    with (
        errors.open("w") as stderr,
        subprocess.Popen(
            [PAGED_BACKEND, "serve", "demo", *PORTS],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        line = process.stdout.readline()
        assert " is ready: " in line, errors.read_text()
        launched = Launched(process, line, folder)
        try:
            yield launched
        finally:
            children = launched.children()
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
        assert process.returncode == 0
        assert not psutil.wait_procs(children, timeout=10)[1]
        # Said in its time, and nothing else; `test_launch.py` has a start that says nothing.
        assert re.fullmatch(FIRST_START, errors.read_text())


def ask(launched: Launched) -> str:
    """A chat, after which every process is there, that of the templates too."""
    with openai.OpenAI(base_url=launched.openai_url, api_key=SECRET, timeout=60) as client:
        messages = [{"role": "user", "content": "What does len do?"}]
        chat = client.chat.completions.create(model="paged_llm", messages=messages, max_tokens=2)
        return str(chat.choices[0].message.content)


def test_children_import_nothing_from_the_working_directory(launched: Launched) -> None:
    assert ask(launched)
    assert imported(launched.hostile_folder) == []


def test_api_keys_reach_the_gateway_only(launched: Launched) -> None:
    assert ask(launched)
    commands = {p.pid: " ".join(p.cmdline()) for p in launched.children()}
    kinds = ("bin/tritonserver", "backend_stub", "engine_process", "template_process", "gateway")
    for kind in kinds:
        assert any(kind in command for command in commands.values()), (kind, commands)
    environments = {pid: Path(f"/proc/{pid}/environ").read_bytes() for pid in commands}
    holders = [commands[pid] for pid, text in environments.items() if SECRET.encode() in text]
    assert len(holders) == 1 and "paged_backend.cli gateway" in holders[0], holders


def test_the_printed_command_serves_without_the_launcher(tmp_path: Path) -> None:
    """In a hostile folder, too."""
    hostile = tmp_path / "hostile"
    hostile.mkdir()
    make_hostile(hostile)
    reserved = ReservedEndpoints("127.0.0.1", http_port=0, grpc_port=0, metrics_port=0)
    command = subprocess.run(
        [PAGED_BACKEND, "serve", "demo", *ports(reserved), "--write-to", tmp_path / "written"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=60,
    ).stdout.strip()
    with (
        reserved,
        subprocess.Popen(
            ["sh", "-c", f"exec {command} --log-file={tmp_path}/log"],
            cwd=hostile,
            env=os.environ | {KEYS_VARIABLE: SECRET},
            stderr=subprocess.PIPE,
            text=True,
        ) as server,
    ):
        try:
            with Client(reserved.endpoints.grpc_url, timeout=30) as client:
                wait_for(lambda: server.poll() is not None or client.is_ready(), 60)
                assert server.poll() is None, server.communicate()[1]
                assert client.generate("What does abs do?", max_tokens=4).num_output_tokens == 4
            processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children(True)]
            assert not [p.cmdline() for p in processes if KEYS_VARIABLE in p.environ()]
        finally:
            server.send_signal(signal.SIGINT)
            server.communicate(timeout=60)
    assert server.returncode == 0
    assert imported(hostile) == []


def ports(reserved: ReservedEndpoints) -> list[str]:
    found = reserved.endpoints
    numbers = {"http": found.http_port, "grpc": found.grpc_port, "metrics": found.metrics_port}
    return [word for name, port in numbers.items() for word in (f"--{name}-port", str(port))]


def serve_once(environment: dict[str, str], *before: str) -> tuple[str, str]:
    """Both outputs of a launcher that is stopped as soon as it is ready."""
    command = [*before, str(PAGED_BACKEND), "serve", "demo", *NO_PORTS]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    variables = {k: v for k, v in os.environ.items() if k != "XDG_RUNTIME_DIR"} | environment
    with subprocess.Popen(command, text=True, env=variables, **pipes) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    return line + rest, errors


CAN_MOUNT = not subprocess.run(
    ["unshare", "--user", "--map-root-user", "--mount", "true"], capture_output=True
).returncode


@pytest.mark.skipif(not CAN_MOUNT, reason="this user cannot mount")
@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("TMPDIR", r"cannot write TMPDIR/\S+: No space left on device"),
        (
            "/dev/shm",
            r"tritonserver ended before it was ready \(exit status 1\): failed to load .* shared "
            r"memory .*; /dev/shm has only 64 KiB of free space; its log is TMPDIR/\S+",
        ),
    ],
    ids=["temporary directory", "shared memory"],
)
def test_a_start_without_space_says_so_on_one_line(tmp_path: Path, place: str, says: str) -> None:
    temporary = str(tmp_path)
    mount = f"mount -t tmpfs -o size=64k none {place.replace('TMPDIR', temporary)}"
    out, errors = serve_once(
        {"TMPDIR": temporary},
        *("unshare", "--user", "--map-root-user", "--mount"),
        *("sh", "-c", f'{mount} && exec "$@"', "sh"),
    )
    assert out == ""
    expected = f"paged-backend: error: {says}\n".replace("TMPDIR", re.escape(temporary))
    assert re.fullmatch(expected, errors), errors
