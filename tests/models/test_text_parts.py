"""Text models of checkpoints that read images, too: tokens equal those of the whole model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import Oracle, make_engine, mixed_work, run, tokens_of
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.model_config import load_model_config
from paged_backend.checkpoint.shape_reader import read_shape
from paged_backend.checkpoint.text_part import text_part
from paged_backend.values.errors import ConfigError

TEXT = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
STATES = {f"linear_{kind}_head_dim": 16 for kind in ("key", "value")} | {
    f"linear_num_{kind}_heads": 2 for kind in ("key", "value")
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
IMAGES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_IMAGES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": 64,
}
MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
# By the type of the whole model: what its text model and its model of images have besides.
WHOLE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma3": ({"sliding_window": 24}, IMAGES),
    "gemma4": ({"global_head_dim": 32, "hidden_size_per_layer_input": 0}, IMAGES),
    "lfm2_vl": ({"model_type": "lfm2"}, {**IMAGES, "model_type": "siglip2_vision_model"}),
    "llama4": ({"num_local_experts": 2, "intermediate_size_mlp": 96}, IMAGES),
    "llava": ({"model_type": "llama"}, {**IMAGES, "model_type": "clip_vision_model"}),
    "mistral3": ({"model_type": "mistral"}, {**IMAGES, "model_type": "pixtral", "head_dim": 16}),
    "qwen2_5_vl": ({"rope_parameters": MROPE}, QWEN_IMAGES),
    "qwen3_5": (STATES, QWEN_IMAGES),
    "qwen3_5_moe": (STATES | EXPERTS | {"shared_expert_intermediate_size": 32}, QWEN_IMAGES),
    "qwen3_vl": ({"rope_parameters": MROPE}, {**QWEN_IMAGES, "deepstack_visual_indexes": [0]}),
    "smolvlm": ({"model_type": "llama"}, {**IMAGES, "model_type": "smolvlm_vision"}),
}


class WholeOracle(Oracle):
    """A whole model of transformers, which is asked for text only."""

    def __init__(self, kind: str, folder: Path) -> None:
        torch.manual_seed(0)
        self.folder = folder
        text, images = WHOLE[kind]
        others = {"audio_config": None} if kind == "gemma4" else {}
        config = AutoConfig.for_model(
            kind, text_config=TEXT | text, vision_config=images, pad_token_id=0, **others
        )
        whole = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
        whole.save_pretrained(folder)
        # transformers 5.24 cannot generate with this class.
        self.model: nn.Module = whole.language_model if kind == "llama4" else whole


@pytest.mark.parametrize("kind", WHOLE)
def test_tokens_are_those_of_the_whole_model(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    oracle = WholeOracle(kind, tmp_path)
    work = mixed_work(6)
    engine = make_engine(tmp_path, max_num_batched_tokens=48, max_num_seqs=4)
    oracle.confirm(work, tokens_of(run(engine, work)))
    assert "ForConditionalGeneration is served: images" in caplog.text


def test_other_weights_of_a_layer_are_noticed(tmp_path: Path) -> None:
    """A negative control: the weights come from the text model of the files."""
    oracle = WholeOracle("gemma3", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "language_model.model.layers.1.mlp.down_proj.weight"
    tensors[name] = torch.randn_like(tensors[name])
    save_file(tensors, file, {"format": "pt"})
    work = mixed_work(2)
    with pytest.raises(AssertionError):
        oracle.confirm(work, tokens_of(run(make_engine(tmp_path), work)))


def test_an_output_layer_that_is_not_the_embedding(tmp_path: Path) -> None:
    """The text model's section calls it tied; the whole model's keys decide."""
    oracle = WholeOracle("llava", tmp_path)
    file = tmp_path / "config.json"
    values = json.loads(file.read_text())
    values["text_config"]["tie_word_embeddings"] = True
    file.write_text(json.dumps(values))
    assert not load_model_config(tmp_path).tied_embeddings
    work = mixed_work(2)
    oracle.confirm(work, tokens_of(run(make_engine(tmp_path), work)))


def test_sizes_that_a_file_leaves_out_are_those_of_the_class() -> None:
    """As in Gemma 3 4B's config.json."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "model_type": "gemma3",
        "text_config": text,
        "torch_dtype": "bfloat16",
    }
    part = text_part(ConfigFile(config, "config.json"))
    shape = read_shape(part)
    assert (shape.vocab_size, shape.num_heads, shape.num_kv_heads) == (262_208, 8, 4)
    assert (shape.head_dim, shape.max_position_embeddings) == (256, 131_072)
    assert shape.tied_embeddings
    assert part.value("eos_token_id") == [1, 106]
    assert part.value("torch_dtype") == "bfloat16"


def test_sizes_that_a_file_leaves_out_follow_from_others() -> None:
    """As in LLaVA 1.5 13B's config.json: as many KV heads as heads, and heads of 128."""
    text = {
        "hidden_size": 5120,
        "intermediate_size": 13_824,
        "model_type": "llama",
        "num_attention_heads": 40,
        "num_hidden_layers": 40,
        "vocab_size": 32_064,
    }
    config = {"architectures": ["LlavaForConditionalGeneration"], "text_config": text}
    shape = read_shape(text_part(ConfigFile(config, "config.json")))
    assert (shape.num_kv_heads, shape.head_dim) == (40, 128)
    text["num_attention_heads"] = 64
    assert read_shape(text_part(ConfigFile(config, "config.json"))).head_dim == 80


@pytest.mark.parametrize("heads", [0, "many", 2.5])
def test_a_wrong_size_of_a_text_model_is_named(heads: object) -> None:
    text = {"model_type": "llama", "num_attention_heads": heads}
    config = {"architectures": ["LlavaForConditionalGeneration"], "text_config": text}
    with pytest.raises(ConfigError, match="^config.json: text_config: .*num_attention_heads"):
        read_shape(text_part(ConfigFile(config, "config.json")))


def test_older_files_have_the_keys_of_the_text_model_among_the_others() -> None:
    config = {
        **{key: value for key, value in TEXT.items() if key != "head_dim"},
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "rms_norm_eps": 1e-6,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "vision_config": QWEN_IMAGES,
    }
    part = text_part(ConfigFile(config, "config.json"))
    shape = read_shape(part)
    assert shape.architecture == "Qwen2ForCausalLM"
    assert shape.variant.biases.qkv
    assert part.value("rope_scaling")["rope_type"] == "default"


def test_other_models_are_left_as_they_are() -> None:
    for config in (
        {"architectures": ["Gemma3ForCausalLM"], "text_config": {"model_type": "gemma3_text"}},
        {"architectures": ["OtherForConditionalGeneration"], "text_config": {"model_type": "x"}},
        {"architectures": "LlavaForConditionalGeneration", "model_type": ["llama"]},
    ):
        file = ConfigFile(config, "config.json")
        assert text_part(file) is file


def test_layers_that_predict_more_tokens_are_not_loaded(tmp_path: Path) -> None:
    """Qwen3-Next and Qwen 3.5 are published with them."""
    oracle = WholeOracle("qwen3_5", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "mtp.fc.weight": torch.ones(4, 4)}, file, {"format": "pt"})
    work = mixed_work(2)
    oracle.confirm(work, tokens_of(run(make_engine(tmp_path), work)))
