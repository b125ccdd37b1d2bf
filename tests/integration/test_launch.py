"""Starting, watching and stopping a real tritonserver, with a small model of the tests' own."""

from __future__ import annotations

import http.client
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import openai
import psutil
import pytest
from checkpoints import make_checkpoint
from paged_client import Client
from safetensors.torch import load_file, save_file

from paged_backend.launch.ports import Endpoints, ReservedEndpoints
from paged_backend.launch.repository import model_names, write_model_repository
from paged_backend.launch.served_names import ModelNames, read_names
from paged_backend.launch.server_process import (
    LaunchError,
    RunningServer,
    launch_server,
    start_server,
)
from paged_backend.launch.stderr_relay import StderrRelay
from paged_backend.values.errors import ConfigError

PAGED_BACKEND = Path(sys.executable).parent / "paged-backend"

ECHO_MODEL = """
import os, sys, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.set_max_batch_size(0)
        config.set_model_transaction_policy({"decoupled": True})
        config.add_input({"name": "text_input", "data_type": "TYPE_STRING", "dims": [1]})
        config.add_output({"name": "text_output", "data_type": "TYPE_STRING", "dims": [-1]})
        return config

    def initialize(self, args):
        failure = os.environ.get("ECHO_FAILS")
        if failure == "with a reason":
            print("paged-backend: error: no such checkpoint", file=sys.stderr, flush=True)
        if failure == "slowly":
            time.sleep(60)
        if failure:
            raise pb_utils.TritonModelException("cannot start")

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for text in (sys.prefix, str(os.listdir()), str(os.getppid())):
                final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
                output = pb_utils.Tensor("text_output", np.array([text.encode()], dtype=object))
                sender.send(
                    pb_utils.InferenceResponse([output]),
                    flags=final if text == str(os.getppid()) else 0,
                )

    def finalize(self):
        pass
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    folder = write_model_repository(root, "echo", {}, instances=2)
    (folder / "1" / "model.py").write_text(ECHO_MODEL)
    return root


@pytest.fixture(scope="module")
def echo_server(repository: Path) -> Iterator[RunningServer]:
    with start_server(repository) as running:
        yield running


def get(server: RunningServer, path: str, body: str | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection(server.http_url.removeprefix("http://"), timeout=10)
    try:
        connection.request("GET" if body is None else "POST", path, body)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder that takes what is otherwise put into /tmp; short, for sockets in it."""
    with tempfile.TemporaryDirectory(prefix="pb-", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        yield Path(folder)


@pytest.mark.server
def test_the_stub_streams_and_runs_this_interpreter_in_an_empty_folder(
    echo_server: RunningServer,
) -> None:
    status, text = get(echo_server, "/v2/models/echo/generate_stream", '{"text_input": "?"}')
    events = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line]
    assert status == 200
    assert [event["text_output"] for event in events] == [sys.prefix, "[]", str(echo_server.pid)]


@pytest.mark.server
def test_all_three_endpoints_are_where_the_server_says(echo_server: RunningServer) -> None:
    with Client(echo_server.grpc_url, "echo") as client:
        assert client.is_ready()
    assert echo_server.metrics_url.endswith(f":{echo_server.endpoints.metrics_port}/metrics")
    connection = http.client.HTTPConnection("127.0.0.1", echo_server.endpoints.metrics_port)
    connection.request("GET", "/metrics")
    assert b"nv_inference_count" in connection.getresponse().read()
    connection.close()


@pytest.mark.server
@pytest.mark.parametrize("path", ["systemsharedmemory/status", "logging", "trace/setting"])
def test_apis_that_reach_into_the_server_are_closed(echo_server: RunningServer, path: str) -> None:
    assert get(echo_server, f"/v2/{path}")[0] == 403


def frame(kind: int, flags: int, payload: bytes) -> bytes:
    """A frame of HTTP/2 on stream 1, or on none if it has settings."""
    stream = b"\0\0\0\1" if kind != 4 else bytes(4)
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream + payload


def field(name: str, value: str) -> bytes:
    """A header as HPACK has it, letter by letter."""
    texts = (name.encode(), value.encode())
    return b"\0" + b"".join(bytes((len(text),)) + text for text in texts)


