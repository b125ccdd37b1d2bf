"""Train the model `demo-tools` from scratch: `python -m paged_backend.tools.demo.lookup.train`.

Writes the model folder, the questions it was verified to answer, and the loss curve. Needs no
network and no files but Python itself; about half an hour on one CPU thread. The model learns to
copy from known words in a first phase, and in a second one, which has a learning rate schedule of
its own, from any tokens.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from paged_backend.checkpoint.bundled import TOOLS_MODEL_DIR
from paged_backend.tools.demo import Question, corpus
from paged_backend.tools.demo.lookup.chat_format import TOOL_CHAT
from paged_backend.tools.demo.lookup.conversations import ConversationSource
from paged_backend.tools.demo.lookup.examples import step_batches
from paged_backend.tools.demo.lookup.verification import (
    conversations_by_form,
    small_talk_conversations,
    verify,
)
from paged_backend.tools.demo.training import (
    MAX_LENGTH,
    Phase,
    begin,
    build_model,
    load_saved,
    muon_and_adamw,
    train_and_verify,
)
from paged_backend.tools.demo.verification import Reply, summary
from paged_backend.tools.demo.vocabulary import learn_tokenizer

STEPS, FIRST_PHASE = 1050, 2 / 3
# Embeddings of about unit length let the model point at a token from the start, and so copy it.
EMBEDDING_STD = 0.07
CHECKED_DURING_TRAINING = 16  # questions
CONVERSATIONS_TO_LEARN_TOKENS = 300


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, save and verify; return 0 when enough questions are answered in every form."""
    options = begin(arguments, __doc__, TOOLS_MODEL_DIR.parent, STEPS)
    questions = corpus.questions()
    material = questions, corpus.names(), corpus.sentences()
    source = ConversationSource(*material, random.Random(options.seed))
    tokenizer = learn_tokenizer([*corpus.documents(), *_texts(source)], MAX_LENGTH, TOOL_CHAT)
    harder = ConversationSource(*material, random.Random(options.seed + 1), token_texts(tokenizer))
    model = build_model(tokenizer)
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=EMBEDDING_STD)
    first = round(options.steps * FIRST_PHASE)
    phases = [
        Phase(muon_and_adamw(model), step_batches(conversations, tokenizer), steps)
        for conversations, steps in ((source, first), (harder, options.steps - first))
    ]
    folder = options.output / TOOLS_MODEL_DIR.name
    status = train_and_verify(
        model,
        tokenizer,
        questions,
        phases,
        partial(_verify, tokenizer),
        folder,
        num_checked=CHECKED_DURING_TRAINING,
    )
    chats = verify(load_saved(folder), tokenizer, small_talk_conversations())
    print(f"small talk: {summary(chats)}", flush=True)
    return status


def token_texts(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Return the text of each token that was learned and is printable."""
    texts = (str(tokenizer.decode([token])) for token in range(len(tokenizer)))
    added = tokenizer.get_added_vocab()
    return [
        text for text in texts if text not in added and text.isprintable() and "\ufffd" not in text
    ]


def _texts(source: ConversationSource) -> Iterator[str]:
    """Yield the texts that random conversations consist of, JSON included."""
    for _ in range(CONVERSATIONS_TO_LEARN_TOKENS):
        conversation = source.with_tool(1)
        yield json.dumps(conversation.tools)
        for message in conversation.messages:
            yield message["role"]
            yield message["content"] or json.dumps(message["tool_calls"])


def _verify(
    tokenizer: PreTrainedTokenizerFast, model: LlamaForCausalLM, questions: Sequence[Question]
) -> Iterator[tuple[str, list[Reply]]]:
    for form, conversations in conversations_by_form(questions).items():
        yield form, verify(model, tokenizer, conversations)


if __name__ == "__main__":
    sys.exit(main())
