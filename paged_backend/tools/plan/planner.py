"""Plans the serving of a model from its config.json, GPU data sheets and arithmetic alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.quantization_settings import says_quantized
from paged_backend.checkpoint.shape import ModelShape
from paged_backend.checkpoint.shape_reader import read_dtype, read_shape
from paged_backend.checkpoint.stages import problem_of_stages
from paged_backend.tools.plan.gpus import Gpu
from paged_backend.tools.plan.groups import Group
from paged_backend.tools.plan.lengths import Lengths
from paged_backend.tools.plan.measured import MeasuredRate, RooflineComparison, compare
from paged_backend.tools.plan.memory import Memory, MemoryPlanner, group_sizes
from paged_backend.tools.plan.model_file import find_config, read_config
from paged_backend.tools.plan.number_types import KV_TYPES, WEIGHT_TYPES, kv_type_of
from paged_backend.tools.plan.options import PlanOptions, refuse
from paged_backend.tools.plan.prices import cost_per_million
from paged_backend.tools.plan.roofline import Roofline, StepRoofline
from paged_backend.tools.plan.sizes import KvSizes, Parameters, count_parameters, state_bytes
from paged_backend.values.config import EngineConfig
from paged_backend.values.options.scheduling import GPU_LIMITS, StepLimits
from paged_backend.values.windows import Chunks

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_SHORTEST = 512  # tokens; the lengths in the tables double from here up to the context


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Properties of the model that do not depend on the GPU."""

    config: str
    shape: ModelShape
    attention: str
    dtype: str
    kv_cache_dtype: str
    parameters: Parameters
    num_parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    kv_bytes_of_context: int
    kv_bytes_seen: int  # part of these that the last token attends to; less with windows
    kv_block_bytes: int
    state_bytes: int  # size of a sequence's state in all layers


@dataclass(frozen=True, slots=True)
class Assumptions:
    """The assumptions that the plan's figures depend on."""

    context: int
    sequences: int
    block_size: int
    gpu_memory_utilization: float
    network_gb_s: float
    max_num_seqs: int
    max_num_batched_tokens: int
    input_len: int
    output_len: int
    length_sigma: float
    mean_input: float  # after the lengths are cut to the context
    mean_output: float
    mean_held: float  # tokens that a running sequence holds at a random step


@dataclass(frozen=True, slots=True)
class Reservation:
    """One way to allocate KV memory to sequences."""

    slots: float  # mean number per running sequence, without windows
    waste: float  # fraction of these slots that hold no token
    sequences: int  # that run at once if memory is the only limit


@dataclass(frozen=True, slots=True)
class LengthRow:
    """Figures for sequences of one length."""

    num_tokens: int
    blocks: int
    sequences: int
    prefill: StepRoofline


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """The roofline of decode steps with one batch size."""

    batch_size: int
    fits: bool
    step: StepRoofline


