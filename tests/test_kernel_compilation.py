"""Every GPU kernel compiled without a GPU, in the configurations that serving launches."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from packaging.requirements import Requirement
from paged_kernels import aot
from paged_kernels.catalogue import CASES, Case
from paged_kernels.device import INTERPRETED, device_of
from paged_kernels.latent_attention import MAX_ROTARY, latent_attention
from paged_kernels.tuning.decode import FEW_PROGRAMS, DecodeConfig, decode_config

if INTERPRETED:
    pytest.skip("kernels are interpreted in this process", allow_module_level=True)

PAIRS = [(case.name, arch) for case in CASES.values() for arch in case.archs]
# To the compiler these are much like others: COMPILED.md has them, no test waits for them.
ALIKE = (
    "fp16",
    "Gemma-2B fp32",
    "Llama-3-70B",
    "Phi-3-mini",
    "prefix, Qwen2-0.5B",
    "151936",
)
EVERYWHERE = ("decode", "prefill", "shared prefix")
"""Operations whose kernels are compiled for all architectures here, others for one of them."""
ALIKE_ELSEWHERE = ("window", "chunks", "softcap", "sinks", "Qwen2", "Phi-2", " cache")
"""Cases that differ from another in the scores, the number of heads or the cache's dtype only:
compiled for one."""

TABLE = (Path(aot.__file__).parents[1] / "COMPILED.md").read_text()
OTHER_TRITON = f"with Triton {triton.__version__}." not in TABLE
OTHER_SOURCES = f"digest of the sources is {aot.sources_digest()}." not in TABLE
FIRST = {case.operation: case.name for case in reversed(CASES.values())}
"""The first case of each operation. These are compiled although the table has them."""
ALWAYS = "decode", "prefill", "dense matmul", "experts", "sampling", "gated delta rule"
"""Operations of which the first case is compiled even if not everything is tried."""

COMPILED = [
    (name, arch)
    for name, arch in PAIRS
    if not any(alike in name for alike in ALIKE)
    and (arch == 90 or CASES[name].operation in EVERYWHERE)
    and (arch == 90 or not any(alike in name for alike in ALIKE_ELSEWHERE))
    # The table says what the compiler made of all cases, with this compiler and these sources.
    and (OTHER_TRITON or OTHER_SOURCES or (FIRST[CASES[name].operation], 90) == (name, arch))
]


def is_always(name: str) -> bool:
    """Return True if each run compiles a case: it compiles all if the table may be outdated."""
    return OTHER_TRITON or OTHER_SOURCES or CASES[name].operation in ALWAYS


def cells(row: str) -> tuple[str, ...]:
    """Return the cells of a row, without the configuration that a binary is listed under."""
    kernel, _, *others = row.strip("| ").split(" | ")
    return kernel, *others


ROWS = [line for line in TABLE.splitlines() if line.startswith("| `")]
LISTED = {cells(line) for line in ROWS}

ATTENTION = ("_split_kernel", "_prefill_kernel")
DEPENDENT = (
    *ATTENTION,
    "_fused_qk_norm_rope_cache_kernel",
    "_rms_norm_kernel",
    "_gated_activation_kernel",
    "_sample_kernel",
    "_dense_kernel",
    "_gated_kernel",
    "matmul_kernel",
    "_add_splits_kernel",
    "_block_scaled_matmul_kernel",
    "_packed_matmul_kernel",
    "_quantize_rows_kernel",
    "_choose_experts_kernel",
    "_sort_pairs_kernel",
    "_gate_up_kernel",
    "_down_kernel",
    "_add_experts_kernel",
    "_shrink_kernel",
    "_expand_kernel",
    "_latent_kernel",
    "_latent_rope_cache_kernel",
    "_causal_conv_kernel",
    "_gated_delta_kernel",
    "_inverse_kernel",
    "_gated_delta_chunks_kernel",
    "_decayed_scan_kernel",
    "_scores_kernel",
    "_decayed_chunks_kernel",
    "_mamba1_scan_kernel",
    "_rg_lru_kernel",
)
"""Kernels of each layer, and the last of a step: they are set up while the one before runs."""

TENSOR_CORES = {80: "mma", 90: "wgmma", 100: "tcgen05"}

BUCKETS = {
    # Few sequences have deeper pipelines than many.
    ("decode", "_split_kernel"): 2,
    # Queries under a shared prefix fill tiles of 16, 32, 64 or 128 rows, over keys in tiles of
    # two sizes. A single query merges no padding of its tile; few of them have deeper pipelines.
    ("shared prefix", "_split_kernel"): 6,
    ("shared prefix", "_plan_kernel"): 2,
    # Keys of few queries are split, those of many are not.
    ("prefill", "_prefill_kernel"): 2,
    ("latent prefill", "_latent_kernel"): 2,
    # Few sequences are divided among more programs, with tiles of another size.
    ("latent decode", "_latent_kernel"): 2,
    ("latent decode", "_plan_kernel"): 2,
    # Tiles for up to 16 rows, and for up to 64.
    ("dense matmul", "_dense_kernel"): 2,
    ("dense matmul", "_gated_kernel"): 2,
    # Tiles for up to 16 rows, up to 256, and more.
    ("scaled matmul", "matmul_kernel"): 3,
    ("block-scaled matmul", "_block_scaled_matmul_kernel"): 3,
    ("w4a16 matmul", "_packed_matmul_kernel"): 3,
    ("w8a16 matmul", "_packed_matmul_kernel"): 3,
    # The same, for the rows of an expert.
    ("experts", "_sort_pairs_kernel"): 3,
    ("experts", "_gate_up_kernel"): 3,
    ("experts", "_down_kernel"): 3,
    # Splits of K are programs of their own up to 1,024 rows.
    ("low rank", "_shrink_kernel"): 2,
    ("low rank", "_expand_kernel"): 2,
    # Tiles for decodes, and for prompts.
    ("causal convolution", "_causal_conv_kernel"): 2,
    # Heads are views of parts of a row, and torch reports the view of a single row as dense.
    ("gated delta rule", "_gated_delta_kernel"): 2,
    ("selective scan", "_decayed_scan_kernel"): 2,
    ("linear attention", "_decayed_scan_kernel"): 2,
}
"""How many binaries a kernel may need for one model, all batches together, where not one."""

Compiled = dict[aot.Key, aot.Resources]


def read_row(row: str) -> tuple[str, aot.Resources]:
    """Return the case of a row, and the resources of its binary."""
    kernel, case, arch, warps, stages, registers, spilled, shared, counts = (
        cell.strip() for cell in row.strip("|").split("|")
    )
    instructions = dict.fromkeys(aot.INSTRUCTIONS, 0)
    for count, name in (entry.split(" ") for entry in counts.split(", ") if entry):
        instructions[name] = int(count)
    return case, aot.Resources(
        kernel=kernel.strip("`"),
        arch=int(arch),
        warps=int(warps),
        stages=int(stages),
        registers=int(registers),
        spilled=int(spilled),
        shared=round(1024 * float(shared)),
        instructions=instructions,
    )


LISTED_BINARIES = [read_row(row) for row in ROWS]


def test_the_table_describes_these_kernels():
    """Tests compile a case of each operation, and rely on the table for the others."""
    assert OTHER_TRITON or not OTHER_SOURCES, (
        "the kernels have changed: write COMPILED.md with "
        "`python -m paged_kernels.aot --write kernels/COMPILED.md`, and look at what has changed"
    )
    assert {(found.kernel, found.arch) for _, found in LISTED_BINARIES} >= {
        (launch.kernel.__name__, arch)
        for name, arch in PAIRS
        for launch in aot.launches(partial(CASES[name].call, 1), arch)
    }


def tensor_cores(case: str, arch: int) -> str:
    """The instruction of prefill; tiles of wide heads are too small for the newer ones."""
    return "mma" if "heads of 512" in case else TENSOR_CORES[arch]


@pytest.mark.parametrize("arch", aot.DEVICES)
def test_all_listed_binaries_fit_the_device(arch: int):
    for case, found in LISTED_BINARIES:
        if found.arch != arch:
            continue
        assert found.fits, found
        assert (found.instructions["pdl"] > 0) == (found.kernel in DEPENDENT and arch >= 90), found
        if found.kernel in ATTENTION:
            assert found.instructions["cp.async"] > 0, found
            assert found.instructions["ld.narrow"] == 0, found
        if found.kernel == "_prefill_kernel":
            assert (found.instructions[tensor_cores(case, arch)] > 0) != ("fp32" in case), found


@pytest.mark.parametrize("arch", aot.DEVICES)
def test_as_many_listed_programs_fit_as_decoding_is_planned_for(arch: int):
    checked = 0
    for case, found in LISTED_BINARIES:
        if (found.arch, found.kernel) == (arch, "_split_kernel") and case.startswith("decode"):
            launches = aot.binaries(case, arch).values()
            planned = {
                planned_config(n, arch)
                for n in launches
                if (n.kernel.__name__, n.options["num_stages"]) == (found.kernel, found.stages)
            }
            assert planned and all(fits_as_planned(config, found) for config in planned), found
            checked += 1
    assert checked > 5


@pytest.mark.parametrize(
    ("case", "arch"),
    [
        pytest.param(*pair, marks=() if is_always(pair[0]) else pytest.mark.thorough)
        for pair in COMPILED
    ],
)
def test_kernels_fit_the_device(case: str, arch: int):
    compiled = aot.measure(case, arch)
    assert compiled
    for found in compiled.values():
        assert found.arch == arch
        assert found.fits, found
        assert found.instructions["pdl"] == (found.kernel in DEPENDENT and arch >= 90), found
        # The table says the same of the other architectures; it is written by one command.
        assert cells(aot.row(case, found)) in LISTED or OTHER_TRITON, "write COMPILED.md anew"
    for check in CHECKS.get(CASES[case].operation, ()):
        check(case, arch, compiled)


@pytest.mark.parametrize(
    "case",
    [
        "decode, Llama-3-8B bf16",
        "prefill, Llama-3-8B bf16",
        "KV write, Llama-3-8B bf16",
        "add and norm, 4096 bf16",
        "activation, 14336 bf16",
        "sampling, 128256 tokens bf16",
        "dense matmul, 6144x4096 bf16",
        "dense matmul, 28672x4096 bf16 gated",
        "low rank, qkv rank 16 bf16",
        "latent decode, MiniCPM3-4B bf16",
        "latent write, DeepSeek-V3 bf16",
        "causal convolution, LFM2-1.2B bf16",
        "gated delta rule, Qwen3-Next bf16",
        "selective scan, Nemotron-H-8B bf16",
        "Mamba scan, Jamba-Mini bf16",
        "RG-LRU, RecurrentGemma-2B bf16",
    ],
)
def test_nothing_is_read_before_the_launch_before_has_ended(case: str):
    """Else a kernel that is set up early could read what the one before is still writing."""
    found = []
    for launch in aot.binaries(case, 90).values():
        if launch.kernel.__name__ not in DEPENDENT:
            continue
        assert launch.options["launch_pdl"]
        ptx = launch.compile().asm["ptx"]
        wait, after = (
            ptx.index("griddepcontrol.wait"),
            ptx.index("griddepcontrol.launch_dependents"),
        )
        assert (
            wait < after < re.search(r"\b(ld|st|red|atom|cp\.async)\S*\.global|\btma", ptx).start()
        )
        found.append(launch.kernel.__name__)
    assert found


def attention_loads_ahead_and_wide(case: str, arch: int, compiled: Compiled) -> None:
    main = [found for found in compiled.values() if found.kernel in ATTENTION]
    assert main
    for found in main:
        assert found.instructions["cp.async"] > 0, found
        assert found.instructions["ld.narrow"] == 0, found


def planned_config(launch: aot.Launch, arch: int) -> DecodeConfig:
    q, cache = launch.arguments["q_ptr"], launch.arguments["cache_ptr"]
    return decode_config(
        arch,
        launch.arguments["DIM_PADDED"],
        q.element_size(),
        launch.arguments["ROWS"],
        quantized=q.dtype != cache.dtype,
        few=launch.arguments["num_seqs"] * launch.arguments["KV_HEADS"] <= FEW_PROGRAMS,
        large=launch.arguments["lse_ptr"] is not None or launch.arguments["CHUNKED"],
    )


def fits_as_planned(config: DecodeConfig, found: aot.Resources) -> bool:
    # A few small tiles of many queries leave room for another program, as some binaries for the
    # B200 do. Few sequences get one program for each multiprocessor.
    roomy = found.warps == 8 or found.arch == 100 or config.programs_per_sm == 1
    fitting = found.programs_per_sm
    return config.programs_per_sm == fitting or (roomy and config.programs_per_sm < fitting)


def as_many_programs_fit_as_decoding_is_planned_for(
    case: str, arch: int, compiled: Compiled
) -> None:
    """With more splits than that, some would wait for a second wave."""
    planned = {
        key: planned_config(launch, arch)
        for key, launch in aot.binaries(case, arch).items()
        if launch.kernel.__name__ == "_split_kernel"
    }
    assert planned
    for key, config in planned.items():
        assert fits_as_planned(config, compiled[key]), compiled[key]


def prefill_uses_the_tensor_cores_to_the_full(case: str, arch: int, compiled: Compiled) -> None:
    for found in compiled.values():
        if found.kernel != "_prefill_kernel":
            continue
        exact = "fp32" in case  # which no tensor core is
        assert (found.instructions[tensor_cores(case, arch)] > 0) != exact, found


_OF_DECODING = (attention_loads_ahead_and_wide, as_many_programs_fit_as_decoding_is_planned_for)
CHECKS = {
    "decode": _OF_DECODING,
    "shared prefix": _OF_DECODING,
    "prefill": (attention_loads_ahead_and_wide, prefill_uses_the_tensor_cores_to_the_full),
}
"""What else holds for the binaries of an operation. One test makes all checks of a case, so that
each case is compiled once, whichever of several test processes gets it."""


@pytest.mark.parametrize(("case", "arch"), PAIRS)
def test_no_batch_causes_a_compilation(case: str, arch: int):
    """Serving compiles nothing after its warm-up, which sees only some batches."""
    launches = aot.binaries(case, arch).values()
    assert launches
    for launch in launches:
        assert specialized(launch) == [], launch.kernel.__name__
    counts = Counter(launch.kernel.__name__ for launch in launches)
    for kernel, count in counts.items():
        assert count <= BUCKETS.get((CASES[case].operation, kernel), 1), kernel


@pytest.mark.parametrize("num_seqs", [1, 64])
def test_latent_attention_with_wide_rotary_keys_fits(num_seqs: int):
    """No model of the catalog has them; tiles for narrow ones need too much shared memory."""
    rank, rotary = 512, MAX_ROTARY
    q, cache = (
        torch.empty(*shape, rank + rotary, dtype=torch.bfloat16, device="meta")
        for shape in ((num_seqs, 128), (9, 16))
    )
    table, lengths, starts = (
        torch.empty(shape, dtype=torch.int32, device="meta")
        for shape in ((num_seqs, 9), (num_seqs,), (num_seqs + 1,))
    )
    options = {"rank": rank, "scale": 1.0, "num_decodes": num_seqs}
    call = partial(latent_attention, q, cache, table, lengths, starts, **options)
    (launch,) = (
        each for each in aot.launches(call, 90) if each.kernel.__name__ == "_latent_kernel"
    )
    assert launch.resources().fits


@pytest.mark.parametrize("model", ["Llama-3-8B", "Qwen2-0.5B"])
@pytest.mark.parametrize("arch", [80, 90])
def test_a_warm_up_with_powers_of_two_compiles_every_cascade(model: str, arch: int):
    """As the model runner does it, with the largest batch at last."""
    call = CASES[f"shared prefix, {model} bf16"].call

    def keys(sizes: list[int]) -> set[aot.Key]:
        return {launch.key for n in sizes for launch in aot.launches(partial(call, n), arch)}

    assert keys(list(range(8, 101))) == keys([8, 16, 32, 64, 100])


@triton.jit(do_not_specialize=["count"])
def _scale(x_ptr, y_ptr, count, size, factor, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = offsets < count * size
    x = tl.load(x_ptr + offsets, mask=here)
    tl.store(y_ptr + offsets, (x.to(tl.float32) * factor).to(tl.bfloat16), mask=here)


@triton.jit
def _product(a_ptr, b_ptr, c_ptr, SIZE: tl.constexpr):
    offsets = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    c = tl.dot(tl.load(a_ptr + offsets), tl.load(b_ptr + offsets))
    tl.store(c_ptr + offsets, c.to(tl.bfloat16))


def scale(rows: int, *, size: int = 64, offset: int = 0) -> torch.Tensor:
    x = torch.empty(rows * size + offset, dtype=torch.bfloat16, device="meta")[offset:]
    y = torch.empty_like(x)
    _scale[lambda of: (triton.cdiv(rows * size, of["BLOCK"]),)](
        x, y, rows, size, 2.0, BLOCK=1024, num_warps=device_of("x", x).arch // 20
    )
    return y


def product(num_warps: int, size: int = 128) -> None:
    a, b, c = (torch.empty(size, size, dtype=torch.bfloat16, device="meta") for _ in range(3))
    _product[(1,)](a, b, c, size, num_warps=num_warps, num_stages=2)


def specialized(launch: aot.Launch) -> list[str]:
    """Integer parameters that Triton specializes on: new values may compile while serving."""
    return [
        parameter.name
        for parameter in launch.kernel.params
        if isinstance(launch.arguments[parameter.name], int)
        and not parameter.is_constexpr
        and not parameter.do_not_specialize
    ]


def only(launches: list[aot.Launch]) -> aot.Launch:
    (launch,) = launches
    return launch


def test_a_launch_is_noted_with_what_decides_it():
    launch = only(aot.launches(lambda: scale(100), 80))
    assert launch.kernel is _scale
    assert launch.grid == (7,)
    assert launch.arguments["count"] == 100 and launch.arguments["BLOCK"] == 1024
    assert launch.options == {"num_warps": 4}
    assert specialized(launch) == ["size"]


def test_what_is_noted_ends_with_the_context():
    with aot.record(90) as noted:
        scale(1)
    with pytest.raises(ValueError, match="must be on an NVIDIA device"):
        scale(1)
    assert len(noted) == 1


def test_a_key_stands_for_a_binary():
    calls = [partial(scale, rows) for rows in (1, 2, 16, 33)]
    calls += [partial(scale, 64, size=size) for size in (1, 2, 16, 33)]  # 1, any, 16 times any
    calls += [partial(scale, 64, offset=1), partial(product, 4), partial(product, 8)]
    noted = [only(aot.launches(call, arch)) for call in calls for arch in (80, 90)]
    # Triton's cache in memory yields the same object where its own key is the same.
    binaries = [id(launch.compile()) for launch in noted]
    assert len(set(binaries)) == 2 * 6
    assert (
        len({(launch.key, binary) for launch, binary in zip(noted, binaries, strict=True)}) == 2 * 6
    )
    assert len({launch.key for launch in noted}) == 2 * 6


@pytest.mark.parametrize(("arch", "instruction"), [(80, "mma"), (90, "wgmma"), (100, "tcgen05")])
def test_resources_are_read_from_what_was_compiled(arch, instruction):
    fitting = only(aot.launches(lambda: product(4), arch)).resources()
    assert (fitting.kernel, fitting.arch, fitting.warps, fitting.stages) == ("_product", arch, 4, 2)
    assert fitting.spilled == 0 and 100 < fitting.registers <= 255
    assert 65536 <= fitting.shared < 66560
    used = [name for name in TENSOR_CORES.values() if fitting.instructions[name]]
    assert used == [instruction]


def test_a_failed_compilation_names_case_architecture_release_and_reason(monkeypatch):
    case = Case("product", "96", lambda num_rows: product(4, size=96))
    monkeypatch.setitem(CASES, case.name, case)
    with pytest.raises(RuntimeError) as raised:
        aot.measure(case.name, 90)
    first, *reasons = str(raised.value).splitlines()
    assert first == f"product, 96, sm_90, with Triton {triton.__version__} does not compile:"
    assert any("power of 2" in line for line in reasons)


def test_a_check_shows_each_step_and_ends_with_the_release(monkeypatch, capsys):
    case = CASES["norm, 4096 bf16"]
    monkeypatch.setattr(aot, "CASES", {case.name: case})
    spawning = get_context("spawn")
    monkeypatch.setattr(aot, "compilers", lambda: ProcessPoolExecutor(1, mp_context=spawning))
    summary = aot.check()
    release = f"Triton {triton.__version__}"
    steps = [
        f"{number}/3 {case.name}, sm_{arch}, with {release}"
        for number, arch in enumerate(case.archs, 1)
    ]
    assert capsys.readouterr().err.splitlines() == steps
    beginning = f"{release} compiles all 1 configurations of the kernels: 3 binaries for sm_80, "
    assert summary.startswith(beginning)
    assert summary.endswith(" s. None of them spills registers.\n")


@pytest.mark.parametrize("compile_all", [aot.check, aot.table])
def test_no_release_may_spill(compile_all, monkeypatch):
    """The check compiles every case before it fails, so that one run lists all spills."""
    cases = [
        Case("product", f"{warps} warps", lambda _, warps=warps: product(warps), archs=(90,))
        for warps in (1, 4, 2)
    ]
    monkeypatch.setattr(aot, "CASES", {case.name: case for case in cases})
    monkeypatch.setattr(aot, "compilers", lambda: ThreadPoolExecutor(1))  # which has these cases
    with pytest.raises(RuntimeError) as raised:
        compile_all()
    release = f"sm_90, with Triton {triton.__version__}"
    lines = str(raised.value).splitlines()
    assert [line.partition(" does not fit: ")[0] for line in lines] == [
        f"product, {warps} warps, {release}" for warps in (1, 2)
    ]


def test_each_supported_release_of_triton_is_compiled_with():
    """`make compile-kernels` knows the releases, and pyproject.toml the range that they span."""
    root = Path(__file__).parent.parent
    makefile, project = ((root / name).read_text() for name in ("Makefile", "pyproject.toml"))
    releases = re.search(r"^TRITONS := (.*)$", makefile, re.MULTILINE)[1].split()
    minors = [int(release.split(".")[1]) for release in releases]
    assert minors == list(range(minors[0], minors[-1] + 1))
    asked = map(Requirement, tomllib.loads(project)["project"]["optional-dependencies"]["engine"])
    (supported,) = [package.specifier for package in asked if package.name == "triton"]
    assert set(map(str, supported)) == {f">=3.{minors[0]}", f"<3.{minors[-1] + 1}"}


def test_spills_are_seen():
    # One warp for a product of 128 x 128: 512 accumulators a thread.
    assert only(aot.launches(lambda: product(1), 90)).resources().spilled > 1000


def test_narrow_loads_are_seen():
    wide = only(aot.launches(lambda: scale(1), 90)).resources()
    assert wide.instructions["ld.128"] > 0 and wide.instructions["ld.narrow"] == 0
    narrow = only(aot.launches(lambda: scale(1, offset=1), 90)).resources()
    assert narrow.instructions["ld.128"] == 0 and narrow.instructions["ld.narrow"] > 0