def kinds_of_reply(
    server: RunningServer, headers: dict[str, str], call: str = "SystemSharedMemoryStatus"
) -> list[int]:
    """The kinds of HTTP/2 frames that answer a gRPC call, sent below all checks of a library."""
    path = f"/inference.GRPCInferenceService/{call}"
    given = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x"}
    given |= {"content-type": "application/grpc", "te": "trailers", **headers}
    block = b"".join(field(name, value) for name, value in given.items())
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, b"")
    kinds = []
    with socket.create_connection(("127.0.0.1", server.endpoints.grpc_port), 10) as connection:
        connection.sendall(preface + frame(1, 4, block) + frame(0, 1, bytes(5)))
        reply = connection.makefile("rb")
        while True:
            head = reply.read(9)
            reply.read(int.from_bytes(head[:3], "big"))
            kinds.append(head[3])
            if head[3] in (3, 7) or head[3] == 1 and head[4] & 1:  # reset, farewell, the last one
                return kinds


@pytest.mark.server
def test_who_reads_the_command_line_cannot_open_the_closed_apis(
    echo_server: RunningServer,
) -> None:
    """Any user of the machine can read it: with shared memory, prompts could be read."""
    (flag,) = (
        word
        for word in psutil.Process(echo_server.pid).cmdline()
        if word.startswith("--grpc-restricted-protocol=")
    )
    name, _, value = flag.partition("=")[2].partition(":")[2].rpartition("=")
    for line in (f"{name}: {value}", f"{name}:{value}", f"{name.replace(':', '%3a')}: {value}"):
        with socket.create_connection(
            ("127.0.0.1", echo_server.endpoints.http_port), 10
        ) as connection:
            request = f"GET /v2/systemsharedmemory/status HTTP/1.1\r\nHost: x\r\n{line}\r\n\r\n"
            connection.sendall(request.encode())
            assert not connection.recv(4096).startswith(b"HTTP/1.1 200")
    data = 0  # the kind of frame that an answer comes in
    assert data in kinds_of_reply(echo_server, {}, call="ServerLive")
    assert data not in kinds_of_reply(echo_server, {f"triton-grpc-protocol-{name}": value})
    assert data not in kinds_of_reply(echo_server, {name: value})


@pytest.mark.server
def test_a_port_in_use_is_refused_before_anything_starts(
    echo_server: RunningServer, repository: Path
) -> None:
    taken = echo_server.endpoints.grpc_port
    with (
        pytest.raises(ConfigError, match=f"--grpc-port: port {taken} is in use"),
        launch_server(repository, grpc_port=taken),
    ):
        pytest.fail("started")


@pytest.mark.server
def test_a_server_that_ends_by_itself_is_noticed_and_leaves_nothing(
    repository: Path, temporary: Path
) -> None:
    with start_server(repository) as running:
        stubs = psutil.Process(running.pid).children(recursive=True)
        regions = [Path("/dev/shm", stub.cmdline()[2]) for stub in stubs]
        assert len(regions) == 2 and all(region.exists() for region in regions)
        os.kill(running.pid, signal.SIGTERM)
        with pytest.raises(LaunchError, match=r"ended \(exit status 0\); its log is ") as error:
            running.wait()
    assert not any(stub.is_running() for stub in stubs)
    assert not any(region.exists() for region in regions)
    assert [str(path) for path in temporary.iterdir()] == [str(error.value).rpartition(" ")[2]]


@pytest.mark.server
def test_a_server_ends_with_a_launcher_that_was_killed(repository: Path, temporary: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from paged_backend.launch.server_process import start_server\n"
        "with start_server(Path(sys.argv[1])) as server:\n"
        "    print(server.pid, flush=True); time.sleep(60)\n"
    )
    command = shlex.join([sys.executable, "-c", code, str(repository)])
    with run_shell(command, temporary) as launcher:
        assert launcher.stdout is not None
        server = psutil.Process(int(launcher.stdout.readline()))
        processes = [server, *server.children(recursive=True)]
        launcher.kill()
        assert not psutil.wait_procs(processes, timeout=60)[1]


