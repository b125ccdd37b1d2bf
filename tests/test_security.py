"""Claims of SECURITY.md that the code itself can be asked about."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

from paged_backend import LLM
from paged_backend.checkpoint.safetensors_files import weight_files
from paged_backend.core.block_hash import BlockHasher, load_or_create_key
from paged_backend.values.errors import ConfigError, place_of

ROOT = Path(__file__).parent.parent
PACKAGES = [
    ROOT / "paged_backend",
    *(ROOT / "client", ROOT / "kernels" / "paged_kernels", ROOT / "loadtest", ROOT / "docker"),
]
# What makes code or objects of bytes that somebody else may have written.
PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "jsonpickle"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
METHODS = {
    *("torch.load", "torch.jit.load", "yaml.load", "yaml.unsafe_load", "os.system", "os.popen"),
    *("numpy.load", "np.load", "pandas.read_pickle"),
}
PICKLING = {"send_pyobj", "recv_pyobj"}  # methods of ZeroMQ's sockets


@functools.cache
def trees() -> list[tuple[Path, ast.Module]]:
    """Return the modules of all packages."""
    paths = [path for package in PACKAGES for path in sorted(package.rglob("*.py"))]
    return [(path, ast.parse(path.read_text())) for path in paths]


@functools.cache
def calls() -> list[tuple[Path, ast.Call, str]]:
    """Return all calls, and what each of them calls."""
    return [
        (path, node, ast.unparse(node.func))
        for path, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    ]


def test_nothing_is_pickled():
    assert len(trees()) > 150
    for path, tree in trees():
        for node in ast.walk(tree):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert not {name.split(".")[0] for name in names} & PICKLES, path


def test_no_text_becomes_code_and_no_file_an_object():
    for path, call, name in calls():
        where = f"{path}:{call.lineno}"
        assert name not in BUILTINS | METHODS, where
        assert name.rpartition(".")[2] not in PICKLING, where
        for keyword in call.keywords:
            text = f"{keyword.arg}={ast.unparse(keyword.value)}"
            assert text not in {"shell=True", "allow_pickle=True", "trust_remote_code=True"}, where


def test_a_transformers_loader_is_told_to_run_no_code():
    loaders = [call for _, call, name in calls() if name.endswith(".from_pretrained")]
    ours = [call for _, call, name in calls() if "from_pretrained" in name]
    assert loaders and len(loaders) == len(ours)
    for path, call, name in calls():
        if name.endswith(".from_pretrained") and "text" in path.parts:
            assert "trust_remote_code=False" in ast.unparse(call)


def test_pickled_weights_are_not_read(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ConfigError, match="its pickled weights are not read"):
        weight_files(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "../../etc/passwd"}}'
    )
    with pytest.raises(ConfigError, match="must be a file in this folder"):
        weight_files(tmp_path)


def test_names_of_blocks_need_the_engine_s_secret_and_the_salt():
    one, other = BlockHasher(), BlockHasher()
    tokens = list(range(16))
    assert one.block(one.root([""]), tokens) == one.block(one.root([""]), tokens)
    keys = [[], [""], ["a"], ["root"], ["a", ""], ["", "a"], ["a", "b"], ["ab"]]
    names = {
        hasher.block(hasher.root(extra), part)
        for hasher in (one, other)
        for extra in keys
        for part in (tokens, tokens[::-1])
    }
    assert len(names) == 32


def test_processes_that_share_a_key_file_compute_the_same_names(tmp_path):
    path = tmp_path / "key"
    one, other = (BlockHasher(load_or_create_key(path)) for _ in range(2))
    assert one.root(["salt"]) == other.root(["salt"])
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    with pytest.raises(ValueError, match="other users can read"):
        load_or_create_key(path)
    path.chmod(0o600)
    path.write_bytes(b"short")
    with pytest.raises(ValueError, match="must have 32 bytes, has 5"):
        load_or_create_key(path)


def test_engines_can_share_a_key_file(tmp_path):
    path = tmp_path / "key"
    engines = [LLM("demo", device="cpu", prefix_cache_key_file=str(path)) for _ in range(2)]
    one, other = (llm.engine.scheduler.kv._hasher for llm in engines)
    assert one.root([]) == other.root([])
    path.write_bytes(b"short")
    with pytest.raises(ConfigError, match="^option prefix_cache_key_file cannot be used: .*has 5"):
        LLM("demo", device="cpu", prefix_cache_key_file=str(path))


def test_an_internal_error_tells_its_place_and_nothing_that_it_was_about():
    try:
        "my secret \ud800".encode()
    except UnicodeEncodeError as error:
        text = place_of(error)
    assert text.startswith("UnicodeEncodeError at test_security.py:")
    assert "secret" not in text
