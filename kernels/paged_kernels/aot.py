"""Ahead-of-time compilation of the kernels, without a GPU, exactly as a launch would compile them.

Inside `record`, the public wrappers accept tensors on the "meta" device, and their launches are
recorded instead of executed. Triton's own just-in-time path then compiles each recorded launch,
with a substitute for the current device, so no signature is written by hand.

``python -m paged_kernels.aot`` compiles the catalog and prints the table in COMPILED.md. With
``--check`` it prints no table: ``make compile-kernels`` calls it so with each release of Triton.
Either way it fails if a binary spills registers or needs more shared memory than a device has.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from paged_kernels.catalogue import CASES
from paged_kernels.device import INTERPRETED, Device, pretend

DEVICES = {80: Device(80, 108), 90: Device(90, 132), 100: Device(100, 148)}
"""Target devices by architecture: A100, H100 and H200, B200."""

SHARED_LIMITS = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Maximum shared memory of one program on each architecture, in bytes."""

# A multiprocessor has these bytes more than one program may use, and each program takes as many.
_SHARED_RESERVED = 1 << 10
_REGISTERS = 1 << 14  # registers of each of the four parts of a multiprocessor

SIZES = (1, 2, 4, 7, 8, 15, 16, 17, 33, 64, 255, 256, 1000, 4096)
"""Numbers of tokens, sequences or blocks to call cases with. They cover each kind of size that
launches may distinguish (1, multiples of 16, others) and both sides of every limit."""

INSTRUCTIONS = {
    "tcgen05": r"\btcgen05\.mma\.",
    "wgmma": r"\bwgmma\.mma_async\.",
    "mma": r"\bmma\.sync\.",
    "cp.async": r"\bcp\.async\.c[ag]\.",
    "ld.128": r"\bld\.global\S*\.(?:v4\.b32|v2\.b64)\b",
    "pdl": r"\bgriddepcontrol\.wait\b",
    "ld.narrow": r"\bld\.global(?!\S*\.v[248]\.)\S*\.[bus](?:8|16)\b",
}
"""Patterns of instructions to count in the PTX: matrix products by tensor-core generation,
asynchronous copies to shared memory, 16-byte loads, waits for the launch before (programmatic
dependent launch), and loads of a single 1- or 2-byte element."""

Key = tuple[object, ...]

