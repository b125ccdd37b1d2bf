"""Reads config.json for encoders of the BERT family, which transformers computes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paged_backend.checkpoint.classifier import ClassifierSpec, read_activation
from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.fallback_config import find_integer, read_auto_config
from paged_backend.checkpoint.limits import MAX_HIDDEN_SIZE, MAX_POSITIONS, MAX_VOCAB_SIZE
from paged_backend.checkpoint.model_config import DTYPES
from paged_backend.checkpoint.sentence_transformers import read_max_length
from paged_backend.checkpoint.shape_reader import read_dtype
from paged_backend.values.validation import shorten

# Values of model_type. In the second list, the position of a token is the number of tokens up to
# it that are not the padding token, plus the padding token's id.
_PLAIN = ("bert", "distilbert", "electra", "albert", "modernbert", "nomic_bert", "eurobert", "gte")
_AFTER_PADDING = ("roberta", "xlm-roberta", "camembert", "mpnet")
ENCODERS = (*_PLAIN, *_AFTER_PADDING)
# Encoders with supported rerankers: the texts of a pair differ by nothing but their places.
_RERANKERS = ("roberta", "xlm-roberta", "camembert")


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """The facts that a worker needs about an encoder.

    Attributes:
        architecture: the class in transformers: of the model without a head, or of a reranker.
        hidden_size: numbers of a hidden state.
        vocab_size: number of tokens.
        max_position_embeddings: tokens of the longest prompt.
        max_seq_length: tokens of the longest prompt that sentence-transformers computes, or that
            the tokenizer is made for; None if there is no such length.
        padding_id: positions are counted from this token's id on; None if they begin at 0.
        dtype: dtype of the checkpoint.
        file: config.json.
        classifier: the head of a reranker; None if the model makes embeddings.
    """

    architecture: str
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    max_seq_length: int | None
    padding_id: int | None
    dtype: torch.dtype
    file: ConfigFile
    classifier: ClassifierSpec | None = None
    eos_token_ids: tuple[int, ...] = ()
    has_output_layer: bool = False


def is_encoder(checkpoint: Path) -> bool:
    """Return True for an encoder by its ``model_type``, unless it is a causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    file = ConfigFile.read(checkpoint / "config.json")
    kind = file.value("model_type")
    if not isinstance(kind, str) or kind not in ENCODERS:
        return False
    names = file.value("architectures")
    return not isinstance(names, list) or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind) not in names


def load_encoder_config(checkpoint: Path) -> EncoderConfig:
    """Read what a worker needs by means of transformers' own configuration class.

    Raises:
        ConfigError: the model has a head that is not supported, or a key is wrong.
    """
    file = ConfigFile.read(checkpoint / "config.json")
    architecture, is_reranker = _find_class(file)
    config = read_auto_config(checkpoint, file)
    if getattr(config, "is_decoder", False):
        raise file.error("is_decoder", "is true; only encoders, which are bidirectional, can embed")
    vocab_size = find_integer(file, config, "vocab_size", MAX_VOCAB_SIZE)
    positions = find_integer(file, config, "max_position_embeddings", MAX_POSITIONS)
    padding_id = None
    if file.value("model_type") in _AFTER_PADDING:
        padding_id = find_integer(file, config, "pad_token_id", positions - 2, low=0)
        positions -= padding_id + 1
    max_length = read_max_length(checkpoint)
    if max_length is None:
        max_length = _tokenizer_length(checkpoint, file, positions)
    return EncoderConfig(
        architecture=architecture,
        hidden_size=find_integer(file, config, "hidden_size", MAX_HIDDEN_SIZE),
        vocab_size=vocab_size,
        max_position_embeddings=positions,
        max_seq_length=read_max_length(checkpoint)
        or _tokenizer_length(checkpoint, file, positions),
        padding_id=padding_id,
        dtype=DTYPES[read_dtype(file)],
        file=file,
        classifier=_read_classifier(file, config) if is_reranker else None,
    )


def _tokenizer_length(checkpoint: Path, file: ConfigFile, positions: int) -> int | None:
    """Return the tokenizer's ``model_max_length``; None if it is missing or above the positions.

    Like vLLM, this reads it for absolute positions only; many tokenizers have a length of 10^30.
    """
    path = checkpoint / "tokenizer_config.json"
    if file.value("position_embedding_type") != "absolute" or not path.exists():
        return None
    length = ConfigFile.read(path).value("model_max_length")
    return length if type(length) is int and 0 < length < positions else None


def _read_classifier(file: ConfigFile, config: Any) -> ClassifierSpec:
    if find_integer(file, config, "type_vocab_size", 2**31) != 1:
        raise file.error("type_vocab_size", "must be 1 for a reranker")
    return ClassifierSpec(read_activation(file))


def _find_class(file: ConfigFile) -> tuple[str, bool]:
    """Return the class to load, and whether it is a reranker's.

    If the head predicts tokens, it is the class of the model without a head.
    """
    from transformers.models.auto import modeling_auto as auto

    kind = file.value("model_type")
    base = str(auto.MODEL_MAPPING_NAMES[kind])
    masked = auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.get(kind)
    pretrained = auto.MODEL_FOR_PRETRAINING_MAPPING_NAMES.get(kind)
    allowed = list(dict.fromkeys(name for name in (base, masked, pretrained) if name is not None))
    reranker = auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(kind)
    names = file.value("architectures")
    if kind in _RERANKERS and names == [reranker]:
        return str(reranker), True
    if not isinstance(names, list) or not any(name in allowed for name in names):
        if kind in _RERANKERS:
            allowed.append(str(reranker))
        raise file.error(
            "architectures",
            f"is {shorten(names)}; with model_type {kind} it must have one of "
            + ", ".join(allowed),
        )
    return base, False
