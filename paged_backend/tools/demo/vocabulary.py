"""The demo models' tokenizers: byte-level BPE learned from the corpus, and their chat templates."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 2048


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """A chat template and the tokens that it needs in addition to tokens learned from text.

    `markers` are special tokens, which decoding skips; `tags` are ordinary ones. `words` is the
    regular expression that splits text into the largest possible tokens, by default GPT-2's.
    """

    pad: str
    end: str
    markers: tuple[str, ...]
    template: str
    tags: tuple[str, ...] = ()
    words: str | None = None


# Nothing but special tokens stands between messages, so that the rendered chat sent as plain
# text gives the same token ids as the chat itself.
PLAIN_CHAT = ChatFormat(
    pad="<|pad|>",
    end="<|end|>",
    markers=("<|system|>", "<|user|>", "<|assistant|>"),
    template=(
        "{%- for message in messages -%}"
        "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
    ),
)


def learn_tokenizer(
    texts: Iterable[str], max_length: int, chat: ChatFormat
) -> PreTrainedTokenizerFast:
    """Return a tokenizer of `VOCAB_SIZE` tokens learned from `texts`, which adds no tokens itself.

    Every byte is in the vocabulary, so any UTF-8 text survives encoding and decoding.
    `max_length` is the longest sequence, in tokens, that the model accepts.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = _pre_tokenizer(chat.words)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(chat.tags),
        special_tokens=[chat.pad, chat.end, *chat.markers],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.add_tokens([AddedToken(tag, normalized=False) for tag in chat.tags])
    make: Callable[..., PreTrainedTokenizerFast] = PreTrainedTokenizerFast  # not annotated itself
    return make(
        tokenizer_object=bpe,
        pad_token=chat.pad,
        eos_token=chat.end,
        additional_special_tokens=list(chat.markers),
        chat_template=chat.template,
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
        padding_side="left",
    )


def _pre_tokenizer(words: str | None) -> pre_tokenizers.PreTokenizer:
    if words is None:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
