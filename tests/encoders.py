"""Tiny encoders with random weights, made by transformers, and checks of their embeddings."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from embedding_models import expected
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModel,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from paged_backend.embeddings.vectors import make_embedding
from paged_backend.engine.engine import Engine
from paged_backend.engine.worker import Worker
from paged_backend.values.config import EngineConfig
from paged_backend.values.pooling_params import PoolingParams
from paged_backend.values.request import Request

KINDS = ("mean", "cls", "last")
MAX_POSITIONS = 96  # positions of most families
_SIZES = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.15,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "cls_token_id"), 0),
    **dict.fromkeys(("eos_token_id", "sep_token_id"), 2),
    "mask_token_id": 3,
}
_PADDED = {"pad_token_id": 1, "max_position_embeddings": MAX_POSITIONS + 2}
_ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": _PADDED,
    "xlm-roberta": _PADDED,
    "camembert": _PADDED,
    "distilbert": {"dim": 64, "hidden_dim": 112, "n_layers": 3, "n_heads": 4},
    "electra": {"embedding_size": 32},
    "albert": {"embedding_size": 32},
    "mpnet": _PADDED,
    "modernbert": {"local_attention": 16, "global_attn_every_n_layers": 2},
    "nomic_bert": {},
    "eurobert": {"num_key_value_heads": 2},
    "gte": {},
}
ENCODERS = tuple(_ENCODERS)


def encoder_config(family: str, **overrides: Any) -> PretrainedConfig:
    """The configuration of an encoder; `overrides` replace values."""
    return AutoConfig.for_model(family, **{**_SIZES, **_ENCODERS[family], **overrides})


def make_encoder(family: str, folder: Path, **overrides: Any) -> PreTrainedModel:
    """Save an encoder and return transformers' own float32 model.

    `overrides` replace values of its config.json. Biases and norms are random, too.
    """
    config = encoder_config(family, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model: PreTrainedModel = AutoModel.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        )
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1:
                    is_norm = name.endswith("weight")
                    parameter.uniform_(0.5, 1.5) if is_norm else parameter.normal_(0, 0.5)
    model.save_pretrained(folder)
    return model.eval()


def encoder_engine(folder: Path, **options: object) -> Engine:
    """An engine in float32."""
    config = EngineConfig.from_mapping({"model": str(folder), "dtype": "float32", **options})
    return Engine(config, Worker(config, folder))


def write_wordpiece(folder: Path) -> None:
    """Save the fast tokenizer of a BERT model, with one token for each of a few letters."""
    special = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    letters = [*"abcdefghijklmnopqrstuvwxyz?.", *(f"##{letter}" for letter in "abcdefgnorstuvw")]
    vocab = {token: index for index, token in enumerate([*special.values(), *letters])}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(
        ("[SEP]", vocab["[SEP]"]), ("[CLS]", vocab["[CLS]"])
    )
    tokenizer.add_special_tokens(list(special.values()))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{f"{name}_token": token for name, token in special.items()}
    ).save_pretrained(folder)


def make_prompts(number: int, seed: int = 0) -> list[list[int]]:
    """Prompts of a few lengths, of which some have padding tokens within."""
    rng = random.Random(seed)
    lengths = [1, 2, 7, 7, 20, 20, 20, 50, MAX_POSITIONS]
    return [[rng.randrange(199) for _ in range(rng.choice(lengths))] for _ in range(number)]


def embed(
    engine: Engine, prompts: list[list[int]], params: PoolingParams | None = None
) -> list[NDArray[np.float32]]:
    """The embeddings of prompts that all wait before the first step."""
    params = params or PoolingParams()
    for index, prompt in enumerate(prompts):
        engine.add_request(Request(str(index), prompt, pooling=params))
    found = {}
    while engine.has_unfinished:
        for output in engine.step():
            assert output.pooled is not None
            found[output.request_id] = make_embedding(
                output.pooled, params, normalize=engine.limits.normalize
            )
        engine.scheduler.check_invariants()
    engine.scheduler.check_empty()
    return [found[str(index)] for index in range(len(prompts))]


def confirm(
    model: PreTrainedModel,
    prompts: list[list[int]],
    found: list[NDArray[np.float32]],
    kind: str,
    atol: float = 1e-5,
    **options: Any,
) -> None:
    """Check that embeddings are those of transformers, up to `atol` in each number."""
    for prompt, embedding in zip(prompts, found, strict=True):
        wanted = expected(model, prompt, kind, **options)
        torch.testing.assert_close(torch.from_numpy(embedding), wanted, rtol=0, atol=atol)
