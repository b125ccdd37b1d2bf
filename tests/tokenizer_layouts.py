"""Folders with a tokenizer, in the layouts that checkpoints on the Hub have.

Each function writes one layout. `LAYOUTS` has them by name. The vocabularies are those of
`sample_tokenizers`, because what differs between checkpoints is which files say what.
"""

from __future__ import annotations

import base64
import io
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors

sys.path.insert(0, str(Path(__file__).parent / "text"))
from sample_tokenizers import (
    CORPUS,
    byte_fallback_bpe,
    byte_level_bpe,
    metaspace_unigram,
    word_piece,
)

NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
PLAIN = "PreTrainedTokenizerFast"


def write(folder: Path, tokenizer: Tokenizer | None, **config: Any) -> None:
    """Write tokenizer.json and tokenizer_config.json; a value of None leaves a key out."""
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
    values = {"tokenizer_class": PLAIN, **NAMES, "chat_template": CHAT_TEMPLATE, **config}
    values = {name: value for name, value in values.items() if value is not None}
    write_json(folder / "tokenizer_config.json", values)


def write_json(path: Path, values: Any) -> None:
    """Write a file."""
    path.write_text(json.dumps(values))


def added_tokens(tokenizer: Tokenizer) -> dict[str, dict[str, Any]]:
    """Return the ``added_tokens_decoder`` of a tokenizer_config.json."""
    flags = ("content", "lstrip", "rstrip", "single_word", "normalized", "special")
    return {
        str(token_id): {flag: getattr(token, flag) for flag in flags}
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
    }


