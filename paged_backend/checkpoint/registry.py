"""The supported architectures, by the names that config.json gives them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.decoder_tensors import decoder_tensors
from paged_backend.checkpoint.families.bamba import bamba, falcon_h1
from paged_backend.checkpoint.families.deepseek import deepseek_v2, deepseek_v3, glm4_moe_lite
from paged_backend.checkpoint.families.gemma import gemma2, gemma3
from paged_backend.checkpoint.families.gemma4 import gemma4
from paged_backend.checkpoint.families.glm4 import glm4, glm4_moe
from paged_backend.checkpoint.families.gpt_oss import gpt_oss
from paged_backend.checkpoint.families.granite import granite, granite_hybrid
from paged_backend.checkpoint.families.jamba import jamba
from paged_backend.checkpoint.families.keys import GELU, GELU_TANH, RELU2, SILU, ActivationKey
from paged_backend.checkpoint.families.kimi import kimi_linear
from paged_backend.checkpoint.families.lfm2 import lfm2, lfm2_moe
from paged_backend.checkpoint.families.llama import llama, mistral, mixtral
from paged_backend.checkpoint.families.llama4 import llama4
from paged_backend.checkpoint.families.mamba import falcon_mamba, mamba, mamba2
from paged_backend.checkpoint.families.minicpm3 import minicpm3
from paged_backend.checkpoint.families.minimax import minimax
from paged_backend.checkpoint.families.ministral import ministral, ministral3
from paged_backend.checkpoint.families.nemotron_h import nemotron_h
from paged_backend.checkpoint.families.olmo import olmo2, olmo3, olmo_hybrid, olmoe
from paged_backend.checkpoint.families.phi3 import phi3
from paged_backend.checkpoint.families.qwen import (
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
)
from paged_backend.checkpoint.families.recurrent_gemma import recurrent_gemma
from paged_backend.checkpoint.families.smollm3 import smollm3
from paged_backend.checkpoint.families.zamba2 import zamba2
from paged_backend.checkpoint.shape import ModelShape, Variant
from paged_backend.checkpoint.tensors import Tensors
from paged_backend.values.validation import shorten


def _llama(config: ConfigFile, num_layers: int) -> Variant:
    return Variant()


@dataclass(frozen=True, slots=True)
class Architecture:
    """Describes how to read the checkpoints of a model family and how to build its models.

    Attributes:
        variant: reads what differs from Llama, given config.json and the number of layers.
        head_dim: where config.json has none; None stands for hidden_size / num_heads.
        tied_embeddings: where config.json does not say whether they are.
        own_keys: keys of config.json that `variant` reads, and that other families refuse.
        activation: the key of the MLP's activation; only transformers computes other values of it.
        tensors: the tensors that a checkpoint of a shape holds.
        model: the class that implements :class:`~paged_backend.models.base.Model`, as
            ``module:Class``; it is imported when a model is loaded, as it needs torch.
    """

    variant: Callable[[ConfigFile, int], Variant] = _llama
    head_dim: int | None = None
    tied_embeddings: bool = False
    own_keys: tuple[str, ...] = ()
    activation: ActivationKey = SILU
    tensors: Callable[[ModelShape], Tensors] = decoder_tensors
    model: str = "paged_backend.models.decoder:Decoder"


# Gemma 2 and 3 ignore `hidden_act`, which their files may have, too.
_GEMMA = Architecture(
    head_dim=256,
    tied_embeddings=True,
    own_keys=("attn_logit_softcapping", "final_logit_softcapping"),
    activation=GELU_TANH,
)

ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(llama),
    "MistralForCausalLM": Architecture(mistral),
    "MinistralForCausalLM": Architecture(ministral),
    "MixtralForCausalLM": Architecture(mixtral),
    "Ministral3ForCausalLM": Architecture(ministral3, head_dim=128),
    "Llama4ForCausalLM": Architecture(llama4, head_dim=128),
    "BambaForCausalLM": Architecture(bamba),
    "FalconH1ForCausalLM": Architecture(falcon_h1),
    "FalconMambaForCausalLM": Architecture(falcon_mamba, tied_embeddings=True),
    "Qwen2ForCausalLM": Architecture(qwen2),
    "Qwen3ForCausalLM": Architecture(qwen3, head_dim=128),
    "Qwen2MoeForCausalLM": Architecture(qwen2_moe),
    "Qwen3MoeForCausalLM": Architecture(qwen3_moe),
    "Qwen3NextForCausalLM": Architecture(qwen3_next, head_dim=256),
    "Qwen3_5ForCausalLM": Architecture(qwen3_5, head_dim=256),
    "Qwen3_5MoeForCausalLM": Architecture(qwen3_5_moe, head_dim=256),
    "Gemma2ForCausalLM": replace(_GEMMA, variant=gemma2),
    "Gemma3ForCausalLM": replace(_GEMMA, variant=gemma3),
    "Gemma4ForCausalLM": replace(_GEMMA, variant=gemma4),
    "DeepseekV2ForCausalLM": Architecture(deepseek_v2),
    "DeepseekV3ForCausalLM": Architecture(deepseek_v3),
    "MambaForCausalLM": Architecture(mamba, tied_embeddings=True),
    "Mamba2ForCausalLM": Architecture(mamba2),
    "MiniMaxForCausalLM": Architecture(minimax),
    "MiniCPM3ForCausalLM": Architecture(minicpm3, tied_embeddings=True),
    "Glm4MoeLiteForCausalLM": Architecture(glm4_moe_lite),
    "Glm4ForCausalLM": Architecture(glm4, head_dim=128),
    "Glm4MoeForCausalLM": Architecture(glm4_moe),
    "GptOssForCausalLM": Architecture(gpt_oss, head_dim=64),
    "GraniteForCausalLM": Architecture(granite),
    "GraniteMoeHybridForCausalLM": Architecture(granite_hybrid),
    "JambaForCausalLM": Architecture(jamba),
    "KimiLinearForCausalLM": Architecture(kimi_linear),
    "Lfm2ForCausalLM": Architecture(lfm2, tied_embeddings=True),
    "Lfm2MoeForCausalLM": Architecture(lfm2_moe, tied_embeddings=True),
    "NemotronHForCausalLM": Architecture(nemotron_h, head_dim=128, activation=RELU2),
    "Olmo2ForCausalLM": Architecture(olmo2),
    "Olmo3ForCausalLM": Architecture(olmo3),
    "OlmoHybridForCausalLM": Architecture(olmo_hybrid),
    "OlmoeForCausalLM": Architecture(olmoe),
    "Phi3ForCausalLM": Architecture(phi3),
    "RecurrentGemmaForCausalLM": Architecture(
        recurrent_gemma, tied_embeddings=True, activation=GELU_TANH
    ),
    "SmolLM3ForCausalLM": Architecture(smollm3, tied_embeddings=True),
    "Zamba2ForCausalLM": Architecture(zamba2, tied_embeddings=True, activation=GELU),
}


# The names of the same models without their output layers.
_TEXT_MODELS = {
    name.replace("ForCausalLM", "TextModel"): name
    for name in (
        "Gemma3ForCausalLM",
        "Gemma4ForCausalLM",
        "Llama4ForCausalLM",
        "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForCausalLM",
    )
}
_BASE_NAMES = _TEXT_MODELS | {
    name.replace("ForCausalLM", "Model"): name
    for name in ARCHITECTURES
    if name not in _TEXT_MODELS.values()
}


# The names of the same models with a head that scores, such as rerankers have.
_CLASSIFIER_NAMES = {
    name.replace("Model", "ForSequenceClassification"): full for name, full in _BASE_NAMES.items()
}


def register_architecture(name: str, architecture: Architecture) -> None:
    """Add a family of models, or replace one.

    Args:
        name: an entry of ``architectures`` in config.json.
        architecture: how checkpoints of the family are read and built.
    """
    ARCHITECTURES[name] = architecture


def find_architecture(config: ConfigFile) -> str:
    """Return the name of the first supported architecture that a config.json names.

    Raises:
        ConfigError: none is supported; the message lists the supported ones.
    """
    names = config.value("architectures")
    if isinstance(names, list):
        for name in names:
            if is_supported(name):
                return _full_name(name)
    supported = ", ".join([*ARCHITECTURES, *_BASE_NAMES, *_CLASSIFIER_NAMES])
    raise config.error("architectures", f"must be one of {supported}; got {shorten(names)}")


def is_supported(name: object) -> bool:
    """Return whether this is the name of a supported architecture, with any head or none."""
    return isinstance(name, str) and _full_name(name) in ARCHITECTURES


def has_output_layer(config: ConfigFile) -> bool:
    """Return False if a config.json names a model without an output layer (``LlamaModel``)."""
    return not _names_one_of(config, {*_BASE_NAMES, *_CLASSIFIER_NAMES})


def has_classifier(config: ConfigFile) -> bool:
    """Return True if a config.json names a model with a head that scores."""
    return _names_one_of(config, _CLASSIFIER_NAMES)


def _names_one_of(config: ConfigFile, known: Collection[str]) -> bool:
    names = config.value("architectures")
    return isinstance(names, list) and any(
        isinstance(name, str) and name in known for name in names
    )


def _full_name(name: str) -> str:
    return _BASE_NAMES.get(name) or _CLASSIFIER_NAMES.get(name, name)


def tensors_of(shape: ModelShape) -> Tensors:
    """Return the tensors that a checkpoint of this shape holds."""
    return ARCHITECTURES[shape.architecture].tensors(shape)
