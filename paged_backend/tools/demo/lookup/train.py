"""Train the model `demo-tools` from scratch: `python -m paged_backend.tools.demo.lookup.train`.

Writes the model folder, the questions it was verified to answer, and the loss curve. Needs no
network and no files but Python itself; about half an hour on one CPU thread. The model learns to
copy from known words in a first phase, and in a second one, which has a learning rate schedule of
its own, from any tokens.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from paged_backend.checkpoint.bundled import TOOLS_MODEL_DIR
from paged_backend.tools.demo import Question, corpus, save_questions
from paged_backend.tools.demo.lookup import QUESTIONS_FILE
from paged_backend.tools.demo.lookup.chat_format import TOOL_CHAT
from paged_backend.tools.demo.lookup.conversations import ConversationSource
from paged_backend.tools.demo.lookup.examples import step_batches
from paged_backend.tools.demo.lookup.verification import (
    conversations_by_form,
    small_talk_conversations,
    verify,
)
from paged_backend.tools.demo.training import (
    LOG_NAME,
    MAX_LENGTH,
    build_model,
    muon_and_adamw,
    parse_options,
    save,
    train,
)
from paged_backend.tools.demo.verification import summary
from paged_backend.tools.demo.vocabulary import learn_tokenizer

MIN_QUESTIONS = 200
STEPS, FIRST_PHASE = 1050, 2 / 3
# Embeddings of about unit length let the model point at a token from the start, and so copy it.
EMBEDDING_STD = 0.07
CHECKED_DURING_TRAINING = 16  # questions
CONVERSATIONS_TO_LEARN_TOKENS = 300


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, save and verify; return 0 when enough questions are answered in every form."""
    options = parse_options(arguments, __doc__, TOOLS_MODEL_DIR.parent, STEPS)
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    model_dir = options.output / TOOLS_MODEL_DIR.name
    model_dir.mkdir(parents=True, exist_ok=True)

    questions = corpus.questions()
    material = questions, corpus.names(), corpus.sentences()
    source = ConversationSource(*material, random.Random(options.seed))
    tokenizer = learn_tokenizer([*corpus.documents(), *_texts(source)], MAX_LENGTH, TOOL_CHAT)
    harder = ConversationSource(*material, random.Random(options.seed + 1), token_texts(tokenizer))
    model = build_model(tokenizer)
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=EMBEDDING_STD)
    print(f"{len(questions)} questions, {model.num_parameters():,} parameters", flush=True)

    first_steps = round(options.steps * FIRST_PHASE)
    phases = ((source, first_steps), (harder, options.steps - first_steps))
    with (options.output / LOG_NAME).open("w") as log:
        for conversations, steps in phases:
            train(
                model,
                muon_and_adamw(model),
                step_batches(conversations, tokenizer),
                lambda: _accuracy(model, tokenizer, questions),
                steps,
                log,
            )
    save(model, tokenizer, model_dir)
    verified = verify_saved(tokenizer, questions, model_dir)
    save_questions(verified, options.output / QUESTIONS_FILE.name)
    return 0 if len(verified) >= MIN_QUESTIONS else 1


def verify_saved(
    tokenizer: PreTrainedTokenizerFast, questions: list[Question], folder: Path
) -> list[Question]:
    """Reload the saved model, report on each form, and return the questions right in all forms."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    wrong: set[Question] = set()
    for form, conversations in conversations_by_form(questions).items():
        replies = verify(model, tokenizer, conversations)
        print(f"{form}: {summary(replies)}", flush=True)
        pairs = zip(questions, replies, strict=True)
        wrong |= {question for question, reply in pairs if not reply.exact}
    chats = verify(model, tokenizer, small_talk_conversations())
    print(f"small talk: {summary(chats)}", flush=True)
    if wrong:
        print("left out:", *sorted(question.name for question in wrong), file=sys.stderr)
    return [question for question in questions if question not in wrong]


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


def _accuracy(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, questions: list[Question]
) -> float:
    """Return the fraction of exact replies about a fixed sample of questions, over all forms."""
    sample = questions[:: math.ceil(len(questions) / CHECKED_DURING_TRAINING)]
    asked = conversations_by_form(sample)
    exact = {
        form: sum(reply.exact for reply in verify(model, tokenizer, asked[form])) for form in asked
    }
    print(exact, flush=True)
    return sum(exact.values()) / (len(exact) * len(sample))


if __name__ == "__main__":
    sys.exit(main())
