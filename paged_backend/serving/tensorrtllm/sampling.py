"""Translates the fields of tensorrtllm_backend's clients into sampling parameters.

A field that this engine does not support is refused with an error that names the field, unless its
value turns it off.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from paged_backend.serving import fields
from paged_backend.serving.fields import Tensors
from paged_backend.serving.requests.prompts import UTF8_BYTES
from paged_backend.serving.tensorrtllm.lora import lora_error, lora_values
from paged_backend.serving.tensorrtllm.words import read_texts, read_words
from paged_backend.text.detokenizer import token_bytes
from paged_backend.text.tokenizer import Tokenizer
from paged_backend.values.errors import InvalidRequest
from paged_backend.values.request import RequestLimits
from paged_backend.values.sampling_defaults import PARAMETERS
from paged_backend.values.sampling_params import (
    DEFAULT_MAX_TOKENS,
    MAX_BAD_WORDS,
    MAX_STOP_LENGTH,
    MAX_STOP_TOKEN_IDS,
    MAX_WORD_LENGTH,
    SamplingParams,
)
from paged_backend.values.structured_outputs import KINDS, MAX_LENGTH, from_guide

PREFIX = "sampling_param_"  # prefix of the same fields in the LLM API
# Limit on the total size of the words with a bias in a request: they are tokenized on the thread
# that admits all requests, which takes a few milliseconds. A word counts as its bytes and one more.
MAX_BIAS_BYTES = 4096
_BIAS_WORDS = "embedding_bias_words"
_ANY_LENGTH = 2**30  # TensorRT-LLM's default of no_repeat_ngram_size, longer than any n-gram
_NO_END = -1  # the end_id with which only max_tokens and stop words end a sequence

# Scalars with the same meaning here, and their names here.
_SAME = {
    "min_tokens": "min_tokens",
    "num_return_sequences": "n",
    "temperature": "temperature",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "seed": "seed",
}
_WORDS = {"stop_words": "stop", "bad_words": "bad_words"}
OLDER_NAMES = {
    "random_seed": "seed",
    "min_length": "min_tokens",
    "is_return_log_probs": "return_log_probs",
    "return_kv_cache_reuse_stats": "return_perf_metrics",
}
"""Names of tensors in older releases of tensorrtllm_backend, and their names today."""

# Fields without effect unless they are set, and not supported then.
_OFF = (
    *("draft_input_ids", "draft_logits", "draft_acceptance_threshold"),
    *("num_draft_tokens", "use_draft_logits"),
    *("prompt_embedding_table", "prompt_vocab_size"),
    *("prompt_table_extra_id", "prompt_table_extra_ids"),
    *("decoder_text_input", "cross_attention_mask"),
    *("mrope_rotary_cos_sin", "mrope_position_deltas", "context_phase_params"),
    *("lookahead_window_size", "lookahead_ngram_size", "lookahead_verification_set_size"),
    *("retention_token_range_starts", "retention_token_range_ends"),
    *("retention_token_range_priorities", "retention_token_range_durations_ms"),
    *("retention_decode_priority", "retention_decode_duration_ms"),
)
# Fields that are supported with these values only.
_NEUTRAL: dict[str, tuple[float, ...]] = {
    "decoder_input_lengths": (0, 1),
    "beam_search_diversity_rate": (0,),
    "runtime_top_p_decay": (0, 1),
    "best_of": (1,),
    "no_repeat_ngram_size": (_ANY_LENGTH, 0),
}
_LENGTH_PENALTIES = ("length_penalty", "len_penalty")
_WITHOUT_BEAMS = (0, 1)  # length penalties that may come without beams


class Vocabulary(Protocol):
    """The model's tokenizer and limits."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer."""

    @property
    def limits(self) -> RequestLimits:
        """The limits of requests."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """The names of one interface for what differs between the interfaces."""

    max_tokens: str
    top_k: str
    top_p: str
    prefix: str = ""  # beginning of the names that clients use


TEXT = Dialect("max_tokens", "top_k", "top_p")  # ensemble and tensorrt_llm_bls
IDS = Dialect("request_output_len", "runtime_top_k", "runtime_top_p")  # tensorrt_llm
LLM_API = Dialect("max_tokens", "top_k", "top_p", PREFIX)  # tensorrt_llm, with text


def sampling_values(dialect: Dialect, tensors: Tensors, llm: Vocabulary) -> dict[str, Any]:
    """Return the sampling parameters of a request by their names here.

    Raises:
        InvalidRequest: a field is not supported, or cannot be read; the error has the client's name
            for it.
    """
    _refuse_what_is_on(tensors)
    same = {dialect.max_tokens: "max_tokens", **_SAME}
    values: dict[str, Any] = {
        ours: fields.single(theirs, tensors[theirs]).item()
        for theirs, ours in same.items()
        if theirs in tensors
    }
    values = _defaults(llm.limits) | values | _truncation(dialect, tensors) | _guide(tensors)
    values |= lora_values(tensors)
    limits = {
        "stop_words": (llm.limits.max_stop_strings, MAX_STOP_LENGTH),
        "bad_words": (MAX_BAD_WORDS, MAX_WORD_LENGTH),
    }
    for theirs, ours in _WORDS.items():
        if theirs in tensors:  # an empty string stands for no word
            texts = read_texts(theirs, tensors[theirs], *limits[theirs])
            values[ours] = list(filter(None, texts))
    end = _end(tensors, llm)
    values |= end | {"stop": values.get("stop", []) + end["stop"]}
    values["stop_special_tokens"] = True  # TensorRT-LLM compares tokens, not text
    if "bad_words_list" in tensors:
        values["bad_words_token_ids"] = read_words(
            "bad_words_list", tensors["bad_words_list"], 2 * MAX_BAD_WORDS, MAX_WORD_LENGTH
        )
    bias = Counter(bias_of_words(tensors, llm))
    bias.update(_bias_of_tokens(tensors, llm.limits.max_logit_bias))  # adds them
    if bias:
        values["logit_bias"] = bias
    if fields.flag(tensors, "return_log_probs") or fields.flag(
        tensors, "return_cumulative_logprob"
    ):
        values["logprobs"] = 0
    return values | _beams(tensors)


def _beams(tensors: Tensors) -> dict[str, Any]:
    """Return what is different with beam search, whose defaults are TensorRT-LLM's, too.

    All beams are returned. Their scores are not divided by their lengths, and the search ends with
    as many complete outputs as there are beams. The seed has no effect.
    """
    given = {
        name: fields.single(name, tensors[name]).item()
        for name in (
            *("beam_width", "num_return_sequences", "temperature", "early_stopping"),
            *_LENGTH_PENALTIES,
        )
        if name in tensors
    }
    width = given.get("beam_width", 1)
    penalties = {name: given[name] for name in _LENGTH_PENALTIES if name in given}
    if width <= 1:
        for name, penalty in penalties.items():
            if penalty not in _WITHOUT_BEAMS:
                raise InvalidRequest(name, "must be 1 without beam search (beam_width)")
        return {"beam_width": width}
    if given.get("temperature", 1) not in (0, 1):
        raise InvalidRequest("temperature", "must be 1 with beam search")
    return {
        "beam_width": width,
        "n": given.get("num_return_sequences", width),
        "length_penalty": next(iter(penalties.values()), 0.0),
        "early_stopping": given.get("early_stopping", True),
        **{"temperature": 0.0, "seed": None},
    }


def _defaults(limits: RequestLimits) -> dict[str, Any]:
    """Return the values of fields that are left out.

    They are this interface's own: TensorRT-LLM does not read a checkpoint's generation_config.json.
    """
    values = {name: getattr(SamplingParams(), name) for name in PARAMETERS.values()}
    return values | {"max_tokens": min(DEFAULT_MAX_TOKENS, limits.max_output_tokens)}


def with_newer_names(tensors: Tensors) -> Tensors:
    """Return the tensors of a request, those with older names under their names of today, too.

    Raises:
        InvalidRequest: a field is given under both names.
    """
    found = dict(tensors)
    for older, newer in OLDER_NAMES.items():
        if older in tensors:
            if newer in tensors:
                raise InvalidRequest(older, f"is the older name of {newer}; give one of them")
            found[newer] = tensors[older]
    return found


def renamed(error: InvalidRequest, dialect: Dialect, tensors: Tensors) -> InvalidRequest:
    """Return the error with the client's name for the field."""
    if error.field == "lora_name":
        return lora_error(error, tensors)
    called = {
        **{ours: theirs for theirs, ours in (_SAME | _WORDS).items()},
        "max_tokens": dialect.max_tokens,
        "top_k": dialect.top_k,
        "top_p": dialect.top_p,
        "stop_token_ids": "end_id",
        "bad_words_token_ids": "bad_words_list",
        **{f"structured_outputs.{kind}": "guided_decoding_guide" for kind in KINDS},
    }
    called["logit_bias"] = (
        "embedding_bias" if "embedding_bias" in tensors else "embedding_bias_weights"
    )
    if "len_penalty" in tensors:
        called["length_penalty"] = "len_penalty"
    if "stop_words_list" in tensors:
        called["stop"] = "stop_words_list"
    for older, newer in OLDER_NAMES.items():
        if older in tensors:
            called[newer] = older
    if error.field not in called:
        return error
    return error.renamed(dialect.prefix + called[error.field])


