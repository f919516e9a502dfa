"""`python -m moe_lora.kernels.triton.aot`: compile every kernel of every table for sm_90a, without a GPU.

Every configuration, as launched where rows are and are not multiples of 16 bytes, adding and overwriting: in
bf16 for sites of one, two and three modules, in the other dtypes for sites of two.
Prints what each became, and ends with status 1 if SGMV lost wgmma, TMA or register reallocation, or if
anything spills or exceeds the limits of an SM.
"""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from moe_lora.core.shape import Site
from moe_lora.kernels.operands import SlotTable

from . import configs, steps
from .problem import Problem
from .segments import Segments, build_segments, unsorted_rows

# What ptxas made of a kernel: registers, memory and the instructions that matter, read from a cubin.


MAX_REGISTERS = 255
MAX_SHARED_BYTES = 227 * 1024
PIPELINE = ("HGMMA", "UTMALDG", "USETMAXREG")
"""Tensor cores by warpgroup, TMA loads, register reallocation: what SGMV is made of on Hopper."""


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """Resources of one compiled kernel; bytes are per program, stack and local per thread."""

    registers: int
    shared_bytes: int
    stack_bytes: int
    local_bytes: int
    spill_instructions: int
    instructions: frozenset[str]

    def complaints(self, required: tuple[str, ...] = ()) -> list[str]:
        """What is wrong with it: lost instructions, spills, limits exceeded.  Empty if nothing is."""
        found = [f"lost {name}" for name in required if name not in self.instructions]
        if {"USETMAXREG", "LDGSTS"} <= self.instructions:
            found.append(
                "copies by pointer in a warp-specialized loop, where Triton lets nobody wait for them"
            )
        if self.stack_bytes or self.local_bytes or self.spill_instructions:
            found.append(
                f"spills ({self.stack_bytes} bytes of stack, {self.local_bytes} of local memory, "
                f"{self.spill_instructions} loads and stores)"
            )
        if self.shared_bytes > MAX_SHARED_BYTES:
            found.append(f"needs {self.shared_bytes} bytes of shared memory, an SM has {MAX_SHARED_BYTES}")
        if self.registers > MAX_REGISTERS:
            found.append(f"needs {self.registers} registers, a thread has {MAX_REGISTERS}")
        return found


def inspect(cubin: bytes, dynamic_shared_bytes: int) -> Compiled:
    """Read a cubin with the cuobjdump that Triton brings along.

    dynamic_shared_bytes: Triton's own figure (`metadata.shared`), which the cubin does not know.
    """
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, sass = (
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("--dump-resource-usage", "-sass")
        )
    return parse(usage, sass, dynamic_shared_bytes)


def parse(usage: str, sass: str, dynamic_shared_bytes: int) -> Compiled:
    """The facts in cuobjdump's two listings.  Raises ValueError if the first has none."""
    numbers = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", usage)}
    if not {"REG", "STACK", "LOCAL"} <= set(numbers):
        raise ValueError(f"cuobjdump printed no resource usage: {usage.strip()[:200]!r}")
    # An instruction follows its address comment and, perhaps, a predicate.
    opcodes = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", sass)
    return Compiled(
        registers=numbers["REG"],
        shared_bytes=dynamic_shared_bytes,
        stack_bytes=numbers["STACK"],
        local_bytes=numbers["LOCAL"],
        spill_instructions=sum(opcode in ("LDL", "STL") for opcode in opcodes),
        instructions=frozenset(opcodes),
    )


_ROWS, _RANK, _TOP_K = 2, 64, 8
_WIDTHS = {True: 1024, False: 1001}
"""Widths of a site whose rows are, or are not, multiples of 16 bytes."""
_ALL_RANKS = configs.Choice(algorithm="any")
_MODULES = {"bf16": (1, 2, 3), "fp16": (2,), "fp32": (2,)}


