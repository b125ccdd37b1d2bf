"""Downloads from the Hugging Face Hub, which a server here stands for."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hub_server import WRONG_TOKEN, Hub, Repository, running_hub

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
# Different contents, because equal files are downloaded once.
TEXTS = {
    name: name.encode()
    for name in (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer.model",
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
        "modules.json",
        "1_Pooling/config.json",
    )
}
SHARDED = TEXTS | {
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}
    ).encode(),
    SHARDS[0]: b"0" * 300_000,
    SHARDS[1]: b"1" * 300_000,
}
UNWANTED = dict.fromkeys(
    [
        "README.md",
        "model.safetensors",
        "model.fp16.safetensors",
        "consolidated.safetensors",
        "original/params.json",
        "original/consolidated.00.pth",
        "onnx/config.json",
        "onnx/model.onnx",
        "adapter/adapter_config.json",
        "assets/notes.txt",
        "fp16/model.safetensors",
        "openvino/openvino_model.bin",
        "pytorch_model.bin",
        "model-Q4_K_M.gguf",
        "training_args.pt",
    ],
    b"unwanted",
)

# A process that downloads what each line of stdin asks for: huggingface_hub reads its environment
# when it is imported.
DOWNLOADER = """
import json, os, sys
from huggingface_hub import constants
from paged_backend.checkpoint import hub, hub_download, hub_progress
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import ConfigError
from paged_backend.values import log
log.MAX_LINES = 1000  # the downloads of all tests are faster than those of an operator
log.log_to_stderr("info")
constants.DOWNLOAD_CHUNK_SIZE = 2**16
hub_progress.LOG_INTERVAL_S = 0
for line in sys.stdin:
    options = json.loads(line)
    os.environ["HF_TOKEN"] = options.pop("token", "")
    try:
        found = hub.resolve_checkpoint(EngineConfig(**options))
        answer = {"folder": str(found.model), "tokenizer": str(found.tokenizer)}
        answer |= {"commits": found.commits}
    except ConfigError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer), flush=True)