_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@dataclass(frozen=True, slots=True)
class Resources:
    """Resource usage and instruction counts of one compiled kernel."""

    kernel: str
    arch: int
    warps: int
    stages: int
    registers: int  # per thread
    spilled: int  # bytes of local memory per thread; kernels use it only for spills
    shared: int  # bytes per program
    instructions: dict[str, int]  # occurrences in the PTX, by the names in INSTRUCTIONS

    @property
    def programs_per_sm(self) -> int:
        """Number of programs that a multiprocessor has registers and shared memory for."""
        registers_per_warp = 32 * 8 * -(-self.registers // 8)
        warps = 4 * (_REGISTERS // registers_per_warp)
        shared = SHARED_LIMITS[self.arch] + _SHARED_RESERVED
        return min(warps // self.warps, shared // (self.shared + _SHARED_RESERVED))

    @property
    def fits(self) -> bool:
        """True if nothing is spilled and a program has the shared memory that it needs."""
        return self.spilled == 0 and self.shared <= SHARED_LIMITS[self.arch]


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch that was recorded instead of executed."""

    kernel: Any  # the JITFunction
    arch: int
    grid: tuple[int, ...]
    arguments: dict[str, Any]  # kernel arguments by parameter name
    options: dict[str, Any]  # launch options: num_warps, num_stages
    specialization: tuple[tuple[str, str], ...]  # (parameter, Triton's specialization)

    @property
    def key(self) -> Key:
        """A key that two launches share exactly if one binary serves both."""
        return self.kernel.__name__, self.arch, self.specialization, *sorted(self.options.items())

    def compile(self) -> Any:
        """Compile as a launch would, via Triton's disk cache, and return its `CompiledKernel`."""
        with _current(self.arch):
            return self.kernel.run(grid=self.grid, warmup=True, **self.arguments, **self.options)

    def resources(self) -> Resources:
        """Compile the launch and return the resources of the binary."""
        compiled = self.compile()
        usage = _usage(compiled.asm["cubin"])
        ptx = compiled.asm["ptx"]
        return Resources(
            kernel=self.kernel.__name__,
            arch=self.arch,
            warps=compiled.metadata.num_warps,
            stages=compiled.metadata.num_stages,
            registers=usage["REG"],
            spilled=usage["STACK"] + usage["LOCAL"],
            shared=compiled.metadata.shared,
            instructions={name: len(re.findall(p, ptx)) for name, p in INSTRUCTIONS.items()},
        )


@contextmanager
def record(arch: int) -> Iterator[list[Launch]]:
    """Record launches, chosen for a device of an architecture, instead of executing them.

    Raises:
        RuntimeError: this process interprets kernels, so it has nothing to compile.
    """
    if INTERPRETED:
        raise RuntimeError("unset TRITON_INTERPRET to compile kernels")
    launches: list[Launch] = []

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append(_bound(kernel, arch, grid, args, kwargs))

    with pretend(DEVICES[arch]), _swapped(JITFunction, "run", note):
        yield launches


def launches(call: Callable[[], object], arch: int) -> list[Launch]:
    """Return the launches of a wrapper call on an architecture."""
    with record(arch) as noted:
        call()
    return noted


def _bound(kernel: Any, arch: int, grid: Any, args: Any, kwargs: Any) -> Launch:
    with _current(arch):
        *_, bind = kernel.device_caches[arch]
    arguments, specialization, options = bind(*args, **kwargs)
    if callable(grid):
        grid = grid(arguments)
    seen = tuple(zip(arguments, map(str, specialization), strict=True))
    return Launch(kernel, arch, tuple(grid), arguments, options, seen)


@dataclass(frozen=True)
class _Driver:
    """The part of a Triton driver that the just-in-time path uses before a launch."""

    arch: int

    def get_current_device(self) -> int:
        return self.arch  # the key of the kernel cache; no real device has such an index

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)


def _current(arch: int) -> Any:
    return _swapped(driver, "_active", _Driver(arch))


@contextmanager
def _swapped(owner: Any, name: str, value: object) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _usage(cubin: bytes) -> dict[str, int]:
    """Return the registers and bytes of a binary's only kernel, by cuobjdump's names."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_CUOBJDUMP), "-res-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (line,) = re.findall(r"REG:.*", text)
    return {name: int(count) for name, count in re.findall(r"(\w+):(\d+)", line)}


def binaries(case: str, arch: int) -> dict[Key, Launch]:
    """Return one launch for each binary that a catalog case needs at any batch size."""
    noted = [launches(partial(CASES[case].call, size), arch) for size in SIZES]
    return {launch.key: launch for each in noted for launch in each}


def measure(case: str, arch: int) -> dict[Key, Resources]:
    """Compile every binary that a catalog case needs.

    Raises:
        RuntimeError: compilation failed. The message names the case, the architecture, the release
            of Triton and the reasons. They are included as text because, unlike some compiler
            exceptions, text survives the return from a worker process.
    """
    try:
        return {key: launch.resources() for key, launch in binaries(case, arch).items()}
    except Exception as error:
        reasons = "".join(traceback.format_exception(error, limit=0))
        raise RuntimeError(f"{_described(case, arch)} does not compile:\n{reasons}") from error


def _described(case: str, arch: int) -> str:
    return f"{case}, sm_{arch}, with Triton {triton.__version__}"


def sources_digest() -> str:
    """Return a digest of the code of the kernels, without comments and docstrings.

    The table in COMPILED.md has it, so that a test knows whether the table is of these kernels.
    """
    digest, root = hashlib.sha256(), Path(__file__).parent
    for path in sorted([*root.glob("*.py"), *root.glob("tuning/*.py")]):
        digest.update(path.relative_to(root).as_posix().encode())
        for node in ast.walk(_WithoutTexts().visit(ast.parse(path.read_text()))):
            # Not ast.dump, which differs between versions of Python.
            values = [value for _, value in ast.iter_fields(node) if isinstance(value, _ATOMS)]
            digest.update(f"{type(node).__name__}{values}".encode())
    return digest.hexdigest()[:16]


_ATOMS = (str, bytes, int, float)


class _WithoutTexts(ast.NodeTransformer):
    """Removes strings that are statements: docstrings, and descriptions of constants."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_text else node


def compilers() -> ProcessPoolExecutor:
    """Return a pool of two processes for `measure`; each compilation uses one core."""
    return ProcessPoolExecutor(2, mp_context=get_context("spawn"))


def compile_catalog() -> Iterator[tuple[str, dict[Key, Resources]]]:
    """Compile the catalog for all architectures, and write each step to the standard error.

    Yields:
        The name of a case, and its binaries for one architecture.

    Raises:
        RuntimeError: compilation failed, or, after all cases, binaries do not fit their devices.
    """
    asked = [(case.name, arch) for case in CASES.values() for arch in case.archs]
    unfit: dict[Key, str] = {}
    with compilers() as pool:
        found = pool.map(measure, *zip(*asked, strict=True))
        for number, ((case, arch), measured) in enumerate(zip(asked, found, strict=True), 1):
            print(f"{number}/{len(asked)} {_described(case, arch)}", file=sys.stderr, flush=True)
            for key, resources in measured.items():
                if not resources.fits:
                    unfit.setdefault(key, f"{_described(case, arch)} does not fit: {resources}")
            yield case, measured
    if unfit:
        raise RuntimeError("\n".join(unfit.values()))


def check() -> str:
    """Compile the catalog and return a line that says so.

    Raises:
        RuntimeError: compilation failed, or binaries do not fit their devices.
    """
    started = time.monotonic()
    compiled: set[Key] = set()
    for _, measured in compile_catalog():
        compiled.update(measured)
    seconds = time.monotonic() - started
    return (
        f"Triton {triton.__version__} compiles all {len(CASES)} configurations of the kernels: "
        f"{len(compiled)} binaries for {', '.join(f'sm_{arch}' for arch in DEVICES)} "
        f"in {seconds:.0f} s. None of them spills registers.\n"
    )


def table() -> str:
    """Compile the catalog and return it as Markdown; a binary is listed at its first use.

    Raises:
        RuntimeError: compilation failed, or binaries do not fit their devices.
    """
    rows: dict[Key, str] = {}
    for case, measured in compile_catalog():
        for key, resources in measured.items():
            rows.setdefault(key, row(case, resources))
    return "\n".join([*_header(), *rows.values(), ""])


def _header() -> tuple[str, ...]:
    return (
        "# What the compiler makes of the kernels",
        "",
        f"Written by `python -m paged_kernels.aot --write FILE` with Triton {triton.__version__}.",
        f"The digest of the sources is {sources_digest()}.",
        "Registers and spilled bytes are those of a thread, shared memory is that of a program,",
        "instructions are counted in the PTX. A binary that serves several configurations is",
        "listed under the first of them.",
        "",
        "| kernel | configuration | sm | warps | stages | registers | spilled B | shared KiB "
        "| instructions |",
        "|---|---|--:|--:|--:|--:|--:|--:|---|",
    )


def row(case: str, found: Resources) -> str:
    """Return a row of the table."""
    counts = ", ".join(f"{count} {name}" for name, count in found.instructions.items() if count)
    cells = (
        f"`{found.kernel}`",
        case,
        found.arch,
        found.warps,
        found.stages,
        found.registers,
        found.spilled,
        f"{found.shared / 1024:.1f}",
        counts,
    )
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m paged_kernels.aot",
        description="Compile every kernel and tell what the compiler makes of it.",
    )
    parser.add_argument("--write", metavar="FILE", type=Path, help="write there, not to the screen")
    parser.add_argument(
        "--check", action="store_true", help="no table: only say whether all compiles and fits"
    )
    arguments = parser.parse_args()
    try:
        text = check() if arguments.check else table()
    except RuntimeError as error:
        parser.exit(1, f"{error}\n")
    if arguments.write is None:
        print(text, end="")
    else:
        arguments.write.write_text(text)


if __name__ == "__main__":
    main()