@pytest.mark.server
def test_the_stubs_own_reason_is_the_error_and_nothing_stays(
    repository: Path, temporary: Path
) -> None:
    with (
        pytest.raises(LaunchError, match="^no such checkpoint$"),
        start_server(repository, environment={"ECHO_FAILS": "with a reason"}),
    ):
        pytest.fail("started")
    assert not list(temporary.iterdir())


@pytest.mark.server
def test_without_a_reason_the_error_names_the_log(repository: Path, temporary: Path) -> None:
    with (
        pytest.raises(LaunchError, match=r"exit status 1\): .*cannot start; its log is /") as error,
        start_server(repository, environment={"ECHO_FAILS": "without a reason"}),
    ):
        pytest.fail("started")
    (log,) = temporary.iterdir()
    assert str(error.value).endswith(f" {log}")
    assert "cannot start" in log.read_text()


@pytest.mark.server
def test_a_stop_while_the_model_loads_does_not_wait_for_it(
    repository: Path, temporary: Path
) -> None:
    with launch_server(repository, environment={"ECHO_FAILS": "slowly"}) as running:
        threading.Timer(2.0, running.request_stop).start()
        assert not running.wait_until_ready(timeout_s=30)
    assert not psutil.pid_exists(running.pid)
    assert not list(temporary.iterdir())


def run_shell(command: str, temporary: Path) -> subprocess.Popen[str]:
    """A command in the foreground, as a user has it, with its temporary files in ``temporary``."""
    return subprocess.Popen(
        ["sh", "-c", f"exec {command}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(temporary)},
    )


def first_line(shell: subprocess.Popen[str]) -> str:
    """The first line that a command prints, which may take its time."""
    assert shell.stdout is not None
    return shell.stdout.readline()


@pytest.mark.server
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.thorough), signal.SIGTERM]
)
def test_serve_says_where_it_listens_and_ends_cleanly(
    number: signal.Signals, temporary: Path
) -> None:
    """Also where another user has taken the place of the runtime folder."""
    taken = taken_by_another_user(temporary)
    ports = "--http-port 0 --grpc-port 0 --metrics-port 0"
    with run_shell(
        f"{PAGED_BACKEND} serve demo --served-model-name toy {ports}", temporary
    ) as shell:
        line = first_line(shell)
        listening = re.fullmatch(
            r"toy is ready: HTTP http://(\S+), gRPC (\S+), metrics http://\S+/metrics\n", line
        )
        assert listening is not None, line + shell.communicate()[1]
        with Client(listening[2], "toy", timeout=30) as client:
            assert client.generate("What does abs do?", max_tokens=4).num_output_tokens == 4
        children = psutil.Process(shell.pid).children(recursive=True)
        shell.send_signal(number)
        out, errors = shell.communicate(timeout=60)
    assert out == ""
    # Said by the first start on a machine; tests/integration/test_children.py has one.
    expected = (
        "(paged-backend: compiling kernels for this processor.*\n)?"
        "paged-backend: the engine runs demo: float32 with .* on cpu .*\n"
        'paged-backend: the small model demo knows little: ask "What does abs do\\?" .*\n'
    )
    assert re.fullmatch(expected, errors), errors
    assert shell.returncode == 0
    assert not psutil.wait_procs(children, timeout=60)[1]
    assert list(temporary.iterdir()) == taken


def taken_by_another_user(folder: Path) -> list[Path]:
    """The runtime folder of this user, as another one's; nothing, if we may not give it away."""
    if os.geteuid() != 0:
        return []
    folder.chmod(0o1777)
    taken = folder / f"paged-backend-{os.getuid()}"
    taken.mkdir()
    os.chown(taken, 65534, 65534)
    return [taken]


@pytest.mark.parametrize(
    ("names", "triton", "flags"),
    [
        ([], "paged_llm", ()),
        (["toy"], "toy", ()),
        (["org/toy-1.5"], "toy-1.5", ("org/toy-1.5=toy-1.5",)),
        (["gpt-4o:latest"], "gpt-4o_latest", ("gpt-4o:latest=gpt-4o_latest",)),
        (["toy", "org/toy"], "toy", ("toy=toy", "org/toy=toy")),
        (["a/b/.c/"], "c", ("a/b/.c/=c",)),
    ],
)
def test_triton_gets_a_name_that_it_allows(
    names: list[str], triton: str, flags: tuple[str, ...]
) -> None:
    option = ("--served-model-name",) if flags else ()
    assert read_names(names, has_gateway=True) == ModelNames(triton, option + flags)