def _truncation(dialect: Dialect, tensors: Tensors) -> dict[str, Any]:
    """Return ``top_k`` and ``top_p``; 0 turns one off, and without both decoding is greedy."""
    given = {
        ours: value
        for theirs, ours in ((dialect.top_k, "top_k"), (dialect.top_p, "top_p"))
        if theirs in tensors and (value := fields.single(theirs, tensors[theirs]).item())
    }
    return given or {"temperature": 0.0}


def _end(tensors: Tensors, llm: Vocabulary) -> dict[str, Any]:
    """Return what ends a sequence, if the client names it by token ids.

    A stop word of several tokens is given by its text, so other tokens with this text end the
    sequence, too.
    """
    values: dict[str, Any] = {"stop": []}
    token_ids = []
    if "stop_words_list" in tensors:
        words = read_words(
            "stop_words_list",
            tensors["stop_words_list"],
            llm.limits.max_stop_strings + MAX_STOP_TOKEN_IDS,
            UTF8_BYTES * llm.limits.max_stop_length,  # a token may be one byte
        )
        llm.limits.check_token_ids("stop_words_list", [token for word in words for token in word])
        token_ids = [word[0] for word in words if len(word) == 1]
        texts = [word for word in words if len(word) > 1]
        if len(texts) > llm.limits.max_stop_strings:
            problem = f"at most {llm.limits.max_stop_strings} words of several tokens"
            raise InvalidRequest(
                "stop_words_list", f"{problem} (max_stop_strings), got {len(texts)}"
            )
        values["stop"] = [_text(llm.tokenizer, word) for word in texts]
    if "end_id" in tensors:
        end_id = fields.single("end_id", tensors["end_id"]).item()
        # The tokenizer's own token stands for all tokens that end a sequence of the model.
        values["ignore_eos"] = end_id != llm.tokenizer.eos_token_id
        if end_id != _NO_END:
            token_ids.append(end_id)
    return values | {"stop_token_ids": token_ids}


