"""The options of `bench quality` that say what is asked."""

from __future__ import annotations

from dataclasses import dataclass

from paged_backend.values.errors import option_error
from paged_backend.values.validation import Rule, check_fields, checked

NUM_RANDOM_PROMPTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """The prompts to answer, and the maximum length of the answers.

    Raises:
        ConfigError: an option has the wrong type or lies outside its range.
    """

    prompts: str | None = checked(
        None,
        Rule(str, optional=True),
        'a file with a prompt in each line, or a .jsonl file of objects with "prompt"; default: '
        "the questions that the model demo knows, and random token ids for other models",
    )
    num_prompts: int | None = checked(
        None,
        Rule(int, 1, 10**6, optional=True),
        f"prompts at most, from the first; default: all, and {NUM_RANDOM_PROMPTS} random ones",
    )
    input_len: int = checked(64, Rule(int, 1, 2**20), "tokens of a random prompt")
    max_tokens: int = checked(128, Rule(int, 1, 2**20), "tokens of an answer at most")

    def __post_init__(self) -> None:
        check_fields(self, option_error)