@pytest.mark.parametrize(
    ("names", "message"),
    [(["a", "a"], "'a' is given twice"), (["x="], "and '='"), (["-/"], "has no letter")],
)
def test_a_name_that_cannot_be_one_is_refused(names: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^--served-model-name: .*{message}"):
        read_names(names, has_gateway=True)


@pytest.mark.server
def test_several_models_are_served_by_their_names(temporary: Path) -> None:
    folder = temporary / "written"
    options = {"kv_cache_memory_bytes": 64000000}
    command = f"serve demo --served-model-name first --write-to {folder}"
    subprocess.run(f"{PAGED_BACKEND} {command}", shell=True, check=True)
    write_model_repository(folder / "models", "second", {"model": "demo-tools", **options}, 1)
    ports = "--http-port 0 --grpc-port 0 --metrics-port 0 --openai-port 0"
    with run_shell(
        f"{PAGED_BACKEND} serve --model-repository {folder}/models {ports}", temporary
    ) as shell:
        line = first_line(shell)
        assert line.startswith("first, second are ready: HTTP "), line + shell.communicate()[1]
        with openai.OpenAI(base_url=line.split()[-1], api_key="none") as client:
            assert {model.id for model in client.models.list()} == {"first", "second"}
            counts = [
                client.chat.completions.create(
                    model=name,
                    messages=[{"role": "user", "content": "What does len do?"}],
                    max_tokens=1,
                ).usage.prompt_tokens
                for name in ("first", "second")
            ]
        assert counts[0] < counts[1]  # as their chat templates differ
        children = psutil.Process(shell.pid).children(recursive=True)
        shell.send_signal(signal.SIGINT)
        shell.communicate(timeout=60)
    assert shell.returncode == 0
    assert not psutil.wait_procs(children, timeout=60)[1]
    assert list(temporary.iterdir()) == [folder]


@pytest.mark.server
def test_serving_what_is_no_checkpoint_is_one_line(temporary: Path) -> None:
    with run_shell(f"{PAGED_BACKEND} serve {temporary}", temporary) as shell:
        stdout, stderr = shell.communicate(timeout=60)
    assert shell.returncode != 0
    assert stdout == ""
    assert re.fullmatch(r"paged-backend: error: [^\n]+\n", stderr), stderr


@pytest.mark.parametrize("name", ["", "../up", "a b", ".hidden", "-flag", "a/b"])
def test_a_name_that_is_no_folder_and_no_url_part_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="model name"):
        write_model_repository(tmp_path, name, {}, instances=1)
    assert not list(tmp_path.iterdir())


def test_a_model_that_is_there_already_is_not_overwritten(tmp_path: Path) -> None:
    folder = write_model_repository(tmp_path, "mine", {"seed": 1}, instances=1)
    with pytest.raises(ConfigError, match="there already"):
        write_model_repository(tmp_path, "mine", {"seed": 2}, instances=1)
    assert json.loads((folder / "1" / "model.json").read_text()) == {"seed": 1}


@pytest.mark.parametrize("folder", ["missing", "."])
def test_a_folder_without_models_is_refused(tmp_path: Path, folder: str) -> None:
    with pytest.raises(ConfigError, match=r"no model"):
        model_names(tmp_path / folder)


def test_reserved_ports_go_to_nobody_else_but_to_the_server() -> None:
    with ReservedEndpoints("127.0.0.1", http_port=0, grpc_port=0, metrics_port=0) as reserved:
        endpoints = reserved.endpoints
        ports = {endpoints.http_port, endpoints.grpc_port, endpoints.metrics_port}
        assert len(ports) == 3
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", endpoints.http_port))
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", endpoints.http_port))
            server.listen()


