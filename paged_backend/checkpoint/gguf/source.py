"""The weights of a GGUF file, dequantized as they are loaded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from paged_backend.checkpoint.gguf.config import gguf_config
from paged_backend.checkpoint.gguf.header import read_header
from paged_backend.checkpoint.gguf.names import gguf_name
from paged_backend.checkpoint.gguf.values import read_values
from paged_backend.checkpoint.registry import tensors_of
from paged_backend.checkpoint.shape_reader import read_shape
from paged_backend.checkpoint.tensor_source import SourceTensor

_INTERLEAVED = ("LlamaForCausalLM", "MistralForCausalLM")
_QUERY_OR_KEY = re.compile(r".*\.self_attn\.[qk]_proj\.(?:weight|bias)")


class GgufTensors:
    """The tensors of a file; see :class:`~paged_backend.checkpoint.tensor_source.TensorSource`.

    Raises:
        ConfigError: the file cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self._file = read_header(path)
        self._shape = read_shape(gguf_config(self._file))

    @property
    def num_bytes(self) -> int:
        """Return the size of all tensors."""
        return sum(tensor.num_bytes for tensor in self._file.tensors.values())

    def __iter__(self) -> Iterator[SourceTensor]:
        """Yield each tensor in float32, in the order of the file."""
        path = self._file.path
        names = {gguf_name(name): name for name in tensors_of(self._shape)}
        for tensor in self._file.tensors.values():
            if tensor.name in names:
                name = names[tensor.name]
                values = self._in_halves(name, torch.from_numpy(read_values(path, tensor)))
                origin = f"{path}: tensor {tensor.name}"
                yield SourceTensor(name, values, origin, tensor.num_bytes)

    def _in_halves(self, name: str, values: Tensor) -> Tensor:
        """Order the rows of each query and key head so that rope turns row i with i + head_dim / 2.

        In files of the architecture llama it turns rows 2i and 2i + 1.
        """
        if self._shape.architecture not in _INTERLEAVED or not _QUERY_OR_KEY.fullmatch(name):
            return values
        pairs = values.view(-1, self._shape.head_dim // 2, 2, *values.shape[1:])
        return pairs.transpose(1, 2).reshape(values.shape)
