"""The text model of a checkpoint that also reads images or sounds.

Such a checkpoint describes its text model in the section ``text_config`` of config.json, or in a
few older families among the other keys. Text is computed as by the same model without the other
parts: a position that has three numbers, for time, height and width, has three equal ones.
"""

from __future__ import annotations

from typing import Any

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.values.log import LOG
from paged_backend.values.validation import shorten

# The class of a text model alone, by the type that its section names; older files of two families
# have no section, and name the type of the whole model.
_TEXT_MODELS = {
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_text"), "Qwen2ForCausalLM"),
    **dict.fromkeys(("qwen2_5_vl", "qwen2_5_vl_text"), "Qwen2ForCausalLM"),
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
    "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
}
_WHOLE_MODEL = "ForConditionalGeneration"
# Keys of the whole model that are about its text model. A tie is the whole model's.
_OUTER_KEYS = ("dtype", "torch_dtype", "eos_token_id", "quantization_config", "compression_config")
_TIE = "tie_word_embeddings"
# Sizes that files leave out if they are the defaults of the text model's class in transformers, or
# follow from others there.
_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings"),
)
_EPS = "rms_norm_eps"
_ROPES = "rope_scaling", "rope_parameters"


def text_part(config: ConfigFile) -> ConfigFile:
    """Return a config.json, or that of its text model if it reads images or sounds, too.

    Args:
        config: the file, of which `size_limits.check_sizes` has checked the sizes.

    Raises:
        ConfigError: a section is not an object, or transformers finds a size wrong.
    """
    whole = _whole_model(config)
    if whole is None:
        return config
    part = config.section("text_config") or config
    kind = part.value("model_type")
    if not isinstance(kind, str) or kind not in _TEXT_MODELS:
        return config
    part = part.with_absent(**_present(config, _OUTER_KEYS))
    part = _with_default_sizes(part, kind)
    part = part.replaced(architectures=[_TEXT_MODELS[kind]], **_present(config, (_TIE,)))
    return part.replaced(**{key: _plain_rope(part.value(key)) for key in _ROPES if key in part})


def warn_of_text_part(config: ConfigFile, part: ConfigFile) -> None:
    """Log that only the text model of a checkpoint is served, if `text_part` found more."""
    if part is not config:
        LOG.warning(
            "the text model of %s is served: images, videos and sounds are refused, and their "
            "weights are not loaded",
            _whole_model(config),
        )


def _whole_model(config: ConfigFile) -> str | None:
    names = config.value("architectures")
    first = names[0] if isinstance(names, list) and names else None
    return first if isinstance(first, str) and first.endswith(_WHOLE_MODEL) else None


def _present(config: ConfigFile, keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: config.value(key) for key in keys if config.value(key) is not None}


def _with_default_sizes(part: ConfigFile, kind: str) -> ConfigFile:
    known = *_SIZES, _EPS
    if all(key in part for key in known):
        return part
    from transformers import AutoConfig  # takes long to import, and few files need it

    given: dict[str, Any] = {
        key: part.integer(key) for key in _SIZES if part.value(key) is not None
    }
    if part.value(_EPS) is not None:
        given[_EPS] = part.number(_EPS)
    try:
        values = AutoConfig.for_model(kind, **given).to_dict()
    except Exception as error:  # whatever its validation raises
        raise part.error(
            "model_type", f"{kind}: {shorten(' '.join(str(error).split()))}"
        ) from error
    return part.with_absent(**{key: values[key] for key in known if values.get(key)})


def _plain_rope(rope: Any) -> Any:
    """Return a section of rotary embeddings as that of texts, without sections of three numbers."""
    is_sectioned = isinstance(rope, dict) and "mrope" in (rope.get("rope_type"), rope.get("type"))
    return rope | {"rope_type": "default"} if is_sectioned else rope