@pytest.mark.parametrize(
    ("host", "http_port", "grpc_port", "problem"),
    [
        ("127.0.0.1", 18765, 18765, "must differ"),
        ("127.0.0.1", -1, 0, "--http-port: must be between 0 and 65535"),
        ("127.0.0.1", 0, 65536, "--grpc-port: must be between 0 and 65535"),
        ("192.0.2.1", 0, 0, "--host: '192.0.2.1' is no IPv4 address of this machine"),
        ("no.such.host.invalid", 0, 0, "--host: 'no.such.host.invalid' is no IPv4 address"),
    ],
)
def test_addresses_that_cannot_be_used_are_refused(
    host: str, http_port: int, grpc_port: int, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        ReservedEndpoints(host, http_port=http_port, grpc_port=grpc_port, metrics_port=0)


def test_a_server_on_every_address_is_reached_over_loopback() -> None:
    assert Endpoints("0.0.0.0", 1, 2, 3).grpc_url == "127.0.0.1:2"


def relayed(pieces: list[bytes], *, ready_after: int | None = None) -> tuple[bytes, list[str]]:
    """What a relay writes and keeps of ``pieces``, each written at once."""
    source, server_end = os.pipe()
    shown, target = os.pipe()
    relay = StderrRelay(source, target)
    for index, piece in enumerate(pieces):
        if index == ready_after:
            relay.release()
        os.write(server_end, piece)
    os.close(server_end)
    assert relay.wait(60)
    os.close(target)
    with os.fdopen(shown, "rb") as reader:
        return reader.read(), relay.errors


def test_a_progress_bar_passes_byte_for_byte() -> None:
    bar = [b"\r 10%|#  ", b"| 1/10", b"\r\n", b"paged", b"-backend loads\n", b"no newline"]
    assert relayed(bar) == (b"".join(bar), [])


def test_errors_before_the_model_is_ready_are_kept_once_and_not_written() -> None:
    pieces = [
        b"paged-backend: err",
        b"or: bad \xff folder\n",
        b"paged-backend: error: bad \xff folder\nother\n",
        b"error: creating server: Internal - failed to load all models\n",
    ]
    assert relayed(pieces) == (b"other\n", ["bad \ufffd folder"])


def test_errors_after_the_model_is_ready_are_written() -> None:
    line = b"paged-backend: error: the engine died\n"
    assert relayed([line], ready_after=0) == (line, ["the engine died"])


def test_output_that_nobody_reads_is_drained() -> None:
    source, server_end = os.pipe()
    shown, target = os.pipe()
    relay = StderrRelay(source, target)
    os.close(shown)
    for _ in range(100):
        os.write(server_end, b"x" * 4096 + b"\n")
    os.close(server_end)
    assert relay.wait(60)
    os.close(target)


def test_without_any_tritonserver_the_error_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['pytriton'] = None\n"
        "from pathlib import Path\n"
        "from paged_backend.values.errors import ConfigError\n"
        "from paged_backend.launch.server_files import find_server_files\n"
        "try: find_server_files(Path(sys.argv[1]))\n"
        "except ConfigError as error: print(error)\n"
    )
    outcome = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "pip install 'paged-backend[server]'" in outcome.stdout, outcome.stderr


@pytest.mark.server
@pytest.mark.parametrize(
    ("missing", "options", "message"),
    [
        (None, {"block_sise": 16}, "option block_sise is not known, did you mean block_size?"),
        (
            "model.layers.1.mlp.up_proj.weight",
            {"tokenizer": "demo"},
            "model.layers.1.mlp.up_proj.weight",
        ),
    ],
)
def test_a_start_that_cannot_work_is_one_line(
    tmp_path: Path, missing: str | None, options: dict[str, object], message: str
) -> None:
    """The front end finds one of these mistakes, the engine the other."""
    checkpoint = tmp_path / "checkpoint"
    make_checkpoint("llama2", checkpoint)
    if missing is not None:
        weights = checkpoint / "model.safetensors"
        tensors = load_file(weights)
        del tensors[missing]
        save_file(tensors, weights)
    repository = tmp_path / "repository"
    write_model_repository(repository, "paged_llm", {"model": str(checkpoint), **options}, 1)
    with pytest.raises(LaunchError, match=re.escape(message)) as caught:
        with start_server(repository):
            pass
    assert "\n" not in str(caught.value)
    assert "Traceback" not in str(caught.value)
