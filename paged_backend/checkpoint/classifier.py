"""Reads what config.json says about the head of a reranker, which scores a pair of texts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.values.errors import ConfigError
from paged_backend.values.validation import shorten


class ScoreFunction(StrEnum):
    """The function that makes a score of the head's output."""

    SIGMOID = "sigmoid"
    IDENTITY = "identity"


# By the end of the name of torch's class.
_ACTIVATIONS = {"Sigmoid": ScoreFunction.SIGMOID, "Identity": ScoreFunction.IDENTITY}
_OLDER_KEY = "sbert_ce_default_activation_function"


@dataclass(frozen=True, slots=True)
class ClassifierSpec:
    """The head of a reranker.

    Attributes:
        activation: makes a score of its output.
        token_ids: the tokens (no, yes); their rows of the output layer form the head. None if the
            checkpoint has a head.
    """

    activation: ScoreFunction
    token_ids: tuple[int, int] | None = None


def read_activation(file: ConfigFile) -> ScoreFunction:
    """Read the activation that sentence-transformers would use; a sigmoid if none is named.

    Raises:
        ConfigError: it is another one, or the model has not exactly one label.
    """
    check_one_label(file)
    section = file.section("sentence_transformers")
    source, key = (file, _OLDER_KEY) if section is None else (section, "activation_fn")
    name = source.value(key)
    if name is None:
        return ScoreFunction.SIGMOID
    found = _ACTIVATIONS.get(name.rpartition(".")[2]) if isinstance(name, str) else None
    if found is None:
        raise source.error(key, f"must be {' or '.join(_ACTIVATIONS)}, got {shorten(name)}")
    return found


def check_one_label(file: ConfigFile) -> None:
    """Refuse a head with several labels, which makes no score.

    Raises:
        ConfigError: config.json has not exactly one label; without labels, transformers makes two.
    """
    labels = file.section("id2label")
    number = file.integer("num_labels", 2) if labels is None else len(list(labels.keys()))
    if number != 1:
        key = "num_labels" if labels is None else "id2label"
        raise file.error(key, f"gives {number} labels; only rerankers, which have 1, are supported")


def parse_tokens(option: str) -> tuple[str, str]:
    """Return the tokens in the option ``classifier_from_token``.

    Raises:
        ConfigError: they are not two.
    """
    tokens = option.split(",")
    if len(tokens) != 2 or not all(tokens) or tokens[0] == tokens[1]:
        raise ConfigError(
            "option classifier_from_token must be two tokens, such as no,yes, the second for a "
            f"match; got {shorten(option)}"
        )
    return tokens[0], tokens[1]
