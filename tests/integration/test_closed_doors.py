"""What a caller of a running server cannot do, and what it does not tell."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.server
MARK = "zebra-in-the-prompt"
SHM = "/dev/shm/triton_python_backend"
REGION = "/v2/systemsharedmemory/region/x"


@pytest.mark.parametrize(
    ("verb", "path", "body"),
    [
        ("POST", f"{REGION}/register", {"key": "/x", "offset": 0, "byte_size": 64}),
        ("POST", f"{REGION}/unregister", {}),
        ("GET", "/v2/systemsharedmemory/status", None),
        ("POST", "/v2/cudasharedmemory/region/x/register", {}),
        ("POST", "/v2/trace/setting", {"trace_file": "/tmp/trace"}),
        ("POST", "/v2/logging", {"log_file": "/tmp/log", "log_verbose_level": 9}),
        ("POST", "/v2/repository/models/paged_llm/unload", {}),
        ("POST", "/v2/repository/models/x/load", {"parameters": {"file:1/model.py": "eA=="}}),
    ],
)
def test_what_is_the_operators_is_closed_to_clients(server, verb, path, body):
    with server.connection() as connection:
        connection.request(verb, path, None if body is None else json.dumps(body))
        response = connection.getresponse()
        text = response.read().decode()
    assert response.status in (403, 400, 503), (response.status, text)
    assert "restricted" in text or "not allowed" in text, text


def test_nothing_of_a_prompt_is_logged(server, client, capfd):
    messages = json.dumps([{"role": "user", "content": MARK}])
    server.post("generate", {"text_input": MARK, "max_tokens": 2})
    server.post("generate_stream", {"messages": messages, "stop": [MARK], "max_tokens": 2})
    for wrong in ("messages", "sampling_parameters", "cache_salt", "stop", "task", MARK):
        status, _ = server.post("generate", {"text_input": "x", wrong: f"[{MARK}"})
        assert status == 400 or wrong in ("stop", "cache_salt")
    with client.stream(MARK, max_tokens=1500, ignore_eos=True) as stream:
        next(iter(stream))  # and cancelled
    command = psutil.Process(server.running.pid).cmdline()
    (log,) = (word.partition("=")[2] for word in command if word.startswith("--log-file="))
    out, err = capfd.readouterr()
    text = Path(log).read_text()
    assert "paged_llm" in text  # it is the log
    assert MARK not in text + out + err
    # Nor can other users read it, or see prompts among the arguments of a process.
    assert os.stat(log).st_mode & 0o077 == 0
    for process in psutil.Process(server.running.pid).children(recursive=True):
        assert MARK not in " ".join(process.cmdline())


@pytest.mark.skipif(os.getuid() != 0, reason="only root can read as another user")
def test_other_users_cannot_read_what_the_server_and_its_processes_share(server):
    """tritonserver gives all users the right to read it, and it holds prompts and answers."""
    status, _ = server.post("generate", {"text_input": f"{MARK} " * 20, "max_tokens": 2})
    assert status == 200
    process = psutil.Process(server.running.pid)
    maps = (Path(f"/proc/{stub.pid}/maps").read_text() for stub in process.children())
    regions = sorted(
        {line.split()[-1] for text in maps for line in text.splitlines() if SHM in line}
    )
    assert len(regions) == 2, "each instance has one"
    assert any(MARK.encode() in Path(region).read_bytes() for region in regions)
    for region in regions:
        reading = subprocess.run(["cat", region], user=65534, capture_output=True)
        assert reading.returncode == 1 and not reading.stdout, region
        assert b"Permission denied" in reading.stderr


def test_another_salt_shares_nothing(server, client):
    prompt = "The same long prefix of two tenants. " * 8
    asked = {"max_tokens": 1, "return_num_cached_tokens": True}
    cached = {}
    for salt in ("one", "one", "two", ""):
        status, text = server.post("generate", {"text_input": prompt, "cache_salt": salt, **asked})
        assert status == 200, text
        cached.setdefault(salt, []).append(json.loads(text)["num_cached_tokens"])
    assert cached["one"][0] == cached["two"][0] == cached[""][0] == 0
    assert cached["one"][1] >= 16


@pytest.mark.parametrize("field", ["model", "tokenizer", "chat_template", "lora_name", "image"])
def test_a_path_from_a_client_is_refused(server, field):
    status, text = server.post("generate", {"text_input": "x", field: "/etc/passwd"})
    assert status == 400
    assert field in text or "LoRA" in text
    assert "root:" not in text
