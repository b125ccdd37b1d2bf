"""Loads the draft model or the MTP layer of a decoder, for speculative decoding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from paged_backend.checkpoint.fallback_config import uses_fallback
from paged_backend.checkpoint.hub import resolve_model, resolve_tokenizer
from paged_backend.checkpoint.model_config import load_model_config
from paged_backend.engine.prediction_layers import (
    StoredTarget,
    load_prediction_layer,
    refuse_method,
)
from paged_backend.models.base import Model
from paged_backend.models.decoder import Decoder
from paged_backend.models.division import Ranks
from paged_backend.models.hidden_states import HiddenStates, RecordedModel
from paged_backend.models.kv_cache import KVCacheSpec, kv_cache_format
from paged_backend.models.loader import load_model
from paged_backend.platforms.base import Platform
from paged_backend.quantization.read import read_quantization
from paged_backend.text.tokenizer import Tokenizer, load_tokenizer
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import ConfigError, option_error
from paged_backend.values.kv_cache_groups import KVCacheGroup, KVCacheLayout
from paged_backend.values.options.model import AUTO
from paged_backend.values.options.speculation import MTP
from paged_backend.values.validation import shorten

_OPTION = "speculative_config.model"


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A model that guesses, with its weights.

    Attributes:
        model: the model.
        spec: the shape of its keys and values.
        weights: the objects that hold its weights.
        hidden: hidden states of the model that it guesses for, which it reads; None if it reads
            none.
    """

    model: Model
    spec: KVCacheSpec
    weights: object
    hidden: HiddenStates | None = None

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes besides those in the pool of the model."""
        return self.spec.bytes_per_token + self._hidden_bytes

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block takes besides those in the pool of the model."""
        return self.spec.bytes_per_block + self.spec.block_size * self._hidden_bytes

    @property
    def _hidden_bytes(self) -> int:
        """Bytes of the hidden state of one token."""
        return 0 if self.hidden is None else self.hidden.bytes_per_token

    def recorded(self, target: Model, layout: KVCacheLayout) -> Model:
        """Return the model that is guessed for, which keeps its hidden states if they are read."""
        if self.hidden is None:
            return target
        return RecordedModel(target, self.hidden, layout.windows.index(None))


def load_draft_model(
    options: EngineConfig,
    platform: Platform,
    target: Model,
    layout: KVCacheLayout,
    stored: StoredTarget | None,
    ranks: Ranks,
) -> DraftModel | None:
    """Load the draft model or the MTP layer; None if the options ask for neither.

    Its layers all use the block table of one group without a window. Each rank has the whole draft
    model, which is small, so its passes wait for no other rank. The MTP layer is divided as the
    other layers are.

    Args:
        options: the engine's options, with the `kv_cache_dtype` of the model.
        platform: where both models compute.
        target: the model that it guesses for.
        layout: the groups of the block tables.
        stored: the checkpoint of the model; None if transformers computes it.
        ranks: the ranks that compute the model together.

    Raises:
        ConfigError: the draft model cannot be loaded or does not fit the model.
    """
    speculation = options.speculation()
    if speculation is None or not speculation.is_drawn_by_worker:
        return None
    if None not in layout.windows:
        raise refuse_method(speculation.method, "all layers of the model have a window")
    if speculation.method == MTP:
        if stored is None or not isinstance(target, Decoder):
            raise refuse_method(MTP, "the model has no embedding that a layer could share")
        layer, hidden = load_prediction_layer(options, platform, target, stored, ranks)
        return DraftModel(layer, _spec_of(layer, options, platform), layer.weights, hidden)
    assert speculation.model is not None
    return _load_model(options, platform, target, speculation.model)


def _spec_of(model: Model, options: EngineConfig, platform: Platform) -> KVCacheSpec:
    """Return the shape of keys and values, all in one group without a window."""
    layers = model.attention_layers
    group = KVCacheGroup(None, tuple(layer.index for layer in layers))
    stored = kv_cache_format(options.kv_cache_dtype, layers, platform.kv_dtypes)
    return KVCacheSpec.of(layers, options.block_size, stored, model.max_model_len, (group,))


def _load_model(options: EngineConfig, platform: Platform, target: Model, name: str) -> DraftModel:
    folder = resolve_model(
        name,
        None,
        options.download_dir,
        weights=options.load_format != "dummy",
        role="draft model",
    )
    if uses_fallback(folder, AUTO):
        raise option_error(_OPTION, f"{shorten(name)} cannot be used: transformers computes it")
    config = load_model_config(folder)
    if config.variant.state_mixers:
        problem = "cannot be used: some of its layers keep a state for each sequence"
        raise option_error(_OPTION, f"{shorten(name)} {problem}")
    _check_tokens(options, name, folder, config.vocab_size, target.config.vocab_size)
    quantization = read_quantization(folder, config.file)
    own = replace(
        options,
        model=name,
        revision=None,
        max_model_len=target.max_model_len,
        quantization=None,
    )
    try:
        model = load_model(own, config, quantization, folder, platform)
    except ConfigError as error:
        raise ConfigError(f"{_OPTION} {shorten(name)}: {error}") from error
    return DraftModel(model, _spec_of(model, options, platform), model)


def _check_tokens(
    options: EngineConfig, name: str, folder: Path, vocab_size: int, target_size: int
) -> None:
    """Check that a draft model has the tokens of the model.

    Raises:
        ConfigError: it has others, or has more or fewer of them.
    """
    needed = f"{shorten(name)} must have the tokenizer of the model {shorten(options.model)}"
    if vocab_size != target_size:
        raise option_error(
            _OPTION, f"{needed}; their vocabularies have {vocab_size} and {target_size} tokens"
        )
    draft, target = (_tokenizer(path) for path in (folder, resolve_tokenizer(options)))
    if draft is not None and target is not None and not draft.has_tokens_of(target):
        raise option_error(_OPTION, f"{needed}; some of their tokens differ")


def _tokenizer(folder: Path) -> Tokenizer | None:
    """Return the tokenizer of a checkpoint; None if it has none that can be read."""
    try:
        return load_tokenizer(folder)
    except ConfigError:
        return None
