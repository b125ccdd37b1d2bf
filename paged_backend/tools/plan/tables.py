"""Prints a plan as tables in the terminal, with one column per GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from rich.console import Console
from rich.table import Table

from paged_backend.checkpoint.shape import ModelShape
from paged_backend.tools.plan.memory import CONTEXT_BYTES
from paged_backend.tools.plan.planner import Capacity, GpuPlan, Plan
from paged_backend.tools.plan.roofline import StepRoofline

_NONE = "-"
_BOUNDS = {"memory": "m", "compute": "c", "links": "l"}


def print_plan(plan: Plan, console: Console) -> None:
    """Print every table, then the assumptions behind them."""
    console.print(_model(plan))
    console.print(_memory(plan))
    if any(gpu.capacity for gpu in plan.gpus):
        if plan.model.kv_bytes_per_token:
            console.print(_reservations(plan))
        for table in (_decode(plan), _prefill(plan), _service(plan)):
            console.print(table)
    for gpu in plan.gpus:
        if gpu.capacity and gpu.capacity.measured:
            console.print(_measured(gpu, gpu.capacity))
    for note in _notes(plan):
        console.print(f"- {note}", highlight=False, markup=False)


def _model(plan: Plan) -> Table:
    model, shape, known = plan.model, plan.model.shape, plan.assumptions
    table = Table("Model", model.config, title_justify="left")
    heads = f", {_heads(shape)}" if shape.attention_layers else ""
    table.add_row("attention", f"{model.attention}; {shape.num_layers} layers{heads}")
    count = model.num_parameters
    table.add_row("parameters", f"{count:,} ({_scaled(count, 1000, ('', 'k', 'M', 'B'))})")
    table.add_row("weights", f"{_bytes(model.weight_bytes)} in {model.dtype}")
    if model.state_bytes:
        table.add_row("state", f"{_bytes(model.state_bytes)} a sequence")
    if not shape.attention_layers:
        return table
    per_token = f"{_bytes(model.kv_bytes_per_token)} a token in {model.kv_cache_dtype}"
    of_context = f"{_bytes(model.kv_bytes_of_context)} at {known.context:,} tokens"
    if model.kv_bytes_seen < model.kv_bytes_of_context:
        of_context += f" ({_bytes(model.kv_bytes_seen)} of it within the windows, and kept)"
    table.add_row("KV cache", f"{per_token}, {of_context}")
    block = f"{known.block_size} tokens, {_bytes(model.kv_block_bytes)}"
    if model.kv_block_bytes < model.kv_bytes_per_token * known.block_size:
        block += ", in one group of layers"
    table.add_row("block", block)
    return table


def _heads(shape: ModelShape) -> str:
    sizes = dict.fromkeys(map(shape.kept_of, shape.attention_layers))
    first, *others = [(each.num_heads, each.key_dim) for each in sizes]
    kept = f"{first[0]} key-value heads of {first[1]}"
    kept += "".join(f", or {count} of {size}" for count, size in others)
    if shape.variant.latent is not None:
        kept = f"a row of {shape.variant.latent.row_size} numbers for all of them"
    joined = " heads, " if shape.variant.latent is not None else " and "
    return f"{shape.num_heads} query{joined}{kept}"


def _memory(plan: Plan) -> Table:
    table = _Table(plan, "Memory of each GPU, and what fits")
    table.row("GPUs needed", lambda c: str(c.memory.num_gpus))
    if any(gpu.capacity and gpu.capacity.memory.group.pipeline > 1 for gpu in plan.gpus):
        table.row("stages x GPUs of each", _stages)
        table.row("hosts", lambda c: str(c.memory.group.num_nodes))
    table.rows.add_row("memory", *(_bytes(gpu.gpu.memory_bytes) for gpu in plan.gpus))
    table.row("weights", lambda c: _bytes(c.memory.weight_bytes))
    table.row("largest step, estimated", lambda c: _bytes(c.memory.step_bytes))
    if plan.model.state_bytes:
        table.row("states", lambda c: _bytes(c.memory.state_bytes))
    if plan.model.kv_bytes_per_token:
        table.row("KV blocks", lambda c: _bytes(c.memory.pool_bytes))
        table.rows.add_section()
        table.row("blocks", lambda c: f"{c.memory.num_blocks:,}")
        table.row("tokens in them", lambda c: f"{c.memory.num_slots:,}")
    names = [f"sequences of {length:,}" for length in _lengths(plan)]
    table.each(names, lambda c, index: f"{c.lengths[index].sequences:,}")
    return table.rows


def _stages(capacity: Capacity) -> str:
    group = capacity.memory.group
    return f"{group.pipeline} x {group.tensor}"


def _reservations(plan: Plan) -> Table:
    known = plan.assumptions
    table = _Table(plan, f"Sequences at once that hold {known.mean_held:,.0f} tokens each")
    table.row(f"{known.context:,} slots reserved", lambda c: f"{c.naive.sequences:,}")
    table.row("wasted", lambda c: f"{c.naive.waste:.1%}")
    table.row(f"blocks of {known.block_size}", lambda c: f"{c.paged.sequences:,}")
    table.row("wasted", lambda c: f"{c.paged.waste:.1%}")
    table.row("times as many", lambda c: _ratio(c.paged.sequences, c.naive.sequences))
    return table.rows


def _decode(plan: Plan) -> Table:
    held = plan.assumptions.mean_held
    table = _Table(plan, f"Decode roofline at {held:,.0f} tokens: tokens/s, ms a step, bound")
    table.each([f"batch of {size}" for size in _batch_sizes(plan)], _decode_cell)
    return table.rows


def _decode_cell(capacity: Capacity, index: int) -> str:
    row = capacity.decode[index]
    return _step(row.step) if row.fits else "does not fit"


def _prefill(plan: Plan) -> Table:
    table = _Table(plan, "Prefill roofline of one prompt: tokens/s, ms, bound")
    names = [f"{length:,} tokens" for length in _lengths(plan)]
    table.each(names, lambda c, index: _step(c.lengths[index].prefill))
    return table.rows


def _service(plan: Plan) -> Table:
    known = plan.assumptions
    table = _Table(
        plan,
        f"Full batches of {known.mean_input:,.0f} tokens in and {known.mean_output:,.0f} out, "
        "at the roofline",
    )
    table.row("sequences at once", lambda c: f"{c.service.batch_size:,}")
    table.row("requests/s", lambda c: f"{c.service.requests_per_s:,.3g}")
    table.row("output tokens/s", lambda c: f"{c.service.output_tokens_per_s:,.0f}")
    if any(gpu.price is not None for gpu in plan.gpus):
        prices = (_NONE if gpu.price is None else f"{gpu.price:g}" for gpu in plan.gpus)
        table.rows.add_row("price of a GPU's hour", *prices)
        table.row(
            "cost of a million output tokens", lambda c: _money(c.service.cost_per_million_output)
        )
        table.row("of a million, in and out", lambda c: _money(c.service.cost_per_million_total))
    return table.rows


def _measured(gpu: GpuPlan, capacity: Capacity) -> Table:
    title = f"Measured, compared with the roofline of {capacity.memory.num_gpus} x {gpu.gpu.name}"
    table = Table(title=title, title_justify="left")
    table.add_column("run")
    for name in ("at once", "tokens each", "output tokens/s", "roofline", "reached"):
        table.add_column(name, justify="right")
    if gpu.price is not None:
        table.add_column("cost of a million output tokens", justify="right")
    for row in capacity.measured:
        seen = row.measurement
        cells = [
            f"{seen.batch_size:,.1f}",
            f"{seen.held:,.0f}",
            f"{seen.tokens_per_s:,.1f}",
            f"{row.roofline_tokens_per_s:,.0f}",
            f"{row.share:.1%}",
        ]
        if gpu.price is not None:
            cells.append(_money(row.cost_per_million_output))
        table.add_row(seen.label, *cells)
    return table


def _notes(plan: Plan) -> Iterator[str]:
    known = plan.assumptions
    for gpu in plan.gpus:
        if gpu.problem is not None:
            yield f"{gpu.gpu.name}: {gpu.problem}."
    yield (
        f"Lengths: prompts of {known.input_len:,} and outputs of {known.output_len:,} tokens on "
        f"average, log-normal with sigma {known.length_sigma:g}, cut at {known.context:,} together."
    )
    cache, read = "KV blocks", "KV cache"
    if plan.model.state_bytes:
        cache, read = "KV blocks and states", "KV cache, and moving states,"
    yield (
        f"{cache}: {known.gpu_memory_utilization:.0%} of the memory less weights, "
        f"{_bytes(CONTEXT_BYTES)} for CUDA, and the largest step ({known.max_num_seqs} sequences, "
        f"{known.max_num_batched_tokens} tokens), which the engine measures when it starts."
    )
    yield (
        f"Roofline: m, reading weights and {read} takes longest; c, computing does; l, traffic "
        "between GPUs does, which is always added. Launches, the host and latencies do not count."
    )
    for gpu in plan.gpus:
        figures = ", ".join(f"{rate:g} {dtype}" for dtype, rate in gpu.gpu.tflops.items())
        yield (
            f"{gpu.gpu.name}: {gpu.gpu.bandwidth_gb_s:,.0f} GB/s; TFLOP/s {figures}; links of "
            f"{gpu.gpu.link_gb_s:g} GB/s; {gpu.gpu.source}."
        )
    groups = [gpu.capacity.memory.group for gpu in plan.gpus if gpu.capacity]
    if any(group.num_nodes > 1 for group in groups):
        yield f"Between hosts, each GPU sends {known.network_gb_s:g} GB/s."
    if any(group.num_nodes > 1 for group in groups):
        yield "A model on several hosts is a plan only so far."
    elif any(group.pipeline > 1 for group in groups):
        yield (
            "Stages of layers compute one after another. pipeline_parallel_size has not been "
            "measured on GPUs yet."
        )
    elif any(group.num_gpus > 1 for group in groups):
        yield "tensor_parallel_size has not been measured on GPUs yet."


class _Table:
    """A table of figures with one column per GPU."""

    def __init__(self, plan: Plan, title: str) -> None:
        self._plan = plan
        self.rows = Table(title=title, title_justify="left")
        self.rows.add_column("")
        for gpu in plan.gpus:
            name = gpu.gpu.name
            if gpu.capacity and gpu.capacity.memory.num_gpus > 1:
                name = f"{gpu.capacity.memory.num_gpus} x {name}"
            self.rows.add_column(name, justify="right")

    def row(self, name: str, cell: Callable[[Capacity], str]) -> None:
        """Add a row with one figure per GPU, or a dash where the model does not fit."""
        cells = (cell(gpu.capacity) if gpu.capacity else _NONE for gpu in self._plan.gpus)
        self.rows.add_row(name, *cells)

    def each(self, names: Sequence[str], cell: Callable[[Capacity, int], str]) -> None:
        """Add a row for each name; `cell` receives the index of the name."""
        for index, name in enumerate(names):
            self.row(name, partial(_at, cell, index))


def _at(cell: Callable[[Capacity, int], str], index: int, capacity: Capacity) -> str:
    return cell(capacity, index)


def _capacity(plan: Plan) -> Capacity | None:
    """The capacity of any GPU that the model fits; all have the same lengths and batch sizes."""
    return next((gpu.capacity for gpu in plan.gpus if gpu.capacity), None)


def _lengths(plan: Plan) -> list[int]:
    capacity = _capacity(plan)
    return [row.num_tokens for row in capacity.lengths] if capacity else []


def _batch_sizes(plan: Plan) -> list[int]:
    capacity = _capacity(plan)
    return [row.batch_size for row in capacity.decode] if capacity else []


def _step(step: StepRoofline) -> str:
    milliseconds = step.seconds * 1e3
    digits = 2 if milliseconds < 10 else 1 if milliseconds < 100 else 0
    return f"{step.tokens_per_s:,.0f}  {milliseconds:,.{digits}f} {_BOUNDS[step.bound]}"


def _ratio(more: int, fewer: int) -> str:
    return f"{more / fewer:.1f}" if fewer else _NONE


def _money(amount: float | None) -> str:
    return _NONE if amount is None else f"{amount:,.3g}"


def _bytes(number: int) -> str:
    return _scaled(number, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def _scaled(number: float, step: int, units: tuple[str, ...]) -> str:
    """Format in the largest unit that keeps the number at least 1; no decimals if it is whole."""
    power = 0
    while number >= step and power < len(units) - 1:
        number, power = number / step, power + 1
    digits = 0 if number == int(number) else 2
    return f"{number:,.{digits}f} {units[power]}".rstrip()
