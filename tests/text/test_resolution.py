"""A tokenizer is resolved once, kept privately, and refused if it does too much work."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from sample_tokenizers import byte_fallback_bpe, byte_level_bpe
from tokenizer_layouts import LAYOUTS, added_tokens, write, write_json
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from paged_backend.text.resolution import MAX_KEPT
from paged_backend.text.tokenizer import Tokenizer as OurTokenizer
from paged_backend.text.tokenizer import load_tokenizer
from paged_backend.text.tokenizer_limits import (
    MAX_FRAME,
    MAX_GROWTH,
    MAX_TOKEN_LENGTH,
    PROBE_LENGTH,
    check_tokenizer,
)
from paged_backend.values.errors import ConfigError, InvalidRequest


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "paged-backend" / "tokenizers"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    LAYOUTS["byte_level"](folder)
    return folder


def normalizing(*steps: normalizers.Normalizer) -> Tokenizer:
    tokenizer = byte_level_bpe()
    tokenizer.normalizer = normalizers.Sequence(list(steps))
    return tokenizer


def decoding(*steps: decoders.Decoder) -> Tokenizer:
    tokenizer = byte_level_bpe()
    tokenizer.decoder = decoders.Sequence(list(steps))
    return tokenizer


def doubling(kind: Any) -> list[Any]:
    return [kind.Replace("a", "aa") for _ in range(20)]


def long_added_token() -> Tokenizer:
    tokenizer = byte_level_bpe()
    tokenizer.add_tokens([AddedToken("x" * (MAX_TOKEN_LENGTH + 1))])
    return tokenizer


def long_frame() -> Tokenizer:
    tokenizer = byte_level_bpe()
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[{"id": "<s>", "ids": [1] * 10**5, "tokens": ["x"] * 10**5}]
    )
    return tokenizer


def splitting(pattern: str) -> Tokenizer:
    tokenizer = byte_level_bpe()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    return tokenizer


def charsmap() -> Tokenizer:
    """A map of characters that makes the text of its longest entry out of one of them."""
    state = json.loads(byte_level_bpe().to_str())
    trie = [0] * 256  # its units; the first one leads to the letter, that to the text
    trie[0], trie[1 ^ ord("a")] = 1 << 10, (1 << 10) | (1 << 8) | ord("a")
    data = b"".join(unit.to_bytes(4, "little") for unit in (4 * len(trie), *trie))
    data += b"x" * 10**6 + b"\0"
    state["normalizer"] = {
        "type": "Precompiled",
        "precompiled_charsmap": base64.b64encode(data).decode(),
    }
    return Tokenizer.from_str(json.dumps(state))


HOSTILE: dict[str, tuple[Callable[[], Tokenizer], str]] = {
    "replace": (lambda: normalizing(normalizers.Replace("a", "b" * 10**6)), "normalizer makes"),
    "replaced pattern": (
        lambda: normalizing(normalizers.Replace(Regex("[a-z]"), "b" * 10**5)),
        "normalizer makes",
    ),
    "doubling": (lambda: normalizing(*doubling(normalizers)), "normalizer makes"),
    "prepend": (lambda: normalizing(normalizers.Prepend("b" * 10**6)), "normalizer makes"),
    "map of characters": (charsmap, "normalizer makes"),
    "decoder": (lambda: decoding(decoders.Replace("a", "b" * 10**6)), "decoder makes"),
    "doubling decoder": (lambda: decoding(*doubling(decoders)), "decoder makes"),
    "added token": (long_added_token, "token of 4097 characters"),
    "frame": (long_frame, "100000 special tokens around a prompt"),
    "slow pattern": (lambda: splitting(r"a{0,150}a{0,150}(?!a|\z)"), "to encode 4096 characters"),
    "slow pattern of two letters": (
        lambda: splitting(r"(?:xy){0,150}(?:xy){0,150}(?!x|y|\z)"),
        "to encode 4096 characters",
    ),
    "slow pattern of three letters": (
        lambda: splitting(r"(?:xyz){0,200}(?:xyz){0,200}(?!x|y|z|\z)"),
        "to encode 4096 characters",
    ),
    "slow pattern of kinds of characters": (
        lambda: splitting(r"([a-z][A-Z]\d){0,200}([a-z][A-Z]\d){0,200}(?![a-zA-Z\d]|\z)"),
        "to encode 4096 characters",
    ),
    "endless pattern": (lambda: splitting("(a+)+[b-z]"), "retry-limit"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_tokenizer_that_would_stop_everybody_is_refused(kind: str, tmp_path: Path) -> None:
    make, problem = HOSTILE[kind]
    write(tmp_path, make())
    start_s = time.process_time()
    with pytest.raises(ConfigError, match=problem) as caught:
        load_tokenizer(tmp_path)
    assert time.process_time() - start_s < 2  # the work is another process's
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_text_that_is_too_hard_for_a_pattern_is_the_callers_mistake() -> None:
    hard = Tokenizer.from_str(splitting("(é+é+)+[b-z]").to_str())
    with pytest.raises(InvalidRequest, match="^prompt: cannot be divided by the patterns"):
        OurTokenizer(hard).encode("é" * 100)


def test_limits_are_exact() -> None:
    longest = byte_level_bpe()
    longest.add_tokens([AddedToken("x" * MAX_TOKEN_LENGTH)])
    check_tokenizer(longest)
    check_tokenizer(normalizing(normalizers.Replace(Regex("a"), "b" * MAX_GROWTH)))
    framed = byte_level_bpe()
    framed.post_processor = TemplateProcessing(
        single="<s> " * MAX_FRAME + "$A", special_tokens=[("<s>", 1)]
    )
    check_tokenizer(framed)
    with pytest.raises(ConfigError):
        check_tokenizer(normalizing(normalizers.Replace(Regex("a"), "b" * (MAX_GROWTH + 1))))
    framed.post_processor = TemplateProcessing(
        single="<s> " * (MAX_FRAME + 1) + "$A", special_tokens=[("<s>", 1)]
    )
    with pytest.raises(ConfigError):
        check_tokenizer(framed)


def test_the_text_that_is_tried_out_is_as_long_as_what_is_encoded_at_once() -> None:
    from paged_backend.serving.requests.preparation import SMALL

    assert PROBE_LENGTH == SMALL


def test_steps_of_known_tokenizers_are_not_refused() -> None:
    forms = [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
    check_tokenizer(normalizing(normalizers.Replace("``", '"'), *forms, normalizers.NFKC()))
    check_tokenizer(normalizing(normalizers.Replace("\n", "<|line break|>")))
    check_tokenizer(byte_fallback_bpe())


def test_only_the_first_load_starts_a_process(cache: Path, folder: Path) -> None:
    first = load_tokenizer(folder)
    (entry,) = cache.iterdir()
    assert (entry.stat().st_mode & 0o777, cache.stat().st_mode & 0o777) == (0o600, 0o700)
    before = psutil.Process().children()
    written = entry.stat().st_ctime_ns, entry.read_bytes()
    second = load_tokenizer(folder)
    assert second.to_json() == first.to_json()
    assert written[1] == entry.read_bytes()
    assert psutil.Process().children() == before


def test_a_changed_file_is_read_again(cache: Path, folder: Path) -> None:
    assert load_tokenizer(folder).eos_token_id == 2
    config = json.loads((folder / "tokenizer_config.json").read_text())
    write_json(folder / "tokenizer_config.json", {**config, "eos_token": "<s>"})
    assert load_tokenizer(folder).eos_token_id == 1
    write_json(folder / "special_tokens_map.json", {"pad_token": "<new>"})
    assert load_tokenizer(folder).token_id("<new>") is not None
    assert len(list(cache.iterdir())) == 3


@pytest.mark.parametrize(
    "content",
    [
        b"",
        pytest.param(b"{}\n", marks=pytest.mark.thorough),
        b'{"length": 5}\nabc',
        pytest.param(b"\xff", marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_an_entry_whose_writer_was_interrupted_is_written_again(
    cache: Path, folder: Path, content: bytes
) -> None:
    whole = load_tokenizer(folder).to_json()
    (entry,) = cache.iterdir()
    right = entry.read_bytes()
    entry.write_bytes(content)
    assert load_tokenizer(folder).to_json() == whole
    assert entry.read_bytes() == right


def test_nothing_is_read_from_a_folder_that_others_can_write_to(cache: Path, folder: Path) -> None:
    load_tokenizer(folder)
    (entry,) = cache.iterdir()
    entry.write_bytes(entry.read_bytes().replace(b'"</s>"', b'"<s>" '))
    cache.chmod(0o777)
    assert load_tokenizer(folder).eos_token_id == 2


def test_a_cache_folder_that_cannot_be_made_costs_time_only(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert load_tokenizer(folder).eos_token_id == 2


def test_the_cache_keeps_a_few_tokenizers(cache: Path, folder: Path) -> None:
    cache.mkdir(parents=True, mode=0o700)
    for number in range(MAX_KEPT + 3):
        (cache / f"{number}").touch()
        os.utime(cache / f"{number}", (number, number))
    load_tokenizer(folder)
    names = {path.name for path in cache.iterdir()}
    assert len(names) == MAX_KEPT
    assert names.isdisjoint("0123")


def _num_resolving() -> int:
    """The number of processes of this one that read tokenizers."""
    number = 0
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            number += "paged_backend.text.resolve_process" in child.cmdline()
    return number


def test_processes_and_threads_that_load_at_once_wait_for_one(cache: Path, folder: Path) -> None:
    sizes: list[int] = []
    threads = [
        threading.Thread(target=lambda: sizes.append(load_tokenizer(folder).vocab_size))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    most = 0
    while any(thread.is_alive() for thread in threads):
        most = max(most, _num_resolving())
        time.sleep(0.02)
    assert len(sizes) == 4 and len(set(sizes)) == 1
    assert most <= 1


def test_a_class_that_is_code_is_not_run_and_its_tokenizer_file_is_used(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    mark = folder / "ran"
    (folder / "code.py").write_text(f"open({str(mark)!r}, 'w'); class Own: pass")
    named = {"AutoTokenizer": ["code.Own", "code.Own"]}
    write_json(
        folder / "tokenizer_config.json", {**config, "auto_map": named, "tokenizer_class": "Own"}
    )
    ours = load_tokenizer(folder)
    assert ours.encode("a") == byte_level_bpe().encode("a").ids
    assert ours.eos_token_id == 2
    assert not mark.exists()


def test_flags_of_added_tokens_in_the_config_win(tmp_path: Path) -> None:
    tokenizer = byte_level_bpe()
    added = added_tokens(tokenizer)
    added["2"]["rstrip"] = True
    write(tmp_path, tokenizer, added_tokens_decoder=added)
    ids = load_tokenizer(tmp_path).encode("</s>   x")
    assert len(ids) == 2