def _text(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    """Return the text of tokens within a text, where the first one keeps its space."""
    data = b"".join(token_bytes(tokenizer, token_id) for token_id in token_ids)
    return data.decode(errors="replace")


def _guide(tensors: Tensors) -> dict[str, Any]:
    """Return the constraint on the output; an empty type stands for none."""
    kind, guide = (
        "".join(read_texts(name, tensors[name], 1, MAX_LENGTH)) if name in tensors else ""
        for name in ("guided_decoding_guide_type", "guided_decoding_guide")
    )
    if not kind:
        if guide:
            raise InvalidRequest("guided_decoding_guide_type", "is missing; it says what it is")
        return {}
    return {"structured_outputs": from_guide(kind, guide or None)}


def bias_of_words(tensors: Tensors, llm: Vocabulary) -> dict[str, float]:
    """Return the bias for the logits of all tokens of the words."""
    names = (_BIAS_WORDS, "embedding_bias_weights")
    missing = [name for name in names if name not in tensors]
    if len(missing) == len(names):
        return {}
    if missing:
        raise InvalidRequest(missing[0], "is missing; words and weights come together")
    texts, weights = names
    limit = llm.limits.max_logit_bias
    words = read_texts(texts, tensors[texts], limit, MAX_WORD_LENGTH)
    values = fields.elements(weights, tensors[weights], limit)
    if len(words) != len(values):
        raise InvalidRequest(weights, f"has {len(values)} elements for {len(words)} words")
    check_bias_words([tensors])
    bias: defaultdict[str, float] = defaultdict(float)
    encoded = llm.tokenizer.encode_batch(words, add_special_tokens=False)
    for token_ids, weight in zip(encoded, values, strict=True):
        for token_id in token_ids:
            bias[str(token_id)] += weight
    return dict(bias)


def check_bias_words(rows: Iterable[Tensors]) -> None:
    """Refuse words that take long to tokenize, in all rows of a request together.

    Raises:
        InvalidRequest: they are too long.
    """
    left = MAX_BIAS_BYTES
    for row in rows:
        for word in row[_BIAS_WORDS].flat if _BIAS_WORDS in row else ():
            left -= len(word) + 1
            if left < 0:  # no more of them are looked at
                problem = f"all words of a request have at most {MAX_BIAS_BYTES} bytes together"
                raise InvalidRequest(_BIAS_WORDS, f"{problem}, with one more for each word")


def _bias_of_tokens(tensors: Tensors, max_number: int) -> dict[str, float]:
    """Return the bias that is given for the whole vocabulary."""
    if "embedding_bias" not in tensors:
        return {}
    weights = tensors["embedding_bias"].reshape(-1)
    number = np.count_nonzero(weights)
    if number > max_number:
        raise InvalidRequest(
            "embedding_bias",
            f"has {number} elements other than 0, more than {max_number} (max_logit_bias)",
        )
    return {str(token_id): float(weights[token_id]) for token_id in np.flatnonzero(weights)}


def _refuse_what_is_on(tensors: Tensors) -> None:
    for name in _OFF:
        if name in tensors and tensors[name].any():
            raise InvalidRequest(name, "is not supported")
    # `preprocessing` gives one token for the decoder, whatever the model.
    if "decoder_input_ids" in tensors and tensors["decoder_input_ids"].size > 1:
        raise InvalidRequest("decoder_input_ids", "is not supported: the model has no encoder")
    for name, values in _NEUTRAL.items():
        if name in tensors and fields.single(name, tensors[name]) not in values:
            raise InvalidRequest(name, f"must be {values[-1]}")


def without_prefix(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of a request to the LLM API under the names of ``TEXT``.

    Raises:
        InvalidRequest: a field is given under both names.
    """
    renamed = {"stop": "stop_words", "exclude_input_from_output": "exclude_input_in_output"}
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if name.startswith(PREFIX):
            short = name.removeprefix(PREFIX)
            ours = renamed.get(short, short)
            if ours in tensors:
                raise InvalidRequest(name, f"is {ours} in the LLM API; give one of them")
            found[ours] = tensor
        else:
            found[name] = tensor
    return found
