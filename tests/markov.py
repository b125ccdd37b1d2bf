"""A checkpoint that is a Markov chain over its vocabulary: sampling it walks wherever a test wants.

Embeddings are one-hot and attention and MLP write nothing, so the logits depend on the last token
alone and are a column of the output layer, up to the constant that the last norm multiplies by.
At temperature 1 the walk spells valid text: the bytes of a character follow each other as UTF-8
wants them. At temperature 100 hardly any transition is rarer than another: tokens in any order,
mostly no text.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import tokenizers
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from paged_backend.text.detokenizer import token_bytes
from paged_backend.text.tokenizer import Tokenizer

TEXT, ANYTHING = 1.0, 100.0  # temperatures
EXTRA_IDS = 5  # ids that the model has and the tokenizer has not, as in padded checkpoints
_FORBIDDEN = -40.0
_PREFERRED = 3.0  # for tokens that end within a character: most of a vocabulary does not
_SCALE = 64.0  # length of the one-hot vectors: the norm's epsilon is nothing beside it

Span = tuple[int, int]
"""How many bytes of a character are missing before a token, and after it."""


def make_markov_checkpoint(backend: tokenizers.Tokenizer, folder: Path) -> None:
    """Save a model and its tokenizer; they have no end-of-sequence token."""
    vocab_size = backend.get_vocab_size() + EXTRA_IDS
    hidden_size = math.ceil(vocab_size / 64) * 64
    config = AutoConfig.for_model(
        "llama",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    layer = model.model.layers[0]
    with torch.no_grad():
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(_SCALE * torch.eye(vocab_size, hidden_size))
        model.lm_head.weight.zero_()
        # A normalised one-hot vector holds the root of its length.
        model.lm_head.weight[:, :vocab_size] = _logits(backend).T / math.sqrt(hidden_size)
    model.save_pretrained(folder)
    backend.save(str(folder / "tokenizer.json"))


def ends_within_character(backend: tokenizers.Tokenizer, token_ids: Sequence[int]) -> bool:
    """Whether a walk through text was cut off in the middle of a character."""
    span = _spans(backend)[token_ids[-1]]
    return span is not None and span[1] > 0


def _logits(backend: tokenizers.Tokenizer) -> torch.Tensor:
    """[last token, next token]"""
    spans = _spans(backend)
    logits = torch.full((len(spans), len(spans)), _FORBIDDEN)
    for last, span in enumerate(spans):
        waiting = 0 if span is None else span[1]
        for token_id, following in enumerate(spans):
            if following is not None and following[0] == waiting:
                logits[last, token_id] = _PREFERRED if following[1] else 0.0
    return logits


@functools.cache
def _spans(backend: tokenizers.Tokenizer) -> list[Span | None]:
    """For each id; None for those that a walk through text does not meet."""
    tokenizer = Tokenizer(backend)
    return [
        None
        if id_ >= tokenizer.vocab_size or id_ in tokenizer.special_token_ids
        else _span(token_bytes(tokenizer, id_))
        for id_ in range(tokenizer.vocab_size + EXTRA_IDS)
    ]


def _span(data: bytes) -> Span | None:
    try:
        return None if "\N{REPLACEMENT CHARACTER}" in data.decode() else (0, 0)
    except UnicodeDecodeError:
        spans = [_BYTE_SPANS.get(byte) for byte in data]
    if None in spans or any(a[1] != b[0] for a, b in itertools.pairwise(spans)):
        return None
    return spans[0][0], spans[-1][1]


# What a byte says by itself, so that single bytes can be chained. This takes a part of UTF-8: Latin
# letters and CJK, Cyrillic, and of the emoji those whose bytes lie in these ranges.
_BYTE_SPANS: dict[int, Span] = {
    **dict.fromkeys(range(0x80), (0, 0)),
    **dict.fromkeys(range(0x80, 0x9F), (2, 1)),
    0x9F: (3, 2),
    **dict.fromkeys(range(0xA0, 0xC0), (1, 0)),
    **dict.fromkeys((0xC3, 0xD0), (0, 1)),
    **dict.fromkeys(range(0xE4, 0xEA), (0, 2)),
    0xF0: (0, 3),
}
