"""`python -m moe_lora.kernels.triton.aot`: compile every kernel of every table for sm_90a, without a GPU.

Every configuration, as launched where rows are and are not multiples of 16 bytes, adding and overwriting: in
bf16 for sites of one, two and three modules, in the other dtypes for sites of two.
Prints what each became, and ends with status 1 if SGMV lost wgmma, TMA or register reallocation, or if
anything spills or exceeds the limits of an SM.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .configs import (
    CONFIG_DIR,
    DTYPES,
    FALLBACK,
    PHASES,
    Config,
    ConfigEntry,
    ConfigTable,
    config_space,
    kernels,
    load_table,
)
from .steps import pipeline

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


_POINTERS = {
    **dict.fromkeys(
        ("rows", "tiles", "num_tiles", "described", "count", "lora_rank", "token_slots", "ids"), "*i32"
    ),
    **dict.fromkeys(("a_offset", "b_offset"), "*i64"),
    **dict.fromkeys(("scales", "partial"), "*fp32"),
    "arena": "*u8",
    "arena_bytes": "i64",
}
_ALIGNED = {
    *("x", "y", "h", "arena", "partial", "width", "width0", "width1", "width2"),
    *("x_stride", "y_stride", "h_width"),
}
_MODULES = {"bf16": (1, 2, 3), "fp16": (2,), "fp32": (2,)}


@dataclass(frozen=True, kw_only=True)
class Build:
    """One compilation: a kernel of a module, types of its pointers, constants, options."""

    module: str
    kernel: str
    dtype: str
    constants: dict[str, Any]
    types: dict[str, str] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    required: tuple[str, ...] = ()
    label: str = ""


def table_builds() -> list[Build]:
    """Every kernel with every configuration of the tables, and the kernels that have none."""
    builds = [
        Build(module="segment_kernels", kernel="sort_rows", dtype="", num_warps=8, constants=constants)
        for constants in (
            {"TOP_K": 1, "HAS_IDS": False, "BLOCK": 64, "BLOCK_OTHER": 128},
            {"TOP_K": 8, "HAS_IDS": True, "BLOCK": 64, "BLOCK_OTHER": 128},
        )
    ]
    builds.append(
        Build(module="segment_kernels", kernel="cut_tiles", dtype="", num_warps=8, constants={"BLOCK": 1024})
    )
    for path in sorted(CONFIG_DIR.glob("*.json")):
        table = load_table(path.stem)
        for entry in table.entries:
            dtypes = DTYPES if entry.kernel.startswith("vector") else DTYPES[:2]
            for dtype in dtypes if entry.dtype is None else (entry.dtype,):
                split_k = _split_of(table, entry, dtype)
                for modules in _MODULES[dtype]:
                    builds += config_builds(entry.kernel, entry.config, dtype, modules, split_k)
    return [build for i, build in enumerate(builds) if build not in builds[:i]]


def _split_of(table: ConfigTable, entry: ConfigEntry, dtype: str) -> int:
    """Parts of h that `vector_expand` meets where the entry applies."""
    widths = (entry.in_features or 0, entry.out_features or 0)
    return table.config("vector_shrink", dtype, entry.phase or PHASES[0], *widths)["split_k"]


def config_builds(kernel: str, config: Config, dtype: str, modules: int, split_k: int) -> list[Build]:
    """What one configuration is launched as: variants that differ in constants.

    split_k: that of `vector_shrink`, which `vector_expand` reads the parts of.
    """
    common = {"MODULES": modules, "STAGES": config["num_stages"]}
    label = " ".join(f"{name}={int(value)}" for name, value in config.items())
    made: list[Build] = []

    def add(module: str, kernel: str, constants: dict[str, Any], **more: Any) -> None:
        options = {"num_warps": config["num_warps"], "num_stages": config["num_stages"], **more}
        made.append(
            Build(module=module, kernel=kernel, dtype=dtype, constants=constants, label=label, **options)
        )

    if kernel.startswith("wgmma"):
        for aligned, adds in ((True, True), (True, False), (False, True), (False, False)):
            if adds and kernel == "wgmma_shrink":
                continue
            launched = pipeline(config, aligned, overwrites=not adds)
            required = PIPELINE if launched["warp_specialize"] else PIPELINE[:2] if aligned else ()
            constants = {
                **{**common, **_blocks(launched), "STAGES": launched["num_stages"]},
                **{"INTERPRETED": False, "ALIGNED": aligned},
                "WARP_SPECIALIZE": launched["warp_specialize"],
            }
            more = {name: launched[name] for name in ("num_warps", "num_stages")} | {"required": required}
            if kernel == "wgmma_expand":
                add(kernel, kernel, {**constants, "ADD": adds}, **more)
            elif config["split_k"] > 1:
                add(kernel, kernel, {**constants, "PARTS": 1}, types={"h": "*fp32"}, **more)
            else:
                add(kernel, kernel, {**constants, "PARTS": 2}, **more)
        if config.get("split_k", 1) > 1:
            sizes = {"BLOCK_T": config["block_t"], "SPLIT_K": config["split_k"]}
            add(
                "wgmma_shrink",
                "join_splits",
                {"MODULES": modules, "INTERPRETED": False, **sizes},
                num_warps=4,
            )
    elif kernel.startswith("vector"):
        for padded, adds in ((False, True), (False, False), (True, True), (True, False)):
            own = {"ADD": adds, "SPLIT_K": split_k, "INTERPRETED": False}
            if kernel == "vector_shrink":
                if adds:
                    continue
                own = {"X_DIVISOR": 1}
            constants = {**common, **_blocks(config), **own, "PADDED": padded}
            add("vector", kernel, constants, types={"h": "*fp32"})
    else:
        constants = {**common, **_blocks(config), "INTERPRETED": False, "X_DIVISOR": 1}
        add("fused", kernel, constants)
    return made


def _blocks(config: Config) -> dict[str, Any]:
    """The sizes that kernels take as constants, under their names there."""
    return {
        name.upper(): value for name, value in config.items() if name.startswith(("block", "split", "column"))
    }


def compile_build(build: Build) -> Compiled:
    """Compile for sm_90a, with sizes and addresses taken to be multiples of 16, and read the machine code."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(kernels(build.module), build.kernel)
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, parameter in enumerate(function.params):
        name = parameter.name
        if parameter.is_constexpr:
            signature[name], constants[(index,)] = "constexpr", build.constants[name]
            continue
        of_model = name in ("x", "y", "h")
        signature[name] = build.types.get(name, f"*{build.dtype}" if of_model else _POINTERS.get(name, "i32"))
        aligned = name in _ALIGNED and build.constants.get("ALIGNED", True)
        free = parameter.do_not_specialize or parameter.do_not_specialize_on_alignment
        if (aligned and not free) or name == "arena":
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": build.num_warps, "num_stages": build.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return inspect(compiled.asm["cubin"], compiled.metadata.shared)


def line(build: Build, compiled: Compiled) -> str:
    """One row of the printed table."""
    variant = [name.lower() for name in ("ALIGNED", "ADD", "PADDED", "HAS_IDS") if build.constants.get(name)]
    variant += [f"{build.constants['MODULES']}m"] if "MODULES" in build.constants else []
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
        kernel = arguments.space
        split_of_default = load_table(FALLBACK).config("vector_shrink", "bf16", PHASES[0], 0, 0)["split_k"]
        builds = [
            build
            for config in config_space(kernel)
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
