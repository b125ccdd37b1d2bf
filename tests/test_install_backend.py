"""`paged-backend install-backend`: what it writes, and what it leaves alone."""

from __future__ import annotations

import runpy

import pytest

from paged_backend.cli import main


def test_both_names_by_default_and_again(capsys, tmp_path):
    for _ in range(2):
        assert main(["install-backend", str(tmp_path)]) == 0
        shown = capsys.readouterr().out.split()
        assert shown == [str(tmp_path / name) for name in ("paged", "vllm")]
    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        "model.py",
        "model.py",
        *("paged", "vllm"),
    ]


def test_names_may_be_chosen(capsys, tmp_path):
    assert main(["install-backend", str(tmp_path), "--name", "mine"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_our_own_file_of_another_release_is_replaced(capsys, tmp_path):
    main(["install-backend", str(tmp_path), "--name", "vllm"])
    file = tmp_path / "vllm" / "model.py"
    text = file.read_text()
    file.write_text("# an older one\n" + text)
    (file.parent / "__pycache__").mkdir()
    assert main(["install-backend", str(tmp_path), "--name", "vllm"]) == 0
    assert file.read_text() == text


def test_what_is_written_needs_the_server_and_nothing_else(capsys, tmp_path):
    main(["install-backend", str(tmp_path)])
    with pytest.raises(ModuleNotFoundError, match="triton_python_backend_utils"):
        runpy.run_path(str(tmp_path / "vllm" / "model.py"))


@pytest.mark.parametrize(
    ("name", "files", "message"),
    [
        ("vllm", {"vllm/model.py": "import vllm"}, "holds another backend (model.py)"),
        ("vllm", {"vllm/model.py": "", "vllm/utils/a": ""}, "(model.py, utils): move it away"),
        ("vllm", {"vllm": "a file"}, "is not a folder"),
        ("python", {}, "taken by the server's own backend"),
        ("a/b", {}, "use lowercase letters"),
    ],
)
def test_what_is_not_ours_stays(capsys, tmp_path, name, files, message):
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / path).write_text(text)
    assert main(["install-backend", str(tmp_path), "--name", "paged", "--name", name]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "paged").exists()


def test_a_folder_that_is_not_there_is_named(capsys, tmp_path):
    assert main(["install-backend", str(tmp_path / "missing")]) == 2
    assert f"no folder at {tmp_path / 'missing'}" in capsys.readouterr().err