@dataclass(frozen=True)
class Pointer:
    """What a compilation knows of a tensor."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address


@dataclass(frozen=True, kw_only=True)
class Build:
    """One compilation: a kernel, by its module and name, and what it is launched with; see `_known`."""

    module: str
    kernel: str
    operands: tuple[Any, ...]
    meta: dict[str, Any]
    required: tuple[str, ...]
    dtype: str
    label: str


def _known(operand: Any) -> Any:
    """The operand, or the tuple of operands, with what is known of tensors in their place."""
    if isinstance(operand, torch.Tensor):
        return Pointer(operand.dtype, operand.data_ptr() % 16)
    if isinstance(operand, tuple):
        known = map(_known, operand)
        return type(operand)(*known) if hasattr(operand, "_fields") else tuple(known)
    return operand


@contextmanager
def _recorded(dtype: str = "", label: str = "") -> Iterator[list[Build]]:
    """Builds of what is launched in the context, where nothing runs."""
    found: list[Build] = []

    def record(kernel: Any, programs: int, *operands: Any, **meta: Any) -> None:
        tma = PIPELINE[:2] if meta.get("ALIGNED") else ()
        build = Build(
            module=kernel.fn.__module__,
            kernel=kernel.fn.__name__,
            operands=_known(operands),
            meta=meta,
            required=PIPELINE if meta.get("WARP_SPECIALIZE") else tma,
            dtype=dtype,
            label=label,
        )
        if build not in found:
            found.append(build)

    with patch.object(configs, "start", record):
        yield found


def table_builds() -> list[Build]:
    """Every kernel with every configuration of the tables, and the kernels that have none."""
    with _recorded() as builds:
        for top_k in (None, _TOP_K):
            _segments(top_k).tiles(64)
    for path in sorted(configs.CONFIG_DIR.glob("*.json")):
        table = configs.load_table(path.stem)
        for entry in table.entries:
            dtypes = configs.DTYPES if entry.kernel.startswith("vector") else configs.DTYPES[:2]
            for dtype in dtypes if entry.dtype is None else (entry.dtype,):
                widths = (entry.in_features or 0, entry.out_features or 0)
                phase = entry.phase or configs.PHASES[0]
                split_k = table.config("vector_shrink", dtype, phase, *widths)["split_k"]
                for modules in _MODULES[dtype]:
                    builds += config_builds(entry.kernel, entry.config, dtype, modules, split_k)
    return [build for i, build in enumerate(builds) if build not in builds[:i]]


def config_builds(kernel: str, config: configs.Config, dtype: str, modules: int, split_k: int) -> list[Build]:
    """What one configuration is launched as.

    split_k: that of `vector_shrink`, which `vector_expand` reads the parts of.
    """
    label = " ".join(f"{name}={int(value)}" for name, value in config.items())
    with configs.override(kernel, config), _recorded(dtype, label) as builds:
        for aligned in (True, False) if kernel.startswith("wgmma") else (True,):
            problem, y = _problem(dtype, modules, _WIDTHS[aligned])
            h = torch.empty(split_k, modules, _ROWS, problem.h_width)
            if kernel == "wgmma_shrink":
                steps.wgmma_shrink(problem, _ALL_RANKS)
            elif kernel == "vector_shrink":
                for walk in ("sgmv", "bgmv"):
                    steps.vector_shrink(problem, _ALL_RANKS, walk)
            else:
                for add in (True, False):
                    if kernel == "wgmma_expand":
                        steps.wgmma_expand(problem, _ALL_RANKS, h.to(y.dtype), y, add)
                    else:
                        for walk in ("sgmv", "bgmv"):
                            steps.vector_expand(problem, _ALL_RANKS, walk, h, y, add)
    return [build for build in builds if build.kernel != "cut_tiles"]


def _segments(top_k: int | None) -> Segments:
    token_slots = torch.zeros(_ROWS, dtype=torch.int32)
    ids = None if top_k is None else torch.zeros(_ROWS, top_k, dtype=torch.int32)
    return build_segments(token_slots, ids, num_slots=5, num_experts=3)


def _problem(dtype: str, modules: int, width: int) -> tuple[Problem, torch.Tensor]:
    """Operands of a dense site of so many modules, and its output."""
    of_model = next(one for one, name in configs.DTYPE_NAMES.items() if name == dtype)
    site = Site(
        name="aot",
        modules=("module",) * modules,
        in_features=width,
        out_features=(width,) * modules,
        num_experts=0,
        entry_base=0,
    )
    problem = Problem(
        x=torch.empty(_ROWS, width, dtype=of_model),
        site=site,
        layer=0,
        slots=SlotTable(1, 1, modules, torch.device("cpu")),
        arena=torch.empty(1 << 40, dtype=torch.uint8, device="meta"),
        segments=unsorted_rows(torch.zeros(_ROWS, dtype=torch.int32), None, num_slots=1, num_experts=0),
        decode=True,
        max_lora_rank=_RANK,
        padded_rank=_RANK,
    )
    skipped = width % 16  # an output of odd rows begins anywhere
    return problem, torch.empty(_ROWS, skipped + modules * width, dtype=of_model)[:, skipped:]


class _Hopper:
    """What Triton asks of a driver before it compiles, answered for sm_90a; the device is nobody's."""

    def get_current_device(self) -> str:
        return "sm_90a"

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


