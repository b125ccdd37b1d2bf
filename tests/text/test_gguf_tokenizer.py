"""Tokenizers in GGUF files encode as those that they were made of."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFValueType, GGUFWriter
from gguf_vocabulary import add_vocabulary, close, write_vocabulary
from sample_tokenizers import CORPUS, SPECIAL_TOKENS, byte_fallback_bpe, byte_level_bpe
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from paged_backend.grammar.vocabulary import load_vocabulary
from paged_backend.text.chat import Chat
from paged_backend.text.gguf_tokenizer import read_gguf_tokenizer
from paged_backend.text.tokenizer import load_tokenizer
from paged_backend.values.errors import ConfigError

SPECIAL_IDS = {"unk_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXTS = [
    *CORPUS,
    *("", "x", " x", "  x ", "</s> inside <tool call>", "日本</s>日本", "I'LL pay 12345,67 $s"),
    "cafe\u0301 \u1e9b\u0323 A\u030a",
]
KEYS = {
    "tokenizer_model": "tokenizer.ggml.model",
    "token_list": "tokenizer.ggml.tokens",
    "token_types": "tokenizer.ggml.token_type",
    "token_merges": "tokenizer.ggml.merges",
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "chat_template": "tokenizer.chat_template",
}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.mark.parametrize("bos", [False, True])
def test_a_vocabulary_of_bytes(bos: bool, tmp_path: Path) -> None:
    wanted = byte_level_bpe()
    path = write_vocabulary(
        tmp_path / "m.gguf", wanted, "gpt-2", add_bos_token=bos, add_eos_token=bos, **SPECIAL_IDS
    )
    ours = load_tokenizer(path)
    assert ours.eos_token_id == 2
    assert ours.vocab_size == wanted.get_vocab_size()
    assert ours.special_token_ids == set(range(len(SPECIAL_TOKENS)))
    assert set(ours.added_tokens) == {*SPECIAL_TOKENS, "<tool call>", "日本"}
    for text in TEXTS:
        ids = wanted.encode(text).ids
        assert ours.encode(text, add_special_tokens=False) == ids
        assert ours.encode(text) == ([1, *ids, 2] if bos else ids)
        assert ours.decode(ids, skip_special_tokens=False) == text


def test_a_vocabulary_of_pieces(tmp_path: Path) -> None:
    wanted = byte_fallback_bpe()
    ours = load_tokenizer(write_vocabulary(tmp_path / "m.gguf", wanted, None, **SPECIAL_IDS))
    assert ours.vocab_size == wanted.get_vocab_size()
    assert ours.special_token_ids == {0, 1, 2}
    for text in TEXTS:
        ids = wanted.encode(text).ids
        assert ours.encode(text) == ids
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == wanted.decode(ids, skip)


def test_pieces_without_a_space_before_the_text(tmp_path: Path) -> None:
    wanted = byte_fallback_bpe()
    wanted.normalizer = normalizers.Replace(" ", "\u2581")
    path = write_vocabulary(
        tmp_path / "m.gguf", wanted, None, add_space_prefix=False, **SPECIAL_IDS
    )
    ours = load_tokenizer(path)
    for text in TEXTS:
        ids = wanted.encode(text).ids
        assert ours.encode(text) == ids
        assert ours.decode(ids, skip_special_tokens=False) == wanted.decode(ids, False)


@pytest.mark.parametrize("words", ["llama-bpe", "qwen2", "deepseek-r1-qwen", "tekken"])
def test_words_are_those_of_transformers(words: str, tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "m.gguf", byte_level_bpe(), words)
    ours = read_gguf_tokenizer(path).backend
    theirs = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[words]), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for text in TEXTS:
        wanted = pre_tokenizers.Sequence([theirs, to_bytes]).pre_tokenize_str(text)
        assert ours.pre_tokenizer.pre_tokenize_str(text) == wanted
    composed = words == "qwen2"  # Qwen's tokenizer composes letters and accents
    assert (ours.encode("e\u0301").ids == ours.encode("é").ids) == composed


def test_numbers_of_smollm_are_single_digits(tmp_path: Path) -> None:
    wanted = byte_level_bpe()
    digits = pre_tokenizers.Digits(individual_digits=True)
    wanted.pre_tokenizer = pre_tokenizers.Sequence([digits, wanted.pre_tokenizer])
    ours = load_tokenizer(write_vocabulary(tmp_path / "m.gguf", wanted, "smollm"))
    for text in TEXTS:
        assert ours.encode(text) == wanted.encode(text).ids


def test_words_of_llama_3_that_are_tokens_are_not_merged(tmp_path: Path) -> None:
    wanted = byte_level_bpe()
    state = json.loads(wanted.to_str())
    state["added_tokens"] = state["added_tokens"][: len(SPECIAL_TOKENS)]
    state["model"]["vocab"]["zebra"] = len(state["model"]["vocab"])
    wanted = Tokenizer.from_str(json.dumps(state))
    whole, merged = (
        load_tokenizer(write_vocabulary(tmp_path / f"{words}.gguf", wanted, words))
        for words in ("llama-bpe", "qwen2")
    )
    assert whole.encode("zebra") == [wanted.token_to_id("zebra")]
    assert len(merged.encode("zebra")) > 1


def test_prompts_begin_with_bos_by_default(tmp_path: Path) -> None:
    for words, wanted in ((None, [1]), ("llama-bpe", [1]), ("qwen2", []), ("gpt-2", [])):
        tokenizer = byte_level_bpe() if words else byte_fallback_bpe()
        path = write_vocabulary(tmp_path / f"{words}.gguf", tokenizer, words, **SPECIAL_IDS)
        assert load_tokenizer(path).encode("") == wanted


def test_the_chat_template(tmp_path: Path) -> None:
    path = write_vocabulary(
        tmp_path / "m.gguf", byte_level_bpe(), "qwen2", chat_template=TEMPLATE, **SPECIAL_IDS
    )
    messages = [{"role": "user", "content": "<s>Hello"}, {"role": "assistant", "content": "x"}]
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=byte_level_bpe(), bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    theirs.chat_template = TEMPLATE
    template = load_tokenizer(path).chat_template
    assert template is not None
    assert template.render(Chat(messages=messages)) == theirs.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )


def test_no_chat_template(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "m.gguf", byte_level_bpe(), "qwen2")
    assert load_tokenizer(path).chat_template is None


def test_transformers_is_not_imported(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "m.gguf", byte_level_bpe(), "qwen2")
    program = (
        "import sys; from paged_backend.text.tokenizer import load_tokenizer;"
        f"load_tokenizer({str(path)!r});"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("words", [None, "qwen2"])
def test_structured_outputs_can_use_it(words: str | None, tmp_path: Path) -> None:
    tokenizer = byte_level_bpe() if words else byte_fallback_bpe()
    path = write_vocabulary(tmp_path / "m.gguf", tokenizer, words, **SPECIAL_IDS)
    ours = load_tokenizer(path)
    vocabulary = load_vocabulary(path, ours.vocab_size)
    ids = ours.encode("a the", add_special_tokens=False)
    assert vocabulary.decode_bytes(ids).strip() == b"a the"


def refused(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("words", ["default", "chatglm-bpe"])
def test_unknown_words_are_refused(words: str, tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "m.gguf", byte_level_bpe(), words)
    assert "tokenizer.ggml.pre must be one of gpt-2, smollm" in refused(path)
    assert f"got '{words}'; name another tokenizer" in refused(path)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"tokenizer_model": "t5"}, "tokenizer.ggml.model must be one of gpt2, llama"),
        ({"token_list": None}, "tokenizer.ggml.tokens is missing; name another tokenizer"),
        ({"token_list": [1, 2]}, "tokenizer.ggml.tokens must be an array of strings"),
        ({"token_types": [1, 2]}, "tokenizer.ggml.token_type has 2 entries for 422 tokens"),
        ({"token_types": ["a"]}, "tokenizer.ggml.token_type must be an array of integers"),
        ({"token_merges": ["a Q"]}, "holds no tokenizer"),
        ({"token_merges": ["nothing"]}, "holds no tokenizer"),
        ({"bos_token_id": 422}, "tokenizer.ggml.bos_token_id is 422, but there are 422 tokens"),
        ({"chat_template": 3}, "tokenizer.chat_template must be a string"),
        ({"tokenizer_model": "llama"}, "tokenizer.ggml.scores must be an array of 422 numbers"),
    ],
    ids=str,
)
def test_damaged_vocabularies(change: dict[str, Any], problem: str, tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    add_vocabulary(writer, byte_level_bpe(), "qwen2")
    (values,) = writer.kv_data
    for name, value in change.items():
        key = KEYS[name]
        values.pop(key, None)
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            writer.add_key_value(key, value, GGUFValueType.get_type(value))
    close(writer)
    assert problem in refused(tmp_path / "m.gguf")
