"""Rules that split text into words before BPE, by the names that GGUF files give them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers


@dataclass(frozen=True, slots=True)
class Words:
    """The rule that splits text into words before a byte-level BPE merges tokens.

    Attributes:
        split: makes what divides text, and turns the words' bytes into characters.
        whole: a word that is a token itself is not divided, whatever the merges say.
        bos: prompts begin with the special token bos unless the file says otherwise.
        normalizer: is applied to text before.
    """

    split: Callable[[], pre_tokenizers.PreTokenizer]
    whole: bool = False
    bos: bool = False
    normalizer: Callable[[], normalizers.Normalizer] | None = None


def _regex(pattern: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    return lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _cl100k(digits: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    """The words of OpenAI's vocabulary cl100k; `digits` says how long a number may be."""
    return _regex(
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_TEKKEN_UPPER, _TEKKEN_LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = _regex(
    rf"[^\r\n\p{{L}}\p{{N}}]?{_TEKKEN_UPPER}*{_TEKKEN_LOWER}+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_TEKKEN_UPPER}+{_TEKKEN_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


_LLAMA3 = Words(_cl100k("{1,3}"), whole=True, bos=True)
KINDS_OF_WORDS = {
    "gpt-2": Words(_gpt2),
    "smollm": Words(_single_digits),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA3),
    "qwen2": Words(_cl100k(""), normalizer=normalizers.NFC),
    "deepseek-r1-qwen": Words(_cl100k("")),
    "tekken": Words(_TEKKEN, whole=True, bos=True),
}
"""By the value of ``tokenizer.ggml.pre``."""