def compile_build(build: Build) -> Compiled:
    """Compile for sm_90a what a launch would, and read the machine code.

    In a process that launches nothing: Triton compiles for sm_90a from then on.
    """
    from triton.runtime.driver import driver

    function = getattr(importlib.import_module(build.module), build.kernel)
    driver.set_active(_Hopper())
    compiled = function.warmup(*build.operands, grid=(1,), **build.meta)
    return inspect(compiled.asm["cubin"], compiled.metadata.shared)


def line(build: Build, compiled: Compiled) -> str:
    """One row of the printed table."""
    variant = [name.lower() for name in ("ALIGNED", "ADD", "PADDED", "HAS_IDS") if build.meta.get(name)]
    variant += [f"{build.meta['MODULES']}m"] if "MODULES" in build.meta else []
    marks = " ".join(f"{name if name in compiled.instructions else '-':<11}" for name in PIPELINE)
    return (
        f"{build.kernel:<14}{build.dtype:<5}{compiled.registers:>4}{compiled.shared_bytes:>8}"
        f"{compiled.stack_bytes:>6}{compiled.local_bytes:>6}{compiled.spill_instructions:>7}  {marks}"
        f"{'+'.join(variant) or '-':<16}{build.label}"
    )


def check(builds: list[Build], processes: int = 2) -> list[str]:
    """Compile all, print the table as results come in, return what is wrong."""
    wanted = " ".join(f"{name:<11}" for name in PIPELINE)
    header = (
        f"{'kernel':<14}{'type':<5}{'regs':>4}{'shared':>8}{'stack':>6}{'local':>6}{'spills':>7}  {wanted}"
    )
    print(f"{'':9}{header}{'variant':<16}config")
    wrong: list[str] = []
    with ProcessPoolExecutor(processes) as pool:
        running = {pool.submit(compile_build, build): build for build in builds}
        for number, done in enumerate(as_completed(running), 1):
            build = running[done]
            if done.exception() is not None:
                found = [f"does not compile: {done.exception()}"]
                row = f"{build.kernel:<14}{build.dtype:<5} does not compile"
            else:
                found, row = done.result().complaints(build.required), line(build, done.result())
            print(f"[{number:>3}/{len(builds)}]{' !' if found else '  '}{row.rstrip()}"[:220], flush=True)
            wrong += [f"{build.kernel} {build.dtype} {build.label}: {complaint}" for complaint in found]
    return wrong


def main() -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2, help="compilations at a time (default 2)")
    parser.add_argument(
        "--space", metavar="KERNEL", help="compile this kernel's whole space instead, in bf16"
    )
    arguments = parser.parse_args()
    builds = table_builds()
    if arguments.space:
        kernel, table = arguments.space, configs.load_table(configs.FALLBACK)
        split_of_default = table.config("vector_shrink", "bf16", "decode", 0, 0)["split_k"]
        builds = [
            build
            for config in configs.config_space(kernel)
            for build in config_builds(kernel, config, "bf16", 2, split_of_default)
        ]
    wrong = check(builds, arguments.processes)
    if wrong:
        print(
            f"\n{len(wrong)} of {len(builds)} kernels are not what they should be:",
            *wrong,
            sep="\n  ",
            file=sys.stderr,
        )
        return 1
    print(f"\n{len(builds)} kernels compile for sm_90a without spills; SGMV has {', '.join(PIPELINE)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
