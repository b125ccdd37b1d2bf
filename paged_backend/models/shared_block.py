"""A block of attention and an MLP that several layers use before Mamba-2 (Zamba 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paged_backend.checkpoint.model_config import ModelConfig
from paged_backend.checkpoint.shared_blocks import BLOCK
from paged_backend.checkpoint.stored_tensor import Parameter
from paged_backend.models.attention import AttentionBackend, AttentionLayer, AttentionMetadata
from paged_backend.models.blocks import prefixed
from paged_backend.models.layers import Kernels, NormWeights
from paged_backend.models.linear import LinearMethod, LinearSpec
from paged_backend.models.mixer import Mixer
from paged_backend.models.states import StateLayer


class _Adapters(NamedTuple):
    """The adapters of one use of a block.

    Attributes:
        down: computes the low-rank rows of queries, keys and values; None without such adapters.
        ups: compute what is added to queries, keys and values.
        mlp_down: computes the low-rank row of gate and up.
        mlp_up: computes what is added to them.
    """

    down: LinearMethod | None
    ups: Sequence[LinearMethod]
    mlp_down: LinearMethod
    mlp_up: LinearMethod


class SharedBlock:
    """The weights of a block, and of its adapters in each use.

    Args:
        config: sizes and variant of the model.
        number: the number of the block.
        kernels: the platform.
    """

    def __init__(self, config: ModelConfig, number: int, kernels: Kernels) -> None:
        shared = config.variant.shared_blocks
        assert shared is not None
        owner, hidden = shared.owners[number], config.hidden_size
        self._name = f"model.layers.{owner}.{BLOCK}"
        attention, mlp = f"{self._name}.self_attn", f"{self._name}.feed_forward"
        self._sections, inner = config.attention_sections(owner), config.intermediate_size
        parts = dict(zip(("q_proj", "k_proj", "v_proj"), self._sections, strict=True))
        outputs = {"o_proj": hidden}
        self._qkv = kernels.linear(LinearSpec(2 * hidden, parts, prefix=attention))
        self._o_proj = kernels.linear(LinearSpec(self._sections[0], outputs, prefix=attention))
        gate_up, down = {"gate_up_proj": 2 * inner}, {"down_proj": hidden}
        self._gate_up = kernels.linear(LinearSpec(hidden, gate_up, shared.bias, mlp))
        self._down = kernels.linear(LinearSpec(inner, down, shared.bias, mlp))
        self._adapters: dict[int, _Adapters] = {}
        for use in shared.uses_of(number):
            names = [f"linear_{name}_adapter_list.{use}" for name in shared.adapters]
            lows = {f"{name}.0": shared.rank for name in names}
            sizes = zip(names, self._sections, strict=False)
            gates = f"gate_up_proj_adapter_list.{use}"
            low, high = {f"{gates}.0": shared.rank}, {f"{gates}.1": 2 * inner}
            self._adapters[use] = _Adapters(
                kernels.linear(LinearSpec(2 * hidden, lows, prefix=attention)) if lows else None,
                [
                    kernels.linear(LinearSpec(shared.rank, {f"{name}.1": size}, prefix=attention))
                    for name, size in sizes
                ],
                kernels.linear(LinearSpec(hidden, low, prefix=mlp)),
                kernels.linear(LinearSpec(shared.rank, high, prefix=mlp)),
            )
        norms = NormWeights(kernels, unit_offset=False)
        self._input_norm, self._mlp_norm = norms.empty(2 * hidden), norms.empty(hidden)
        self._eps, self._layers = config.rms_norm_eps, kernels.layers

    def parameters(self) -> dict[str, Parameter]:
        """Return the weight tensors to fill, by checkpoint name."""
        parameters: dict[str, Parameter] = {
            "input_layernorm.weight": self._input_norm,
            "pre_ff_layernorm.weight": self._mlp_norm,
        }
        for part, linears in self._linears().items():
            for linear in linears:
                parameters |= prefixed(part, linear.parameters())
        return prefixed(self._name, parameters)

    def pack(self) -> None:
        """Bring the filled weights into the form that the platform's kernels read."""
        for linears in self._linears().values():
            for linear in linears:
                linear.pack()

    def compute(
        self,
        x: Tensor,
        use: int,
        layer: AttentionLayer,
        backend: AttentionBackend,
        meta: AttentionMetadata,
    ) -> Tensor:
        """Compute the output [num_tokens, hidden_size] of a use.

        Args:
            x: [num_tokens, 2 * hidden_size] hidden states, and behind them embeddings.
            use: the number of the use.
            layer: the keys and values of this use.
            backend: keeps them.
            meta: the layout of the step.
        """
        adapters, rms_norm = self._adapters[use], self._layers.rms_norm
        x = rms_norm(x, self._input_norm, self._eps)
        qkv = self._qkv(x)
        if adapters.down is not None:
            lows = adapters.down(x).chunk(len(adapters.ups), dim=1)
            parts = torch.split(qkv, list(self._sections), dim=1)
            for part, up, low in zip(parts, adapters.ups, lows, strict=True):
                part += up(low.contiguous())
        attended = self._o_proj(backend.attend(layer, qkv, meta))
        x = rms_norm(attended, self._mlp_norm, self._eps)
        gate_up = self._gate_up(x)
        gate_up += adapters.mlp_up(adapters.mlp_down(x))
        gate, up_rows = gate_up.chunk(2, dim=1)
        return self._down(self._layers.gelu(gate) * up_rows)

    def _linears(self) -> dict[str, list[LinearMethod]]:
        """Return the linear layers of attention and of the MLP."""
        attention, mlp = [self._qkv, self._o_proj], [self._gate_up, self._down]
        for adapters in self._adapters.values():
            attention += (
                [*adapters.ups] if adapters.down is None else [adapters.down, *adapters.ups]
            )
            mlp += [adapters.mlp_down, adapters.mlp_up]
        return {"self_attn": attention, "feed_forward": mlp}


