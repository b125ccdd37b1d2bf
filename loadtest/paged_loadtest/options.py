"""Options for the server and the load: the only place for their defaults, ranges and help."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

from paged_backend.values.errors import option_error
from paged_backend.values.validation import Rule, check_fields, checked, shorten

BACKENDS = {
    "triton": "127.0.0.1:8001",
    "triton-http": "http://127.0.0.1:8000",
    "openai": "http://127.0.0.1:9000",
    "openai-chat": "http://127.0.0.1:9000",
}
"""Protocols and their default addresses."""

MIN_OWN_LEN = 8
"""Minimum number of unshared prompt tokens: room for the tokens that a tokenizer adds."""

_ADDRESS = re.compile(r"(?P<scheme>[a-z]+://)?(?P<host>\[[^/\s\]]+\]|[^/:\s]+)(?P<port>:\d{1,5})?")
_UNLIMITED = "inf"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOptions:
    """Options of the server and its model.

    Raises:
        ConfigError: an option has the wrong type or lies outside its range.
    """

    backend: str = checked(
        "triton",
        Rule(str, choices=tuple(BACKENDS)),
        "what the server speaks: Triton's gRPC, its HTTP (generate_stream), /v1/completions, or "
        "/v1/chat/completions",
    )
    base_url: str | None = checked(
        None,
        Rule(str, optional=True),
        "where; default: " + ", ".join(f"{url} for {name}" for name, url in BACKENDS.items()),
    )
    model: str = checked("paged_llm", Rule(str), "what the server calls the model")
    tokenizer: str | None = checked(
        None,
        Rule(str, optional=True),
        "the model's, for prompts as text: a folder, a Hugging Face id, demo or demo-tools",
    )
    vocab_size: int | None = checked(
        None, Rule(int, 1, 2**31 - 1, optional=True), "of the model, where the server does not say"
    )
    max_model_len: int | None = checked(
        None, Rule(int, 2, 2**31 - 1, optional=True), "of the model; default: what the server says"
    )
    fresh_cache: bool = checked(
        True,
        Rule(bool),
        "find nothing in the prefix cache that earlier runs have left there, where the server "
        "knows vLLM's cache_salt",
    )
    request_timeout: float = checked(600.0, Rule(float, above=0), "seconds for a whole answer")
    processes: int = checked(
        1,
        Rule(int, 1, 256),
        "processes that send requests and read responses; one reads about 5,000 a second",
    )

    def __post_init__(self) -> None:
        check_fields(self, option_error)
        if not self.model:
            raise option_error("model", "must not be empty")
        _check_address("base_url", self.base_url, self.backend)

    @property
    def address(self) -> str:
        """The server's ``host:port`` for gRPC, ``http://host:port`` for the other protocols."""
        url = self.base_url or BACKENDS[self.backend]
        return address_of(url, is_grpc=self.backend == "triton")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Options of when requests are sent; requests of a trace have their own times.

    Raises:
        ConfigError: an option has the wrong type or lies outside its range.
    """

    request_rate: str = checked(
        _UNLIMITED,
        Rule(str),
        "requests a second (open loop); inf: as fast as --max-concurrency lets",
    )
    burstiness: float = checked(
        1.0,
        Rule(float, above=0),
        "of the gaps between them, which follow a gamma distribution of this shape: 1 is "
        "Poisson's, below it comes in bursts, above it is more even",
    )
    max_concurrency: int | None = checked(
        None, Rule(int, 1, 10**6, optional=True), "requests that may be open at once (closed loop)"
    )
    num_warmups: int = checked(
        0, Rule(int, 0, 10**6), "requests sent before the measurement, with contents of their own"
    )

    def __post_init__(self) -> None:
        check_fields(self, option_error)
        if not self._rate() > 0:
            raise option_error(
                "request_rate", f"must be a number above 0 or inf, got {shorten(self.request_rate)}"
            )

    @property
    def rate(self) -> float | None:
        """Requests per second; None for no limit."""
        rate = self._rate()
        return None if math.isinf(rate) else rate

    def _rate(self) -> float:
        try:
            return float(self.request_rate)
        except ValueError:
            return math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions(LoadOptions):
    """Options of a load, and of a peer that gets the same load.

    Raises:
        ConfigError: an option has the wrong type or lies outside its range.
    """

    peer_url: str | None = checked(
        None,
        Rule(str, optional=True),
        "another server, such as http://127.0.0.1:8000 of vLLM, that gets the same requests in "
        "turn; ratios are printed",
    )
    peer_backend: str = checked(
        "openai", Rule(str, choices=tuple(BACKENDS)), "what the peer speaks, as in --backend"
    )
    peer_model: str | None = checked(
        None, Rule(str, optional=True), "what the peer calls the model; default: as the server"
    )
    rounds: int = checked(
        1, Rule(int, 1, 100), "measurements of the server and of the peer, with new contents each"
    )

    def __post_init__(self) -> None:
        LoadOptions.__post_init__(self)
        if self.peer_url is None and (self.rounds > 1 or self.peer_model is not None):
            name = "rounds" if self.rounds > 1 else "peer_model"
            raise option_error(name, "needs --peer-url, the address of the peer")
        _check_address("peer_url", self.peer_url, self.peer_backend)

    def peer(self, target: TargetOptions) -> TargetOptions | None:
        """Return the options of the peer, with the server's other options; None without one."""
        if self.peer_url is None:
            return None
        return replace(
            target,
            backend=self.peer_backend,
            base_url=self.peer_url,
            model=self.peer_model or target.model,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """Options of when a sweep ends.

    Raises:
        ConfigError: an option has the wrong type or lies outside its range.
    """

    min_gain: float = checked(
        5.0,
        Rule(float, 0, 100),
        "percent of output tokens a second that twice the requests must add; the sweep ends where "
        "two levels in a row do not",
    )
    up_to: int = checked(1024, Rule(int, 1, 10**6), "concurrency at which it ends in any case")

    def __post_init__(self) -> None:
        check_fields(self, option_error)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixOptions:
    """Options of the prefix-cache bench.

    Raises:
        ConfigError: an option has the wrong type or lies outside its range.
    """

    prompt_len: int = checked(512, Rule(int, 2 * MIN_OWN_LEN, 2**24), "tokens of each prompt")
    hit_rates: str = checked(
        "0,25,50,75,100", Rule(str), "percent of each prompt that the prompts share"
    )
    max_concurrency: int = checked(1, Rule(int, 1, 10**6), "requests that are open at once")

    def __post_init__(self) -> None:
        check_fields(self, option_error)
        if not all(0 <= percent <= 100 for percent in self.percents):
            raise self._wrong_hit_rates()

    @property
    def percents(self) -> list[float]:
        """The hit rates in percent, as numbers.

        Raises:
            ConfigError: `hit_rates` is not a list of numbers.
        """
        try:
            return [float(part) for part in self.hit_rates.split(",")]
        except ValueError:
            raise self._wrong_hit_rates() from None

    def _wrong_hit_rates(self) -> Exception:
        return option_error(
            "hit_rates",
            f"must be numbers from 0 up to 100 with commas between, got {shorten(self.hit_rates)}",
        )


def address_of(url: str, *, is_grpc: bool) -> str:
    """Return ``host:port`` for gRPC, otherwise a URL; neither ends in a slash or ``/v1``."""
    root = _root(url)
    if is_grpc:
        return root.rpartition("://")[2]
    return root if "://" in root else f"http://{root}"


def _check_address(name: str, url: str | None, backend: str) -> None:
    if url is not None and _ADDRESS.fullmatch(_root(url)) is None:
        raise option_error(
            name, f"must be an address such as {BACKENDS[backend]}, got {shorten(url)}"
        )


def _root(url: str) -> str:
    """Return the address without a trailing slash or OpenAI's ``/v1``."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")
