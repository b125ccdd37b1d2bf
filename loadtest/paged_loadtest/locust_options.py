"""Options of a Locust run besides its workload; does not import Locust."""

from __future__ import annotations

from dataclasses import dataclass

from paged_backend.values.errors import option_error
from paged_backend.values.validation import Rule, check_fields, checked

SHAPES = ("constant", "ramp", "burst", "wave")
NUM_PROMPTS = 1000  # more than a small model serves in a run of a few minutes
STOP_TIMEOUT_S = 60  # long enough for a request that starts at the end of a run


@dataclass(frozen=True, slots=True, kw_only=True)
class LocustOptions:
    """The target of requests, and when they are sent.

    Raises:
        ConfigError: an option has the wrong type or lies outside its range.
    """

    model: str = checked("paged_llm", Rule(str), "name of the model on the server")
    grpc_url: str = checked("127.0.0.1:8001", Rule(str), "HOST:PORT that GrpcUser asks")
    http_url: str = checked(
        "http://127.0.0.1:8000", Rule(str), "base URL that HttpUser asks with generate_stream"
    )
    openai_url: str = checked(
        "http://127.0.0.1:9000",
        Rule(str),
        "base URL that OpenAIUser asks; OPENAI_API_KEY in the environment is its key",
    )
    tokenizer: str | None = checked(
        None,
        Rule(str, optional=True),
        "a folder, a Hugging Face id, demo or demo-tools: for prompts that are text or chats",
    )
    vocab_size: int | None = checked(
        None, Rule(int, 1, 2**31 - 1, optional=True), "of the model, where the server does not say"
    )
    max_model_len: int | None = checked(
        None, Rule(int, 2, 2**31 - 1, optional=True), "of the model; default: what the server says"
    )
    request_rate: float | None = checked(
        None,
        Rule(float, above=0, optional=True),
        "requests a second of all --users together, at random moments (Poisson) and whatever is "
        "unanswered; default: a user asks again once it has its answer",
    )
    shape: str = checked(
        "constant",
        Rule(str, choices=SHAPES),
        "constant: --users from beginning to end; ramp: twice as many at each step, until that "
        "brings no more tokens a second; burst: all of them for a short while, again and again; "
        "wave: as by day and by night. With --request-rate the rate follows the users",
    )
    floor: float = checked(
        0.1,
        Rule(float, 0, 1),
        "the part of --users that stays between bursts, and at a wave's lowest point",
    )
    ramp_step: float = checked(15.0, Rule(float, above=0), "seconds of each step of a ramp")
    ramp_gain: float = checked(
        0.05,
        Rule(float, 0, 1),
        "a ramp ends with the step that raises tokens a second by less than this part",
    )
    burst_every: float = checked(20.0, Rule(float, above=0), "seconds from a burst to the next")
    burst_length: float = checked(5.0, Rule(float, above=0), "seconds that a burst lasts")
    wave_period: float = checked(240.0, Rule(float, above=0), "seconds that the wave's day has")

    def __post_init__(self) -> None:
        check_fields(self, option_error)
        if self.burst_length >= self.burst_every:
            raise option_error("burst_length", f"must be below burst_every ({self.burst_every:g})")
