"""Small tokenizers of the kinds that checkpoints have, trained on a few lines."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

SPECIAL_TOKENS = ["<unk>", "<s>", "</s>"]
CORPUS = [
    "The quick brown fox jumps over the lazy dog, and doesn't look back.",
    "def parse(text: str) -> list[int]:\n    return [int(part) for part in text.split()]",
    "naïve café, Straße, Ελληνικά, русский, 日本語の文, 한국어, emoji 👩‍👩‍👧 🏳️‍🌈 end",
    "  two spaces,\ttab, \n\nblank line,   three",
]
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level_bpe() -> Tokenizer:
    """As GPT-2, Llama 3, Qwen and SmolLM: every byte is a character of the vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(
        [AddedToken("<tool call>", special=False), AddedToken("日本", special=False)]
    )
    return tokenizer


def byte_fallback_bpe() -> Tokenizer:
    """As Llama 2 and Mistral: pieces with a mark for a space, and tokens for single bytes."""
    pieces = ["", "▁", "▁▁", *"abcdefghijklmnopqrstuvwxyz,.'é語�", "▁t", "▁th", "▁the", "an", "▁an"]
    vocab = {token: id_ for id_, token in enumerate(SPECIAL_TOKENS + BYTE_TOKENS + pieces)}
    merges = [("▁", "▁"), ("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("a", "n"), ("▁", "an")]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def metaspace_unigram() -> Tokenizer:
    """As T5 and ALBERT: the first space is the decoder's, whichever token comes first."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=SPECIAL_TOKENS, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def word_piece() -> Tokenizer:
    """As BERT: a token without the mark ## begins a word, so all but the first bring a space."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=250, special_tokens=SPECIAL_TOKENS, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level_bpe,
    "byte_fallback": byte_fallback_bpe,
    "metaspace": metaspace_unigram,
    "word_piece": word_piece,
}