def with_bos(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer whose prompts begin with bos, as Llama 3's."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def byte_level(folder: Path) -> None:
    """As Qwen 2 and SmolLM: bytes, no bos."""
    write(folder, byte_level_bpe())


def byte_level_with_bos(folder: Path) -> None:
    """As Llama 3."""
    write(folder, with_bos(byte_level_bpe()))


def gpt2_class(folder: Path) -> None:
    """The class GPT2Tokenizer, which builds its tokenizer anew of the vocabulary."""
    write(folder, byte_level_bpe(), tokenizer_class="GPT2Tokenizer")
    write_json(folder / "config.json", {"model_type": "gpt2"})


def gpt2_files(folder: Path) -> None:
    """As GPT-2 itself: vocab.json and merges.txt, and no tokenizer.json."""
    byte_level_bpe().model.save(str(folder))
    write(folder, None, tokenizer_class="GPT2Tokenizer")
    write_json(folder / "config.json", {"model_type": "gpt2"})


def qwen2_class(folder: Path) -> None:
    """As Qwen 2: the flags of added tokens are in tokenizer_config.json only."""
    tokenizer = byte_level_bpe()
    added = added_tokens(tokenizer)
    for entry, flag in zip(added.values(), ("lstrip", "rstrip", "single_word"), strict=False):
        entry[flag] = True
    write(folder, tokenizer, tokenizer_class="Qwen2Tokenizer", added_tokens_decoder=added)
    write_json(folder / "config.json", {"model_type": "qwen2"})


def sentencepiece_with_prefix(folder: Path) -> None:
    """As Llama 2, Mistral 7B and Phi-3: a dummy prefix, which the decoder drops."""
    write(folder, byte_fallback_bpe())


def sentencepiece_without_prefix(folder: Path) -> None:
    """As Gemma: spaces are marked, none is added or dropped."""
    tokenizer = with_bos(byte_fallback_bpe())
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    write(folder, tokenizer)


def llama_class(folder: Path) -> None:
    """The class LlamaTokenizer, with ``legacy: false`` and an end of text."""
    write(
        folder,
        byte_fallback_bpe(),
        tokenizer_class="LlamaTokenizer",
        legacy=False,
        add_bos_token=True,
        add_eos_token=True,
    )
    write_json(folder / "config.json", {"model_type": "llama"})


def sentencepiece_file(folder: Path) -> None:
    """As early checkpoints of Llama and Mistral: tokenizer.model, and no tokenizer.json."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        model_type="bpe",
        vocab_size=400,
        hard_vocab_limit=False,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    write(folder, None, tokenizer_class="LlamaTokenizer", add_bos_token=True)
    write_json(folder / "config.json", {"model_type": "llama"})


def tiktoken_file(folder: Path) -> None:
    """As Llama 3 of its authors: tokenizer.model in the form of tiktoken."""
    tokens = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b" the", b"an", b"in"]
    lines = (f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens))
    (folder / "tokenizer.model").write_text("\n".join(lines))
    write(folder, None, tokenizer_class=PLAIN, bos_token=None, eos_token=None, unk_token=None)
    write_json(folder / "config.json", {"model_type": "llama"})


def unigram(folder: Path) -> None:
    """As XGLM: Unigram, with a mark before each word."""
    write(folder, metaspace_unigram())


def unigram_first(folder: Path) -> None:
    """Unigram, with a mark before the first word of a text only, and NFKC."""
    tokenizer = metaspace_unigram()
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    write(folder, with_bos(tokenizer))


def word_pieces(folder: Path) -> None:
    """WordPiece, as a plain class loads it."""
    write(folder, word_piece())


def bert_class(folder: Path) -> None:
    """The class BertTokenizer, which adds [CLS] and [SEP] and does not lower the case."""
    write(
        folder,
        word_piece(),
        tokenizer_class="BertTokenizer",
        do_lower_case=False,
        bos_token=None,
        eos_token=None,
        cls_token="[CLS]",
        sep_token="[SEP]",
    )
    write_json(folder / "config.json", {"model_type": "bert"})


def added_tokens_file(folder: Path) -> None:
    """As early fine-tunes: added_tokens.json and special_tokens_map.json beside tokenizer.json."""
    tokenizer = byte_level_bpe()
    write(folder, tokenizer, bos_token=None, eos_token=None, unk_token=None)
    size = tokenizer.get_vocab_size()
    write_json(folder / "added_tokens.json", {"<new>": size, "<newer>": size + 1})
    write_json(
        folder / "special_tokens_map.json",
        {**NAMES, "eos_token": {"content": "<newer>", "lstrip": True, "rstrip": False}},
    )


def special_tokens_file(folder: Path) -> None:
    """Only special_tokens_map.json names special tokens, and there is no tokenizer_config.json."""
    byte_fallback_bpe().save(str(folder / "tokenizer.json"))
    write_json(
        folder / "special_tokens_map.json",
        {**NAMES, "additional_special_tokens": ["<a>", "\u2581the"]},
    )
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def named_extra_tokens(folder: Path) -> None:
    """Named extra special tokens, which chat templates can refer to."""
    write(
        folder,
        byte_level_bpe(),
        extra_special_tokens={"call_token": "<tool call>", "new_token": "<new>"},
        chat_template="{{ call_token }}{{ new_token }}" + CHAT_TEMPLATE,
    )


def listed_extra_tokens(folder: Path) -> None:
    """A list of additional special tokens, and template texts by name."""
    templates = [
        {"name": "default", "template": CHAT_TEMPLATE},
        {"name": "tool_use", "template": "{{ tools }}" + CHAT_TEMPLATE},
    ]
    write(
        folder,
        byte_fallback_bpe(),
        additional_special_tokens=["<tool call>", "<a>"],
        chat_template=templates,
    )


def framed_by_flags(folder: Path) -> None:
    """``add_bos_token`` and ``add_eos_token`` say what tokenizer.json does not."""
    write(folder, byte_level_bpe(), add_bos_token=True, add_eos_token=True)


def splitting_special_tokens(folder: Path) -> None:
    """Special tokens in a text are text."""
    write(folder, byte_level_bpe(), split_special_tokens=True)


def normalized_added_tokens(folder: Path) -> None:
    """Added tokens that are matched in the normalized text, and such that are not."""
    tokenizer = byte_level_bpe()
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.add_tokens([AddedToken("<raw>", normalized=False), AddedToken("<low>")])
    added = added_tokens(tokenizer)
    write(folder, tokenizer, added_tokens_decoder=added)


LAYOUTS: dict[str, Callable[[Path], None]] = {
    layout.__name__: layout
    for layout in (
        byte_level,
        byte_level_with_bos,
        gpt2_class,
        gpt2_files,
        qwen2_class,
        sentencepiece_with_prefix,
        sentencepiece_without_prefix,
        llama_class,
        sentencepiece_file,
        tiktoken_file,
        unigram,
        unigram_first,
        word_pieces,
        bert_class,
        added_tokens_file,
        special_tokens_file,
        named_extra_tokens,
        listed_extra_tokens,
        framed_by_flags,
        splitting_special_tokens,
        normalized_added_tokens,
    )
}

_PARTS = (
    *("<s>", "</s>", "<unk>", "<tool call>", "<new>", "<newer>", "<a>", "<raw>", "<LOW>", "[CLS]"),
    *(" ", "  ", "\n", " \n ", "\t", "the", " the", "The", "an", "<0x41>", "\u2581", "日本", "é"),
    *("e\u0301", "語", "한", "👩‍👩‍👧", "\ufffd", "\u00a0", "'s", " .", "n't", "x" * 30),
    *(word for line in CORPUS for word in line.split()),
)


def random_texts(count: int, seed: int = 0) -> list[str]:
    """Return texts of words, special tokens, spaces and rare characters."""
    draw = random.Random(seed)
    return ["".join(draw.choices(_PARTS, k=draw.randint(0, 12))) for _ in range(count)]


def random_ids(count: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Return lists of token ids, a few of them beyond the vocabulary."""
    draw = random.Random(seed)
    return [
        [draw.randrange(vocab_size + 2) for _ in range(draw.randint(0, 12))] for _ in range(count)
    ]
