"""Texts of an exact length from tokenizers of other kinds than the demo model's."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from paged_backend.text.chat import Chat
from paged_backend.text.tokenizer import load_tokenizer
from paged_backend.tools.workloads import TokenizerContext, WorkloadOptions, make_requests
from paged_backend.values.errors import ConfigError

RNG = np.random.default_rng(0)
WORDS = ["".join(RNG.choice(list("abcdefghijklmnop"), 5)) for _ in range(120)]
# As in a large vocabulary, words are known at the beginning of a text, too.
CORPUS = [" ".join(RNG.permutation(WORDS)) for _ in range(40)] + 40 * WORDS
SPECIAL = ["<unk>", "<s>", "</s>"]
# As Llama 3's: one token before everything, and contents without the spaces around them.
TEMPLATE = (
    "{{ '<s>' }}{% for message in messages %}{{ message['role'] + ': ' + message['content'] | trim"
    " + '</s>' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def train(model, trainer, pre_tokenizer, decoder, normalizer=None):
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoder
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_level():
    """As Llama 3's and Qwen's."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1200, special_tokens=SPECIAL, initial_alphabet=alphabet
    )
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return train(models.BPE(), trainer, split, decoders.ByteLevel())


def metaspace():
    """As Llama 2's and Mistral's: a mark for each space, and one before the text."""
    trainer = trainers.BpeTrainer(vocab_size=1200, special_tokens=SPECIAL)
    return train(
        models.BPE(unk_token="<unk>"), trainer, pre_tokenizers.Metaspace(), decoders.Metaspace()
    )


def unigram():
    """As T5's: the likeliest pieces, not merged ones."""
    letters = [(letter, -9.0) for letter in "▁abcdefghijklmnopqrstuvwxyz:"]
    pieces = [(f"▁{word}", -6.0) for word in WORDS]
    model = models.Unigram([*((name, 0.0) for name in SPECIAL), *letters, *pieces], unk_id=0)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return tokenizer


def word_piece():
    """As BERT's: marks for what is no beginning."""
    trainer = trainers.WordPieceTrainer(vocab_size=700, special_tokens=SPECIAL)
    model = models.WordPiece(unk_token="<unk>")
    lower = normalizers.Lowercase()
    return train(model, trainer, pre_tokenizers.Whitespace(), decoders.WordPiece(), lower)


def characters():
    """One token a character, so no words."""
    vocab = {character: n for n, character in enumerate([*SPECIAL, " ", *"abcdefghijklmnop"])}
    return Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))


def save(tokenizer, folder, *, begins=True, template=TEMPLATE):
    if begins:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", chat_template=template, model_max_length=64
    ).save_pretrained(folder)
    return TokenizerContext(vocab_size=1200, max_model_len=4096, tokenizer=str(folder))


def make(material, prompt_format, **values):
    options = WorkloadOptions(
        num_prompts=10, prompt_format=prompt_format, input_len="uniform:min=30,max=400", **values
    )
    as_ids = WorkloadOptions(num_prompts=10, input_len=options.input_len, **values)
    lengths = [len(request.prompt) for request in make_requests(as_ids, material)]
    return make_requests(options, material), lengths


@pytest.mark.parametrize("kind", [byte_level, metaspace, unigram, word_piece])
@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("dataset", ["random", "shared-prefix"])
def test_lengths_are_exact(kind, begins, dataset, tmp_path):
    material = save(kind(), tmp_path, begins=begins)
    server = load_tokenizer(tmp_path)
    texts, lengths = make(material, "text", dataset_name=dataset)
    assert [len(server.encode(request.prompt)) for request in texts] == lengths
    chats, lengths = make(material, "chat", dataset_name=dataset)
    rendered = [server.chat_template.render(Chat(messages=[*request.prompt])) for request in chats]
    counts = [len(server.encode(text, add_special_tokens=False)) for text in rendered]
    assert counts == lengths


def test_long_texts_bring_no_warning(tmp_path, caplog, capsys):
    make(save(byte_level(), tmp_path), "text")
    assert caplog.text == capsys.readouterr().err == ""


def test_a_vocabulary_without_words_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="lacks words of one token, .*; use prompts as ids$"):
        make(save(characters(), tmp_path), "text")


def test_a_tokenizer_without_a_template_is_refused_for_chats_only(tmp_path):
    material = save(byte_level(), tmp_path, template=None)
    assert make(material, "text")
    with pytest.raises(ConfigError, match="cannot render a chat .*; use prompts as text or ids$"):
        make(material, "chat")
