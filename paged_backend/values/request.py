"""One checked request on its way to the engine."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from paged_backend.values.errors import InvalidRequest
from paged_backend.values.lora import LoRARequest
from paged_backend.values.options.limits import LimitOptions
from paged_backend.values.pooling_params import PoolingParams
from paged_backend.values.sampling_params import INT32_MAX, SamplingParams
from paged_backend.values.validation import Rule, check_fields, checked, coerce

_UNLIMITED = -1  # vLLM's thinking_token_budget without a limit


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt with its parameters; it never changes after it was accepted.

    Requests share cached blocks only if their ``cache_salt`` is equal. ``request_id`` is made by
    the front end and is unique; ``call_id`` is the client's name for the request, which later
    requests may use again.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams = SamplingParams()
    cache_salt: str = ""
    priority: int = 0  # lower is served first
    tenant: str = ""  # the user that its tokens are charged to
    grammar: str = ""  # grammar of llguidance, which the front end has checked; empty: none
    call_id: str = ""  # by which a client can cancel it; empty: no client can
    # Ask for an embedding of the prompt, or for the score of a reranker. Nothing is generated then,
    # and `params` have no effect.
    pooling: PoolingParams | None = None
    # Fraction of the prompt's tokens that must be cached when the request arrives; it ends at once
    # otherwise.
    cache_hit_threshold: float = 0.0
    speculate: bool = True  # guess its tokens, where the engine does
    predicted_token_ids: list[int] = field(default_factory=list)  # a text that it may repeat
    lora: LoRARequest | None = None  # the adapter that changes the model for it
    adapter: str = ""  # the digest of this adapter's weights, which the engine fills in

    @property
    def cache_keys(self) -> tuple[str, ...]:
        """Everything but the tokens that cached blocks of the request depend on."""
        return (self.cache_salt, self.adapter) if self.adapter else (self.cache_salt,)

    @property
    def is_private(self) -> bool:
        """Whether its tokens may appear nowhere but in its own answer."""
        return bool(self.cache_salt)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """The parameters of a request that do not concern sampling, checked when made.

    Raises:
        InvalidRequest: a field has the wrong type or lies outside its range.
    """

    priority: int = checked(0, Rule(int, -(2**31), INT32_MAX), "lower values are served first")
    tenant: str = checked("", Rule(str, max_length=256), "the user that tokens are charged to")
    cache_salt: str = checked(
        "", Rule(str, max_length=256), "requests share cached blocks only if it is equal"
    )
    timeout_s: float | None = checked(
        None, Rule(float, high=86400, above=0, optional=True), "from arrival to the last token"
    )
    thinking_token_budget: int | None = checked(
        None, Rule(int, 0, INT32_MAX, optional=True), "tokens after which reasoning must end"
    )
    cache_hit_threshold: float = checked(
        0.0, Rule(float, 0, 1), "fraction of the prompt that must be cached on arrival"
    )
    speculate: bool = checked(
        True, Rule(bool), "guess tokens, where the engine does (speculative_config)"
    )
    prediction: str = checked("", Rule(str), "a text that the answer may repeat, for guesses")

    def __post_init__(self) -> None:
        check_fields(self, InvalidRequest)

    @classmethod
    def take_from(cls, values: dict[str, Any]) -> RequestOptions:
        """Remove these parameters from a request's untrusted parameters, and check them.

        Null stands for the default, and so does vLLM's -1 for ``thinking_token_budget``.

        Raises:
            InvalidRequest: a value is not allowed.
        """
        names = {spec.name for spec in fields(cls)} & values.keys()
        given = coerce(cls, {name: values.pop(name) for name in names})
        if given.get("thinking_token_budget") == _UNLIMITED:
            del given["thinking_token_budget"]
        return cls(**{name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """The limits of a request, from the model and the options; fields have the options' names."""

    max_model_len: int  # tokens of prompt and output together
    vocab_size: int
    max_num_seqs: int
    max_prompt_tokens: int
    max_output_tokens: int
    max_n: int
    max_beam_width: int
    max_stop_strings: int
    max_stop_length: int
    max_logit_bias: int
    max_json_length: int
    max_json_depth: int
    max_pass_through_length: int
    max_total_logprobs: int
    max_total_logits: int
    embedding_size: int = 0  # numbers of an embedding; 0: the model generates tokens
    normalize: bool = False  # embeddings are scaled to a length of 1
    scores_pairs: bool = False  # the model is a reranker, which scores pairs of texts
    speculates: bool = False  # the engine guesses tokens
    max_loras: int = 0  # different LoRA adapters of a step; 0: requests cannot name any

    @classmethod
    def of(
        cls,
        config: LimitOptions,
        *,
        max_model_len: int,
        vocab_size: int,
        max_num_seqs: int,
        embedding_size: int = 0,
        normalize: bool = False,
        scores_pairs: bool = False,
        speculates: bool = False,
        max_loras: int = 0,
    ) -> RequestLimits:
        """Combine the options with the limits of the loaded model."""
        return cls(
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            max_num_seqs=max_num_seqs,
            # A prompt that generates leaves room for a token.
            max_prompt_tokens=min(
                config.max_prompt_tokens or max_model_len,
                max_model_len - (embedding_size == 0 and not scores_pairs),
            ),
            max_output_tokens=min(config.max_output_tokens or max_model_len, max_model_len),
            max_n=config.max_n,
            max_beam_width=config.max_beam_width,
            max_stop_strings=config.max_stop_strings,
            max_stop_length=config.max_stop_length,
            max_logit_bias=config.max_logit_bias,
            max_json_length=config.max_json_length,
            max_json_depth=config.max_json_depth,
            max_pass_through_length=config.max_pass_through_length,
            max_total_logprobs=config.max_total_logprobs,
            max_total_logits=config.max_total_logits,
            embedding_size=embedding_size,
            normalize=normalize,
            scores_pairs=scores_pairs,
            speculates=speculates,
            max_loras=max_loras,
        )

    @property
    def has_adapters(self) -> bool:
        """True if requests may name LoRA adapters."""
        return self.max_loras > 0

    @property
    def makes_embeddings(self) -> bool:
        """True if the model makes embeddings."""
        return self.embedding_size > 0

    @property
    def _ability(self) -> str:
        """The only thing that the model does."""
        if self.scores_pairs:
            return "scores pairs of texts"
        return "makes embeddings" if self.makes_embeddings else "generates text"

    @property
    def longest_prompt(self) -> str:
        """Describe the maximum length of a prompt and the option or limit that it comes from."""
        if self.max_prompt_tokens == self.max_model_len:
            return f"{self.max_prompt_tokens} tokens: max_model_len ({self.max_model_len})"
        is_whole = self.makes_embeddings or self.scores_pairs
        if is_whole or self.max_prompt_tokens < self.max_model_len - 1:
            return f"{self.max_prompt_tokens} tokens (max_prompt_tokens)"
        return f"{self.max_prompt_tokens} tokens, below max_model_len ({self.max_model_len})"

    def bounded(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with ``max_tokens`` set; by default it is the largest allowed.

        Raises:
            InvalidRequest: ``min_tokens`` is larger.
        """
        if params.max_tokens is not None:
            return params
        return replace(params, max_tokens=self.max_output_tokens)

    def check(self, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """Check a request for new tokens against the model.

        Raises:
            InvalidRequest: naming the field and the allowed range.
        """
        self.check_generates()
        self._check_prompt(prompt_token_ids)
        self._check_sizes(params)
        self._check_lists(params)
        for name, token in params.named_token_ids():
            if token >= self.vocab_size:
                raise InvalidRequest(name, f"must be below {self.vocab_size}, got {token}")

    def check_generates(self) -> None:
        """Check that the model generates tokens.

        Raises:
            InvalidRequest: it does something else.
        """
        if self.makes_embeddings or self.scores_pairs:
            raise InvalidRequest("task", f"the model {self._ability}; it does not generate text")

    def check_embeds(self) -> None:
        """Check that the model makes embeddings.

        Raises:
            InvalidRequest: it does something else.
        """
        if not self.makes_embeddings:
            raise InvalidRequest("task", f"the model {self._ability}; it makes no embeddings")

    def check_scores(self) -> None:
        """Check that the model scores pairs of texts.

        Raises:
            InvalidRequest: it does something else.
        """
        if not self.scores_pairs:
            raise InvalidRequest(
                "task", f"the model {self._ability}; it does not score pairs of texts"
            )

    def check_pair(self, prompt_token_ids: list[int]) -> None:
        """Check the tokens of a pair of texts against the model.

        Raises:
            InvalidRequest: naming the field and the allowed range.
        """
        self.check_scores()
        self._check_prompt(prompt_token_ids)

    def check_embedding(self, prompt_token_ids: list[int], params: PoolingParams) -> None:
        """Check a request for an embedding against the model.

        Raises:
            InvalidRequest: naming the field and the allowed range.
        """
        self.check_embeds()
        self._check_prompt(prompt_token_ids)
        if params.dimensions is not None and params.dimensions > self.embedding_size:
            raise InvalidRequest(
                "dimensions",
                f"must be at most the size of the model's embeddings ({self.embedding_size}), got "
                f"{params.dimensions}",
            )

    def check_token_ids(self, name: str, token_ids: list[int]) -> None:
        """Check that token ids are in the vocabulary.

        Raises:
            InvalidRequest: naming the field and the allowed range.
        """
        low, high = min(token_ids, default=0), max(token_ids, default=0)
        if low < 0 or high >= self.vocab_size:
            bad = low if low < 0 else high
            raise InvalidRequest(name, f"must be from 0 to {self.vocab_size - 1}, got {bad}")

    def _check_prompt(self, prompt_token_ids: list[int]) -> None:
        length = len(prompt_token_ids)
        if length == 0:
            raise InvalidRequest("prompt", "is empty; at least one token is needed")
        if length > self.max_prompt_tokens:
            raise InvalidRequest("prompt", f"has {length} tokens; at most {self.longest_prompt}")
        low, high = min(prompt_token_ids), max(prompt_token_ids)
        if low < 0 or high >= self.vocab_size:
            bad = low if low < 0 else high
            raise InvalidRequest(
                "prompt", f"token ids must be from 0 to {self.vocab_size - 1}, got {bad}"
            )

    def _check_sizes(self, params: SamplingParams) -> None:
        output = "max_output_tokens"
        if self.max_output_tokens == self.max_model_len:
            output = "max_model_len"
        for name, value, option in (
            ("n", params.n, "max_n"),
            ("n", params.n, "max_num_seqs"),
            ("beam_width", params.beam_width, "max_beam_width"),
            ("beam_width", params.beam_width, "max_num_seqs"),
            ("max_tokens", params.max_tokens, output),
        ):
            limit: int = getattr(self, option)
            if value is not None and value > limit:
                raise InvalidRequest(name, f"must be at most {option} ({limit}), got {value}")

    def check_total_logprobs(self, num_prompt_tokens: int, params: SamplingParams) -> None:
        """Limit what a request returns with its tokens, because sending it delays other requests.

        Raises:
            InvalidRequest: it would have more than ``max_total_logprobs`` or ``max_total_logits``.
        """
        num_output_tokens = params.n * (params.max_tokens or self.max_output_tokens)
        for name, num_top, num_tokens in (
            ("prompt_logprobs", params.prompt_logprobs, num_prompt_tokens),
            ("logprobs", params.logprobs, num_output_tokens),
        ):
            total = 0 if num_top is None else num_tokens * (1 + num_top)
            if total > self.max_total_logprobs:
                raise InvalidRequest(
                    name,
                    f"at most {self.max_total_logprobs} in all (max_total_logprobs), got up to "
                    f"{total}: {num_tokens} tokens with {num_top} of the likeliest each",
                )
        for name, is_on, num_tokens in (
            ("return_context_logits", params.return_context_logits, num_prompt_tokens),
            ("return_generation_logits", params.return_generation_logits, num_output_tokens),
        ):
            total = num_tokens * self.vocab_size
            if is_on and total > self.max_total_logits:
                raise InvalidRequest(
                    name,
                    f"at most {self.max_total_logits} logits in all (max_total_logits), got up to "
                    f"{total}: {num_tokens} tokens with {self.vocab_size} each",
                )

    def _check_lists(self, params: SamplingParams) -> None:
        longest = max(map(len, params.stop), default=0)
        for name, value, limit, words in (
            ("stop", len(params.stop), self.max_stop_strings, "strings (max_stop_strings)"),
            ("stop", longest, self.max_stop_length, "characters (max_stop_length)"),
            ("logit_bias", len(params.logit_bias), self.max_logit_bias, "entries (max_logit_bias)"),
            ("allowed_token_ids", len(params.allowed_token_ids), self.vocab_size, "token ids"),
        ):
            if value > limit:
                raise InvalidRequest(name, f"at most {limit} {words}, got {value}")