"""


class Downloader:
    """A process that downloads models, one at a time."""

    def __init__(self, endpoint: str, home: Path, stderr: Any, **environment: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", DOWNLOADER],
            env=os.environ
            | {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}
            | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )

    def ask(self, model: str, folder: Path, **options: Any) -> dict[str, Any]:
        """Download a model into a cache folder."""
        assert self._process.stdin is not None and self._process.stdout is not None
        line = json.dumps({"model": model, "download_dir": str(folder), **options})
        print(line, file=self._process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def error(self, model: str, folder: Path, **options: Any) -> str:
        """Return the error of a download; it is one line."""
        (line,) = self.ask(model, folder, **options)["error"].splitlines()
        return str(line)

    def end(self) -> None:
        self._process.communicate(timeout=30)


class Terminal:
    """A terminal whose contents are read as they come."""

    def __init__(self) -> None:
        master, self.fd = os.openpty()
        termios.tcsetwinsize(self.fd, (24, 100))
        self._text = ""
        self._more = threading.Condition()
        threading.Thread(target=self._take, args=(master,), daemon=True).start()

    def wait_for(self, pattern: str) -> None:
        """Wait until the contents match somewhere."""
        with self._more:
            assert self._more.wait_for(lambda: re.search(pattern, self._text), 10), self._text

    def _take(self, master: int) -> None:
        while True:
            data = os.read(master, 2**16).decode(errors="replace")
            with self._more:
                self._text += data
                self._more.notify()


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with running_hub() as hub:
        hub.repositories["org/sharded"] = Repository.of(SHARDED | UNWANTED)
        yield hub


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "stderr"


@pytest.fixture(scope="module")
def terminal() -> Terminal:
    return Terminal()


@pytest.fixture(scope="module")
def downloaders(
    hub: Hub, log: Path, terminal: Terminal, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Downloader]]:
    """They write to a log or a terminal, are offline, or have no server."""
    home = tmp_path_factory.mktemp("home")
    with log.open("w") as stderr:
        started = {
            "logged": Downloader(hub.url, home, stderr),
            "terminal": Downloader(hub.url, home, terminal.fd),
            "offline": Downloader(hub.url, home, None, HF_HUB_OFFLINE="1"),
            "unconnected": Downloader("http://127.0.0.1:1", home, None),
        }
    yield started
    for downloader in started.values():
        downloader.end()


@pytest.fixture
def downloader(downloaders: dict[str, Downloader]) -> Downloader:
    return downloaders["logged"]


def names(folder: str) -> set[str]:
    paths = Path(folder).rglob("*")
    return {str(path.relative_to(folder)) for path in paths if path.is_file()}


def test_what_is_needed_is_downloaded_once(
    hub: Hub, downloader: Downloader, tmp_path: Path
) -> None:
    hub.requests.clear()
    answer = downloader.ask("org/sharded", tmp_path)
    assert names(answer["folder"]) == set(SHARDED)
    assert hub.fetched("org/sharded") == sorted(SHARDED)
    sha = hub.repositories["org/sharded"].refs["main"]
    assert Path(answer["folder"]).name == sha
    assert (answer["tokenizer"], answer["commits"]) == (answer["folder"], {"revision": sha})
    assert downloader.ask("org/sharded", tmp_path) == answer
    assert hub.fetched("org/sharded") == sorted(SHARDED)


def test_a_single_file_of_weights(hub: Hub, downloader: Downloader, tmp_path: Path) -> None:
    hub.repositories["org/single"] = Repository.of(TEXTS | UNWANTED)
    answer = downloader.ask("org/single", tmp_path)
    assert names(answer["folder"]) == {*TEXTS, "model.safetensors"}


def test_weights_and_settings_as_quantizers_name_them(
    hub: Hub, downloader: Downloader, tmp_path: Path
) -> None:
    quantized = dict.fromkeys(("gptq_model-4bit-128g.safetensors", "quantize_config.json"), b"{}")
    others = dict.fromkeys(("adapter_model.safetensors", "training_args.bin"), b"unwanted")
    hub.repositories["org/gptq"] = Repository.of(TEXTS | quantized | others)
    answer = downloader.ask("org/gptq", tmp_path)
    assert names(answer["folder"]) == {*TEXTS, *quantized}


def test_random_weights_and_tokenizers_need_no_files_of_weights(
    hub: Hub, downloader: Downloader, tmp_path: Path
) -> None:
    hub.repositories["org/words"] = Repository.of(TEXTS | UNWANTED)
    answer = downloader.ask("org/sharded", tmp_path, load_format="dummy", tokenizer="org/words")
    assert names(answer["folder"]) == {*TEXTS, "model.safetensors.index.json"}
    assert names(answer["tokenizer"]) == set(TEXTS)
    assert answer["commits"] == {
        "revision": hub.repositories["org/sharded"].refs["main"],
        "tokenizer_revision": hub.repositories["org/words"].refs["main"],
    }


def test_revisions(hub: Hub, downloader: Downloader, tmp_path: Path) -> None:
    repository = Repository.of(SHARDED)
    hub.repositories["org/moving"] = repository
    first = repository.refs["main"]
    tagged = repository.commit(SHARDED | {"tokenizer.json": b"[]"}, "v1/rc")
    newest = repository.commit(SHARDED | {"config.json": b"[]"})
    for revision, expected in (("v1/rc", tagged), (first, first), ("main", newest), (None, newest)):
        answer = downloader.ask("org/moving", tmp_path, revision=revision)
        assert Path(answer["folder"]).name == expected
        assert answer["commits"] == {"revision": expected}
    answer = downloader.ask("org/moving", tmp_path, tokenizer_revision="v1/rc")
    assert Path(answer["folder"]).name == newest
    assert (Path(answer["tokenizer"]) / "tokenizer.json").read_bytes() == b"[]"
    assert answer["commits"] == {"revision": newest, "tokenizer_revision": tagged}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"revision": "nightly"},
            "option revision must be a branch, a tag or a commit hash of org/sharded on the "
            "Hugging Face Hub, got 'nightly'",
        ),
        (
            {"tokenizer_revision": "0" * 40},
            f"option tokenizer_revision must be .* of org/sharded on .*, got '{'0' * 40}'",
        ),
        ({"model": "org/none"}, "model org/none is neither a folder here nor a repository on "),
        ({"model": "org/none", "token": "hf_right"}, ".* neither .*token in use may not"),
        ({"token": WRONG_TOKEN}, ".* does not accept the token in use for model org/sharded"),
        (
            {"model": "org/gated"},
            "model org/gated is gated: request access at http://[^ ]*/org/gated, and set HF_TOKEN "
            r"to a token of the account that may read it \(HF_TOKEN is not set\)",
        ),
        ({"model": "org/gated", "token": "hf_right"}, r".* is gated: .*token in use may not\)"),
        ({"model": "org/down"}, "model org/down cannot be downloaded: .* answers 503"),
        (
            {"model": "org/pickled"},
            "model org/pickled has neither model.safetensors nor model.safetensors.index.json, but "
            r"pickled weights \(pytorch_model.bin\), which are not read; convert",
        ),
        (
            {"model": "org/gguf"},
            r"model org/gguf has neither .*, but GGUF files \(m-Q4_0.gguf, m-Q8_0.gguf\); download "
            "one of them with `hf download org/gguf FILE`, and give the path",
        ),
        (
            {"model": "org/huge"},
            "model org/huge needs 1.00EB in /[^ ]*, which has [^ ]*B left; make room, or set ",
        ),
        ({"model": "org/mistral"}, ".*; it has consolidated.safetensors$"),
        ({"model": "org/broken"}, "model org/broken: .* lists files that are not .*: gone.safe"),
        (
            {"model": "demo", "revision": "main"},
            "option revision is only for ids on the Hugging Face Hub; model 'demo' is bundled",
        ),
        (
            {"tokenizer": "demo", "tokenizer_revision": "main"},
            "option tokenizer_revision is only for .*; tokenizer 'demo' is bundled",
        ),
    ],
)
def test_one_line_says_what_is_wrong(
    hub: Hub, downloader: Downloader, tmp_path: Path, options: dict[str, str], expected: str
) -> None:
    index = {"model.safetensors.index.json": b'{"weight_map": {"a": "gone.safetensors"}}'}
    hub.repositories |= {
        "org/gated": Repository.of(SHARDED),
        "org/down": Repository.of(SHARDED),
        "org/huge": Repository.of(SHARDED),
        "org/pickled": Repository.of(TEXTS | {"pytorch_model.bin": b"", "onnx/model.bin": b""}),
        "org/gguf": Repository.of({"m-Q4_0.gguf": b"", "m-Q8_0.gguf": b"", "README.md": b""}),
        "org/mistral": Repository.of(TEXTS | {"consolidated.safetensors": b""}),
        "org/broken": Repository.of(TEXTS | index),
    }
    hub.repositories["org/gated"].gated = True
    hub.repositories["org/down"].down = True
    hub.repositories["org/huge"].claimed[SHARDS[0]] = 10**18
    error = downloader.error(**{"model": "org/sharded", "folder": tmp_path, **options})
    assert re.match(expected, error), error
    assert not any(path.suffix in (".bin", ".gguf") for path in tmp_path.rglob("*"))


def test_offline(
    hub: Hub, downloader: Downloader, downloaders: dict[str, Downloader], tmp_path: Path
) -> None:
    offline = downloaders["offline"]
    expected = (
        "HF_HUB_OFFLINE is set, and model org/sharded is not, or not completely, in the cache "
        f"folder {tmp_path}; download it while connected, or unset HF_HUB_OFFLINE"
    )
    hub.requests.clear()
    assert offline.error("org/sharded", tmp_path) == expected
    assert hub.requests == []
    answer = downloader.ask("org/sharded", tmp_path)
    hub.requests.clear()
    assert offline.ask("org/sharded", tmp_path) == answer
    (Path(answer["folder"]) / SHARDS[1]).unlink()
    assert offline.error("org/sharded", tmp_path) == expected
    assert hub.requests == []


def test_without_a_connection(
    hub: Hub, downloader: Downloader, downloaders: dict[str, Downloader], tmp_path: Path
) -> None:
    error = downloaders["unconnected"].error("org/sharded", tmp_path)
    assert re.match(
        "model org/sharded is not a folder here, and cannot be downloaded from http://127.0.0.1:1; "
        r"check the name and the connection \(ConnectError: .*refused",
        error,
    ), error
    answer = downloader.ask("org/sharded", tmp_path)
    assert downloaders["unconnected"].ask("org/sharded", tmp_path) == answer


def test_progress_in_a_log(hub: Hub, downloader: Downloader, log: Path, tmp_path: Path) -> None:
    before = log.stat().st_size
    folder = Path(downloader.ask("org/sharded", tmp_path)["folder"])
    text = log.read_bytes()[before:].decode()
    assert "\r" not in text
    lines = text.splitlines()
    what = f"org/sharded ({folder.name[:8]})"
    assert f"paged-backend: downloading {what}: 600kB in 2 files" in lines
    assert re.fullmatch(rf"paged-backend: downloaded {re.escape(what)} in \d+ s", lines[-1])
    steps = [
        re.fullmatch(
            rf"paged-backend: downloading {re.escape(what)}: [\d.]+k?B of 600kB \((\d+) %\), "
            r"[\d.]+[kMG]?B/s",
            line,
        )
        for line in lines
        if " of 600kB" in line
    ]
    assert all(steps)
    percents = [int(step[1]) for step in steps if step]
    assert percents == sorted(percents) and percents[-1] == 100 and len(set(percents)) > 2


def test_progress_on_a_terminal(
    hub: Hub, downloaders: dict[str, Downloader], terminal: Terminal, tmp_path: Path
) -> None:
    downloaders["terminal"].ask("org/sharded", tmp_path)
    terminal.wait_for(r"\rReconstruct.*600k.*\r")


def test_a_broken_download_goes_on(hub: Hub, downloader: Downloader, tmp_path: Path) -> None:
    repository = Repository.of(SHARDED)
    repository.cut, repository.failing = {SHARDS[0]: 200_000}, {SHARDS[1]}
    hub.repositories["org/cut"] = repository
    assert "503" in downloader.error("org/cut", tmp_path)
    assert hub.fetched("org/cut").count(SHARDS[0]) == 2  # the second for the rest
    repository.failing.clear()
    hub.requests.clear()
    folder = Path(downloader.ask("org/cut", tmp_path)["folder"])
    assert hub.fetched("org/cut") == [SHARDS[1]]
    assert all((folder / name).read_bytes() == SHARDED[name] for name in SHARDS)


def test_two_processes_at_once(
    hub: Hub, downloaders: dict[str, Downloader], tmp_path: Path
) -> None:
    hub.requests.clear()
    both = [downloaders["logged"], downloaders["terminal"]]
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda one: one.ask("org/sharded", tmp_path), both)
    assert first == second
    assert hub.fetched("org/sharded") == sorted(SHARDED)
