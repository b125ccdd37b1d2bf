"""Tiny rerankers with random weights, and the scores that transformers' models give to pairs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from checkpoints import make_checkpoint, values_of
from encoders import ENCODERS, encoder_config
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
)

from paged_backend.checkpoint.bundled import MODEL_DIR

QUERY = "What does len do?"
DOCUMENTS = ["import os", "x", "Return the number of items in a container.", "x"]
NO, YES = "The", "os"  # tokens of the tokenizer
_SIZES = {"vocab_size": 2048, "pad_token_id": 0}


def add_tokenizer(folder: Path) -> None:
    """Give a checkpoint the bundled model's tokenizer."""
    for file in MODEL_DIR.glob("tokenizer*"):
        shutil.copy(file, folder)


def make_reranker(family: str, folder: Path, **overrides: Any) -> PreTrainedModel:
    """Save a model with a classification head, and return transformers' own float32 model."""
    if family in ENCODERS:
        sizes = {"vocab_size": _SIZES["vocab_size"], "type_vocab_size": 1}
        config = encoder_config(family, **{**sizes, "num_labels": 1, **overrides})
    else:
        values = {**values_of(family), **_SIZES, "num_labels": 1, **overrides}
        config = AutoConfig.for_model(**values)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model: PreTrainedModel = AutoModelForSequenceClassification.from_config(
            config, dtype=torch.float32
        )
    model.save_pretrained(folder)
    add_tokenizer(folder)
    return model.eval()


def make_answerer(family: str, folder: Path, **overrides: Any) -> PreTrainedModel:
    """Save a model that generates; two of its tokens are answers about a pair."""
    model = make_checkpoint(family, folder, **_SIZES, **overrides)
    add_tokenizer(folder)
    return model


@torch.inference_mode()
def classifier_scores(model: PreTrainedModel, folder: Path, query: str = QUERY) -> list[float]:
    """The outputs of the head for the query and each document, without an activation."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    pairs = [tokenizer(query, document, return_tensors="pt") for document in DOCUMENTS]
    return [float(model(input_ids=pair["input_ids"]).logits) for pair in pairs]


@torch.inference_mode()
def answer_scores(model: PreTrainedModel, folder: Path) -> list[float]:
    """The probability of the token `YES` beside `NO` after the query and each document."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer.convert_tokens_to_ids(token) for token in (NO, YES)]
    pairs = [tokenizer(QUERY, document, return_tensors="pt") for document in DOCUMENTS]
    logits = [model(input_ids=pair["input_ids"]).logits[0, -1, ids] for pair in pairs]
    return [float(both.softmax(0)[1]) for both in logits]