class BlockUse:
    """A layer's use of a block; see `models.mixer.Mixer`.

    Args:
        config: sizes and variant of the model.
        index: the layer's number.
        layer_name: the name of the layer in the checkpoint.
        cos_sin_cache: the rotary table, see `AttentionLayer`.
        kernels: the platform.
        block: the block.
    """

    name = "linear"
    reader: LinearMethod | None = None
    kept_state: StateLayer | None = None

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        layer_name: str,
        cos_sin_cache: Tensor,
        kernels: Kernels,
        block: SharedBlock,
    ) -> None:
        shared, sizes = config.variant.shared_blocks, config.sizes_of(index)
        assert shared is not None
        scale = config.variant.attention_scale or sizes.head_dim**-0.5
        heads = config.num_heads, sizes.num_kv_heads, sizes.head_dim
        self.kept_tokens = AttentionLayer(index, *heads, scale, cos_sin_cache)
        self._block, self._use = block, shared.use_of(index)
        size = config.hidden_size
        self.o_proj = kernels.linear(LinearSpec(size, {self.name: size}, prefix=layer_name))

    def parameters(self) -> dict[str, Parameter]:
        """Return the weight tensors to fill, by checkpoint name relative to the module."""
        parameters = self.o_proj.parameters().items()
        return {name.removeprefix(f"{self.name}."): weight for name, weight in parameters}

    def pack(self) -> None:
        """Bring the filled weights into the form that the platform's kernels read."""
        self.o_proj.pack()

    def mix(self, x: Tensor, backend: AttentionBackend, meta: AttentionMetadata) -> Tensor:
        """Compute what `o_proj` reads, for `x` [num_tokens, 2 * hidden_size]; see `SharedBlock`."""
        return self._block.compute(x, self._use, self.kept_tokens, backend, meta)


class BlockBeforeState:
    """A use of a block, the output of which is added to what a module with a state reads.

    See `models.mixer.Mixing`. It reads hidden states without a norm, and behind them embeddings.

    Args:
        use: the use.
        state: the module.
        norm: [hidden_size] weight of the norm on what the module reads.
        eps: epsilon of this norm.
        kernels: the platform.
    """

    reader: LinearMethod | None = None

    def __init__(
        self, use: BlockUse, state: Mixer, norm: Tensor, eps: float, kernels: Kernels
    ) -> None:
        self._use, self._state = use, state
        self._norm, self._eps = norm, eps
        self._rms_norm = kernels.layers.rms_norm
        self.o_proj = state.o_proj
        self.kept_tokens, self.kept_state = use.kept_tokens, state.kept_state

    def mix(self, x: Tensor, backend: AttentionBackend, meta: AttentionMetadata) -> Tensor:
        """Compute what `o_proj` reads, for `x` [num_tokens, 2 * hidden_size]."""
        added = self._use.o_proj(self._use.mix(x, backend, meta))
        hidden = x[:, : added.shape[1]] + added
        return self._state.mix(self._rms_norm(hidden, self._norm, self._eps), backend, meta)


def make_blocks(config: ModelConfig, kernels: Kernels) -> Mapping[int, SharedBlock]:
    """Return the block of each layer that uses one, by the number of the layer."""
    shared = config.variant.shared_blocks
    if shared is None:
        return {}
    blocks = [SharedBlock(config, number, kernels) for number in range(len(shared.owners))]
    return {layer: blocks[shared.block_of(layer)] for layer in shared.layers}
