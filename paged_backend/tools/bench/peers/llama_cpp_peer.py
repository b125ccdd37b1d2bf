"""llama.cpp: one batch of all sequences for each ``llama_decode``, with a model written as GGUF.

As in llama.cpp's server, requests that run at the same time do not share their prefixes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf  # type: ignore[import-not-found, unused-ignore]  # in the peer's environment
import llama_cpp  # type: ignore[import-not-found]  # only in the peer's environment
import numpy as np
import torch
from transformers_peer import load_peer  # type: ignore[import-not-found]  # a file next to this one

BATCH_TOKENS = 2048  # limit of one llama_decode: llama.cpp's own default

_ARCHITECTURES = {"llama": "LLAMA", "mistral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}
# The number format -> the format of the weights in the file, and of keys and values.
_FORMATS = {"float32": ("F32", "F32"), "bfloat16": ("BF16", "F16"), "int8": ("Q8_0", "F16")}


@dataclass
class LlamaSequence:
    """One request; its tokens from ``num_computed`` on are not computed yet."""

    index: int
    slot: int
    tokens: list[int]
    num_prompt: int
    max_tokens: int
    num_computed: int = 0

    @property
    def num_missing(self) -> int:
        """Number of tokens that wait to be computed: 1 while the sequence decodes."""
        return len(self.tokens) - self.num_computed


class Peer:
    """Continuous batching over llama.cpp's C interface, on token ids."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(settings["threads"])
        weights, kv = _FORMATS[settings["dtype"]]
        path = Path(settings["scratch"]) / "model.gguf"
        source = Path(settings["folder"]), settings["load_format"]
        write_gguf(load_peer(*source, torch.float32, torch.device("cpu")), weights, path)
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        # Products of 8-bit weights in AMX buffers crash on some machines (llama.cpp #20824).
        params.use_extra_bufts = "AMX_INT8 = 1" not in _system_info()
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise RuntimeError("llama.cpp cannot load the GGUF file")
        self._context = self._make_context(settings, int(gguf.GGMLQuantizationType[kv]))
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)
        self._free = list(range(settings["max_seqs"]))
        self._running: list[LlamaSequence] = []
        self.about = {
            "llama-cpp-python": llama_cpp.__version__,
            "format": f"{weights} weights, {kv} KV cache",
            "built with": " ".join(re.findall(r"(\w+) = 1", _system_info())),
        }

    def _make_context(self, settings: dict[str, Any], kv_type: int) -> Any:
        params = llama_cpp.llama_context_default_params()
        # Each sequence has an equal part of the cache. A common cache would take less memory, but
        # llama.cpp would then compute the attention of each token to those of all sequences.
        params.n_ctx = settings["max_seqs"] * (-(-settings["longest"] // 256) * 256)
        params.n_seq_max = settings["max_seqs"]
        params.n_batch = BATCH_TOKENS
        params.n_threads = params.n_threads_batch = settings["threads"]
        params.type_k = params.type_v = kv_type
        context = llama_cpp.llama_init_from_model(self._model, params)
        if not context:
            raise RuntimeError("llama.cpp cannot make a context")
        return context

    def add(self, index: int, prompt: list[int], max_tokens: int) -> None:
        """Give the request a sequence of its own."""
        self._running.append(
            LlamaSequence(index, self._free.pop(), list(prompt), len(prompt), max_tokens)
        )

    def step(self) -> list[tuple[int, int]]:
        """Compute one batch: a token of each sequence that decodes, then prompts."""
        sampled = self._fill_batch()
        status = llama_cpp.llama_decode(self._context, self._batch)
        if status:
            raise RuntimeError(f"llama_decode has returned {status}")
        for row, sequence in sampled:
            pointer = llama_cpp.llama_get_logits_ith(self._context, row)
            logits = np.ctypeslib.as_array(pointer, shape=(self._vocab_size,))
            sequence.tokens.append(int(logits.argmax()))
        return [(s.index, s.max_tokens) for _, s in sampled if self._has_ended(s)]

    def _fill_batch(self) -> list[tuple[int, LlamaSequence]]:
        """Fill the batch; returns the sequences that get a token, with their rows."""
        batch, size, sampled = self._batch, 0, []
        for sequence in sorted(self._running, key=lambda sequence: sequence.num_missing):
            begin = sequence.num_computed
            for position in range(begin, min(len(sequence.tokens), begin + BATCH_TOKENS - size)):
                batch.token[size] = sequence.tokens[position]
                batch.pos[size] = position
                batch.n_seq_id[size] = 1
                batch.seq_id[size][0] = sequence.slot
                batch.logits[size] = position == len(sequence.tokens) - 1
                sequence.num_computed += 1
                size += 1
            if not sequence.num_missing:
                sampled.append((size - 1, sequence))
            if size == BATCH_TOKENS:
                break
        batch.n_tokens = size
        return sampled

    def _has_ended(self, sequence: LlamaSequence) -> bool:
        if len(sequence.tokens) < sequence.num_prompt + sequence.max_tokens:
            return False
        llama_cpp.llama_memory_seq_rm(self._memory, sequence.slot, -1, -1)
        self._running.remove(sequence)
        self._free.append(sequence.slot)
        return True


def _system_info() -> str:
    return str(llama_cpp.llama_print_system_info().decode())


def write_gguf(model: Any, weights: str, path: Path) -> None:
    """Write a model of transformers without its vocabulary.

    Raises:
        ValueError: the model is of a kind that this writer does not know.
    """
    config = model.config
    if config.model_type not in _ARCHITECTURES:
        raise ValueError(f"no GGUF writer for models of type {config.model_type}")
    arch = gguf.MODEL_ARCH[_ARCHITECTURES[config.model_type]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    _add_sizes(writer, config, model.model.layers[0].self_attn.head_dim)
    _add_tensors(writer, model, arch, gguf.GGMLQuantizationType[weights])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_sizes(writer: Any, config: Any, head_dim: int) -> None:
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def _add_tensors(writer: Any, model: Any, arch: Any, weights: Any) -> None:
    config = model.config
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        projection = name.split(".")[-2]
        if arch == gguf.MODEL_ARCH.LLAMA and projection in heads:
            values = _interleave(values, heads[projection])
        written = weights if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(target, gguf.quants.quantize(values, written), raw_dtype=written)
    _add_rope_factors(writer, model, arch)


def _add_rope_factors(writer: Any, model: Any, arch: Any) -> None:
    """Write what scaled rotary embeddings divide each frequency by."""
    frequencies = model.model.rotary_emb.inv_freq.float().numpy()
    theta, size = model.config.rope_parameters["rope_theta"], len(frequencies)
    factors = (theta ** (-np.arange(size) / size) / frequencies).astype(np.float32)
    if np.allclose(factors, 1, rtol=1e-4):
        return
    if arch != gguf.MODEL_ARCH.LLAMA:
        raise ValueError(f"no GGUF writer for scaled rotary embeddings of {arch.name}")
    writer.add_tensor("rope_freqs.weight", factors)


def _interleave(values: Any, num_heads: int) -> Any:
    """Reorder the rows of each head: llama.cpp rotates neighbors, transformers two halves."""
    halves = values.reshape(num_heads, 2, -1, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