@dataclass(frozen=True, slots=True)
class Service:
    """Throughput and cost at the roofline while requests keep the batch full."""

    batch_size: int
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    cost_per_million_output: float | None  # None without a price
    cost_per_million_total: float | None  # cost of input and output tokens alike


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a group of identical GPUs can serve."""

    memory: Memory
    naive: Reservation  # reserves the whole context for each sequence
    paged: Reservation
    lengths: tuple[LengthRow, ...]
    decode: tuple[DecodeRow, ...]
    service: Service
    measured: tuple[RooflineComparison, ...]


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """The plan for one kind of GPU; if the model does not fit, `problem` says why."""

    gpu: Gpu
    price: float | None  # per hour of one GPU
    capacity: Capacity | None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """The plans for one model on each kind of GPU."""

    model: ModelFacts
    assumptions: Assumptions
    gpus: tuple[GpuPlan, ...]


def make_plan(
    model: str,
    options: PlanOptions,
    engine: EngineConfig,
    gpus: Sequence[Gpu],
    prices: Sequence[float | None],
    measurements: Sequence[MeasuredRate] = (),
) -> Plan:
    """Plan for each kind of GPU.

    `engine` provides the block size, the step limits and the fraction of the memory to use.

    Raises:
        ConfigError: the model or an option cannot be used.
    """
    planner = Planner(model, options, engine)
    plans = [
        planner.plan(gpu, price, measurements) for gpu, price in zip(gpus, prices, strict=True)
    ]
    return Plan(planner.facts, planner.assumptions, tuple(plans))


class Planner:
    """Plans one model with one set of options."""

    def __init__(self, model: str, options: PlanOptions, engine: EngineConfig) -> None:
        path = find_config(model)
        config = read_config(path)
        self._shape = read_shape(config)
        self._options, self._engine = options, engine
        self._limits: StepLimits = engine.step_limits(GPU_LIMITS)
        context = options.context_of(
            self._shape.max_position_embeddings, self._shape.default_max_model_len
        )
        input_len, output_len = options.mean_lengths(context)
        lengths = Lengths.lognormal(input_len, output_len, options.length_sigma, context)
        self._lengths = lengths
        dtype = read_dtype(config) if options.dtype == "auto" else options.dtype
        self._weights, kv_dtype = WEIGHT_TYPES[dtype], kv_type_of(dtype)
        if options.dtype == "auto" and says_quantized(path.parent, config):
            dtype, kv_dtype = self._quantize(path.parent, config, dtype, kv_dtype)
        if options.kv_cache_dtype != "auto":
            kv_dtype = options.kv_cache_dtype
        self._kv = KV_TYPES[kv_dtype]
        if not self._shape.attention_layers and options.kv_cache_dtype != "auto":
            problem = f"it can only be auto for a model without attention, got {kv_dtype}"
            raise refuse("kv_cache_dtype", problem)
        if self._shape.variant.latent is not None and self._kv.bits == 8:
            problem = f"latent attention has no 8-bit KV cache, got {kv_dtype}"
            raise refuse("kv_cache_dtype", problem)
        self.facts = self._facts(str(path), dtype, kv_dtype, context)
        self.assumptions = Assumptions(
            context=context,
            sequences=options.sequences,
            block_size=engine.block_size,
            gpu_memory_utilization=engine.gpu_memory_utilization,
            network_gb_s=options.network_gb_s,
            max_num_seqs=self._limits.max_num_seqs,
            max_num_batched_tokens=self._limits.max_num_batched_tokens,
            input_len=input_len,
            output_len=output_len,
            length_sigma=options.length_sigma,
            mean_input=lengths.mean_input,
            mean_output=lengths.mean_output,
            mean_held=lengths.mean_held,
        )

    def plan(
        self, gpu: Gpu, price: float | None, measurements: Sequence[MeasuredRate] = ()
    ) -> GpuPlan:
        """Plan for the requested number of these GPUs, or else for the fewest that suffice."""
        if self._options.link_gb_s is not None:
            gpu = replace(gpu, link_gb_s=self._options.link_gb_s)
        memory = self._memory(gpu)
        if isinstance(memory, str):
            return GpuPlan(gpu, price, None, problem=memory)
        network = self._options.network_gb_s * 1e9
        roofline = Roofline(self._shape, self._weights, self._kv, gpu, memory.group, network)
        paged = self._paged(memory)
        hourly = None if price is None else price * memory.num_gpus
        capacity = Capacity(
            memory=memory,
            naive=self._naive(memory),
            paged=paged,
            lengths=tuple(self._length_rows(memory, roofline)),
            decode=tuple(self._decode_rows(paged, roofline)),
            service=self._service(roofline, paged, hourly),
            measured=tuple(compare(measured, roofline, hourly) for measured in measurements),
        )
        return GpuPlan(gpu, price, capacity)

    def _quantize(
        self, folder: Path, config: ConfigFile, dtype: str, kv_dtype: str
    ) -> tuple[str, str]:
        """Plan for quantized weights; returns the names of their format and of the KV cache's."""
        from paged_backend.quantization.read import read_quantization  # needs torch
        from paged_backend.tools.plan.quantized import quantized_weights

        quantization = read_quantization(folder, config)
        if quantization is None:  # the files next to config.json are not quantized
            return dtype, kv_dtype
        self._weights = quantized_weights(quantization, self._shape, self._weights)
        known = quantization.kv_cache_dtype
        return quantization.method, kv_dtype if known == "auto" else known

    def _facts(self, config: str, dtype: str, kv_dtype: str, context: int) -> ModelFacts:
        parameters = count_parameters(self._shape)
        kv = KvSizes.of(self._shape, self._kv)
        return ModelFacts(
            config=config,
            shape=self._shape,
            attention=_attention(self._shape),
            dtype=dtype,
            kv_cache_dtype=kv_dtype,
            parameters=parameters,
            num_parameters=parameters.total,
            weight_bytes=parameters.bytes(self._weights),
            kv_bytes_per_token=kv.bytes_per_token,
            kv_bytes_of_context=kv.bytes_per_token * context,
            kv_bytes_seen=round(kv.bytes_seen(context)),
            kv_block_bytes=kv.block_bytes(kv.groups(context), self._engine.block_size),
            state_bytes=state_bytes(self._shape, self._weights),
        )

    def _memory(self, gpu: Gpu) -> Memory | str:
        """The division of the GPUs' memory, or the reason why the model does not fit."""
        planner = MemoryPlanner(
            self._shape,
            self._weights,
            self._kv,
            gpu,
            self._engine.gpu_memory_utilization,
            self._engine.block_size,
            self._limits,
            self.assumptions.context,
        )
        context, wanted = self.assumptions.context, self._options.sequences
        what = f"{wanted} x {context} tokens"
        groups = self._groups()
        found = planner.least(groups, context, wanted)
        if found is not None:
            return found
        if self._options.tensor_parallel_size is not None:
            return f"{what} do not fit"
        return f"{what} do not fit on {max(group.num_gpus for group in groups)} either"

    def _groups(self) -> list[Group]:
        """The groups of GPUs to choose from, the smallest first."""
        options, num_layers = self._options, self._shape.num_layers
        stages = options.pipeline_parallel_size or options.nodes or 1
        if stages > num_layers:
            raise refuse(
                "pipeline_parallel_size", f"the model has {num_layers} layers, got {stages} stages"
            )
        problem = problem_of_stages(self._shape.attention_layers, num_layers, stages)
        if problem is not None:
            raise refuse("pipeline_parallel_size", problem)
        sizes, wanted = list(group_sizes(self._shape)), options.tensor_parallel_size
        if wanted is not None and wanted not in sizes:
            known = ", ".join(map(str, sizes))
            raise refuse(
                "tensor_parallel_size", f"the heads divide over {known} GPUs, got {wanted}"
            )
        groups = [
            Group(size, stages, options.gpus_per_node) for size in sizes if wanted in (None, size)
        ]
        fitting = [
            group for group in groups if options.nodes is None or group.num_nodes <= options.nodes
        ]
        if not fitting:
            raise refuse(
                "nodes",
                f"{groups[0].num_gpus} GPUs need {groups[0].num_nodes} hosts of "
                f"{options.gpus_per_node}, got {options.nodes}",
            )
        return fitting

    def _naive(self, memory: Memory) -> Reservation:
        context = self.assumptions.context
        waste = 1 - self.assumptions.mean_held / context
        return Reservation(context, waste, memory.limited(memory.num_slots // context))

    def _paged(self, memory: Memory) -> Reservation:
        slots = self._lengths.mean_slots(memory.layout.block_size)
        waste = 1 - self.assumptions.mean_held / slots
        sequences = int(memory.num_blocks / self._lengths.mean_blocks(memory.layout))
        return Reservation(slots, waste, memory.limited(sequences))

    def _length_rows(self, memory: Memory, roofline: Roofline) -> list[LengthRow]:
        context = self.assumptions.context
        lengths = [_SHORTEST << step for step in range(16) if _SHORTEST << step < context]
        return [
            LengthRow(
                num_tokens=length,
                blocks=memory.layout.blocks_of_decode(length),
                sequences=memory.num_sequences(length),
                prefill=roofline.prefill(length),
            )
            for length in (*lengths, context)
        ]

    def _decode_rows(self, paged: Reservation, roofline: Roofline) -> list[DecodeRow]:
        held = self.assumptions.mean_held
        sizes = [size for size in BATCH_SIZES if size <= self._limits.max_num_seqs]
        return [
            DecodeRow(size, size <= paged.sequences, roofline.decode(size, held)) for size in sizes
        ]

    def _service(self, roofline: Roofline, paged: Reservation, price: float | None) -> Service:
        known = self.assumptions
        batch_size = min(self._limits.max_num_seqs, paged.sequences)
        seconds = roofline.request_seconds(
            batch_size, known.mean_input, known.mean_output, known.mean_held
        )
        tokens = known.mean_input + known.mean_output
        return Service(
            batch_size=batch_size,
            requests_per_s=1 / seconds,
            input_tokens_per_s=known.mean_input / seconds,
            output_tokens_per_s=known.mean_output / seconds,
            cost_per_million_output=cost_per_million(price, known.mean_output / seconds),
            cost_per_million_total=cost_per_million(price, tokens / seconds),
        )


def _attention(shape: ModelShape) -> str:
    """The kind of attention (MHA, MQA, GQA or MLA), and its windows or chunks if there are any."""
    if not shape.attention_layers:
        kind = "none"
    elif shape.variant.latent is not None:
        kind = "MLA"
    elif shape.num_kv_heads == shape.num_heads:
        kind = "MHA"
    else:
        kind = "MQA" if shape.num_kv_heads == 1 else "GQA"
    sharing = len(shape.attention_layers) - len(shape.keeping_layers)
    if sharing:
        kind += f", keys and values of other layers in {sharing} of {shape.num_layers} layers"
    with_states = sum(mixer is not None for mixer in shape.variant.state_mixers)
    if with_states:
        kind += f", a state per sequence in {with_states} of {shape.num_layers} layers"
    windows = [window for window in shape.windows if window is not None]
    if windows:
        limit = windows[0] if isinstance(windows[0], Chunks) else f"window of {windows[0]}"
        kind += f", {limit} in {len(windows)} of {shape.num_layers} layers"
    return kind
