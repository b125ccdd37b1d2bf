"""Workload options: the only place for their defaults, ranges and help."""

from __future__ import annotations

from dataclasses import dataclass

from paged_backend.tools.workloads.lengths import MAX_LENGTH, parse_lengths
from paged_backend.values.errors import option_error
from paged_backend.values.validation import Rule, check_fields, checked

DATASETS = ("random", "shared-prefix", "conversations", "sharegpt", "trace")
FORMATS = ("ids", "text", "chat")
NUM_PROMPTS = 64

# Default lengths of prompt and response, if the recipe sets them.
_MIX = ("lognormal:median=128,min=32,max=512", "lognormal:median=96,min=16,max=256")
_TURNS = ("lognormal:median=32,min=8,max=128", "lognormal:median=24,min=4,max=64")
_LENGTHS = {"random": _MIX, "shared-prefix": _MIX, "conversations": _TURNS}


@dataclass(frozen=True, slots=True)
class TokenizerContext:
    """Properties of the model that prompts depend on.

    Only text, chats and sharegpt files need a tokenizer: a folder, a Hugging Face id, or the name
    of a bundled model.
    """

    vocab_size: int | None  # needed for token ids only
    max_model_len: int  # tokens of prompt and response together
    tokenizer: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """A recipe for requests; options have their names in vLLM's ``bench serve`` where it has them.

    Raises:
        ConfigError: an option has the wrong type or lies outside its range.
    """

    dataset_name: str = checked(
        "random",
        Rule(str, choices=DATASETS),
        "random: prompts that share nothing; shared-prefix: groups of prompts that begin alike; "
        "conversations: chats of several turns; sharegpt: a JSON file of chats; trace: a JSON "
        "Lines file with arrival times, as Mooncake's",
    )
    dataset_path: str | None = checked(
        None, Rule(str, optional=True), "the file of a sharegpt or trace dataset"
    )
    num_prompts: int | None = checked(
        None,
        Rule(int, 1, 10**7, optional=True),
        f"requests to make, a conversation is one; default: {NUM_PROMPTS}, and all of a trace",
    )
    seed: int = checked(0, Rule(int, 0, 2**63 - 1), "of lengths, contents and order")
    prompt_format: str | None = checked(
        None,
        Rule(str, choices=FORMATS, optional=True),
        "what prompts are sent as; default: chat for conversations, text for sharegpt, else ids",
    )
    input_len: str | None = checked(
        None,
        Rule(str, optional=True),
        "tokens of a prompt, of its part after a shared prefix, or of each turn: N, "
        "uniform:min=A,max=B, lognormal:median=M,min=A,max=B,sigma=S, or percentiles:50=A,90=B; "
        f"default: {_MIX[0]}; of a turn {_TURNS[0]}",
    )
    output_len: str | None = checked(
        None,
        Rule(str, optional=True),
        f"tokens of an answer, in the same forms; default: {_MIX[1]}; of a turn {_TURNS[1]}; "
        "sharegpt and trace: what the file says",
    )
    prefix_len: int = checked(
        256, Rule(int, 0, MAX_LENGTH), "tokens that the prompts of a shared-prefix group share"
    )
    num_prefixes: int = checked(8, Rule(int, 1, 10**7), "groups of a shared-prefix dataset")
    num_turns: str = checked(
        "4", Rule(str), "requests of each of the conversations, in the forms of a length"
    )
    trace_block_size: int = checked(
        512, Rule(int, 1, MAX_LENGTH), "tokens that a hash id of a trace stands for"
    )
    trace_speedup: float = checked(
        1.0, Rule(float, above=0, high=1e6), "times faster that a trace is replayed"
    )
    skip_too_long: bool = checked(
        False, Rule(bool), "leave out what does not fit max_model_len, instead of refusing it all"
    )
    ignore_eos: bool = checked(
        True, Rule(bool), "answers go on to their full length, whatever the model says"
    )

    def __post_init__(self) -> None:
        check_fields(self, option_error)
        self._choose_lengths()
        for name in ("input_len", "output_len", "num_turns"):
            if (text := getattr(self, name)) is not None:
                parse_lengths(name, text)
        if self.dataset_name == "conversations" and self.prompt_format not in (None, "chat"):
            raise option_error(
                "dataset_name",
                f"must not be conversations where prompts are {self.prompt_format}: only a chat "
                "can grow by the answers",
            )
        if self.dataset_path is None and self.dataset_name in ("sharegpt", "trace"):
            raise option_error(
                "dataset_path", f"must name the file of the {self.dataset_name} dataset"
            )

    def _choose_lengths(self) -> None:
        """Fill in the recipe's default lengths, so that results show them."""
        lengths = _LENGTHS.get(self.dataset_name, (None, None))
        for name, text in zip(("input_len", "output_len"), lengths, strict=True):
            if getattr(self, name) is None:
                object.__setattr__(self, name, text)
