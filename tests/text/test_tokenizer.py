from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from sample_tokenizers import CORPUS, KINDS, SPECIAL_TOKENS, byte_level_bpe
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from paged_backend.text.tokenizer import Tokenizer, load_tokenizer
from paged_backend.values.errors import ConfigError, InvalidRequest


def save(folder: Path, kind: str, **config: object) -> None:
    """A checkpoint's tokenizer files, with additions to ``tokenizer_config.json``."""
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=KINDS[kind](), unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    wrapped.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}, {"add_eos_token": True}], ids=str)
def test_encodes_and_decodes_as_transformers(
    tmp_path: Path, kind: str, config: dict[str, bool]
) -> None:
    save(tmp_path, kind, **config)
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.vocab_size == len(theirs)
    texts = [*CORPUS, "", "x", "</s> inside <tool call>"]
    for text, token_ids in zip(texts, ours.encode_batch(texts), strict=True):
        assert token_ids == ours.encode(text)
        assert token_ids == theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(
            text, add_special_tokens=False
        )
        for skip in (True, False):
            assert ours.decode(token_ids, skip_special_tokens=skip) == theirs.decode(
                token_ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )


def test_a_token_that_only_the_config_makes_special_is_special(tmp_path: Path) -> None:
    save(tmp_path, "byte_level", pad_token="<tool call>")
    ours = load_tokenizer(tmp_path)
    assert ours.decode(ours.encode("a<tool call>b")) == "ab"


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": {"7": {"content": "x"}}},
        {"added_tokens_decoder": {"0": "<unk>"}},
        {"added_tokens_decoder": [1]},
        {"extra_special_tokens": {"image_token": "<tool call>"}},
    ],
    ids=str,
)
def test_a_config_that_differs_from_the_file_is_left_to_transformers(
    tmp_path: Path, config: dict[str, object]
) -> None:
    save(tmp_path, "byte_level", **config)
    try:
        theirs = AutoTokenizer.from_pretrained(tmp_path)
    except Exception:
        with pytest.raises(ConfigError, match="no tokenizer can be made"):
            load_tokenizer(tmp_path)
        return
    ours = load_tokenizer(tmp_path)
    token_ids = ours.encode("a<tool call> x")
    assert token_ids == theirs.encode("a<tool call> x")
    assert ours.decode(token_ids) == theirs.decode(token_ids, skip_special_tokens=True)


def test_truncation_and_padding_in_the_file_do_not_apply(tmp_path: Path) -> None:
    backend = byte_level_bpe()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(tmp_path / "tokenizer.json"))
    text = CORPUS[0]
    assert load_tokenizer(tmp_path).encode(text) == byte_level_bpe().encode(text).ids


def test_neither_torch_nor_transformers_is_imported_for_a_tokenizer_json(tmp_path: Path) -> None:
    save(tmp_path, "byte_level")
    program = (
        "import sys; from paged_backend.text.tokenizer import load_tokenizer;"
        f"load_tokenizer({str(tmp_path)!r});"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def test_files_of_older_checkpoints_are_converted(tmp_path: Path) -> None:
    byte_level_bpe().model.save(str(tmp_path))  # vocab.json and merges.txt
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in CORPUS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == text


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "no tokenizer can be made of the files in"),
        ("", "tokenizer.json holds no tokenizer"),
        ('{"version": "1.0", "model": {"type": "New"}}', "tokenizer.json holds no tokenizer"),
    ],
    ids=["missing", "empty", "unknown"],
)
def test_a_folder_without_a_good_tokenizer_is_one_clear_line(
    tmp_path: Path, content: str | None, problem: str
) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=problem) as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_half_a_surrogate_pair_is_the_callers_mistake() -> None:
    with pytest.raises(InvalidRequest, match="prompt: .*surrogate"):
        Tokenizer(byte_level_bpe()).encode("ab\ud800")


def test_special_tokens_are_known(byte_level: Tokenizer) -> None:
    names = [byte_level.token(token_id) for token_id in sorted(byte_level.special_token_ids)]
    assert names == SPECIAL_TOKENS
    assert byte_level.token(byte_level.vocab_size) is None
