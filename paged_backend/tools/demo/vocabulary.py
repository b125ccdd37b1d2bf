"""The demo model's tokenizer: byte-level BPE learned from the corpus, and its chat template."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 2048

PAD, END = "<|pad|>", "<|end|>"
ROLES = ("system", "user", "assistant")
ROLE_TOKENS = [f"<|{role}|>" for role in ROLES]

# Nothing but special tokens stands between messages, so that the rendered chat sent as plain
# text gives the same token ids as the chat itself.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def learn_tokenizer(texts: Iterable[str], max_length: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of `VOCAB_SIZE` tokens learned from `texts`, which adds no tokens itself.

    Every byte is in the vocabulary, so any UTF-8 text survives encoding and decoding.
    `max_length` is the longest sequence, in tokens, that the model accepts.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, END, *ROLE_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    make: Callable[..., PreTrainedTokenizerFast] = PreTrainedTokenizerFast  # not annotated itself
    return make(
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=ROLE_TOKENS,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
        padding_side="left",
    )
