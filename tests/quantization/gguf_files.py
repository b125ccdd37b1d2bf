"""Tiny GGUF files of transformers' models, written by the library `gguf`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from gguf_vocabulary import close
from numpy.typing import NDArray
from transformers import PreTrainedModel

Array = NDArray[Any]

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
# Types that the library only reads, with the places of the scales (float16) in a block.
SCALES = {
    Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q6_K: (208,),
    Kind.IQ4_XS: (0,),
}


class GgufModel:
    """A file being written: its weights replace those of the model that it is made of."""

    def __init__(self, path: Path, model: PreTrainedModel) -> None:
        self.path = path
        self.model = model
        self.architecture = ARCHITECTURES[model.config.model_type]
        self.writer = GGUFWriter(path, self.architecture)
        self.stored: dict[
            str, tuple[Array, Kind]
        ] = {}  # by Hugging Face's names, rows in its order
        self._rng = np.random.default_rng(3)

    def metadata(self) -> GgufModel:
        """Add what config.json says, and a vocabulary that stands for no text."""
        self.config()
        self.writer.add_token_list([f"token {i}" for i in range(self.model.config.vocab_size)])
        self.writer.add_eos_token_id(self.model.config.eos_token_id)
        return self

    def config(self) -> GgufModel:
        """Add what config.json says, without a vocabulary."""
        config, writer = self.model.config, self.writer
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        head_dim = getattr(config, "head_dim", None)
        if head_dim is not None:
            writer.add_key_length(head_dim)
            writer.add_value_length(head_dim)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        self._add_rope(dict(config.rope_parameters))
        return self

    def _add_rope(self, rope: dict[str, Any]) -> None:
        self.writer.add_rope_freq_base(rope["rope_theta"])
        kind = rope["rope_type"]
        if kind in ("linear", "yarn"):
            self.writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
            self.writer.add_rope_scaling_factor(rope["factor"])
        if kind == "yarn":
            length = rope["original_max_position_embeddings"]
            self.writer.add_rope_scaling_orig_ctx_len(length)
        if kind == "llama3":
            scaled = self.model.model.rotary_emb.inv_freq
            plain = rope["rope_theta"] ** -(torch.arange(len(scaled)) / len(scaled))
            self.writer.add_tensor("rope_freqs.weight", (plain / scaled).float().numpy())

    def tensors(self, kind: Kind) -> GgufModel:
        """Add the weights, matrices in a type, and give the model what they stand for."""
        names = gguf.get_tensor_name_map(
            gguf.MODEL_ARCH[self.architecture.upper()], self.model.config.num_hidden_layers
        )
        state = self.model.state_dict()
        if self.model.config.tie_word_embeddings:
            del state["lm_head.weight"]
        for name, weight in state.items():
            stored_kind = kind if weight.ndim == 2 else Kind.F32
            stored = self._quantize(weight.numpy(), stored_kind)
            self.stored[name] = stored, stored_kind
            weight.copy_(torch.from_numpy(gguf.quants.dequantize(stored, stored_kind).copy()))
            heads = self._interleaved_heads(name)
            if heads:
                halves = stored.reshape(heads, 2, -1, *stored.shape[1:])
                stored = halves.swapaxes(1, 2).reshape(stored.shape)
            written = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert written is not None
            self.writer.add_tensor(written, stored, raw_dtype=stored_kind)
        return self

    def close(self) -> Path:
        """Write the file."""
        close(self.writer)
        return self.path

    def _interleaved_heads(self, name: str) -> int:
        if self.architecture == "llama" and ".q_proj." in name:
            return int(self.model.config.num_attention_heads)
        if self.architecture == "llama" and ".k_proj." in name:
            return int(self.model.config.num_key_value_heads)
        return 0

    def _quantize(self, weight: Array, kind: Kind) -> Array:
        if kind not in SCALES:
            return gguf.quants.quantize(weight, kind)
        size, num_bytes = GGML_QUANT_SIZES[kind]
        blocks = weight.size // size
        data = self._rng.integers(0, 256, (blocks, num_bytes), dtype=np.uint8)
        for place in SCALES[kind]:
            scales = self._rng.uniform(0.5, 1, blocks).astype(np.float16)
            data[:, place : place + 2] = scales.view(np.uint8).reshape(blocks, 2)
        # The numbers in a block depend on its scales alone, so these bring them to the right size.
        factor = weight.std() / gguf.quants.dequantize(data, kind).std()
        for place in SCALES[kind]:
            scales = data[:, place : place + 2].copy().view(np.float16) * np.float16(factor)
            data[:, place : place + 2] = scales.view(np.uint8)
        return data.reshape(len(weight), -1)


def write_gguf(path: Path, model: PreTrainedModel, kind: Kind = Kind.Q8_0) -> GgufModel:
    """Write a model without a tokenizer; its weights become those of the file."""
    written = GgufModel(path, model).metadata().tensors(kind)
    written.close()
    return written
