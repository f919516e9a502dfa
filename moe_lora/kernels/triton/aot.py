"""`python -m moe_lora.kernels.triton.aot`: compile every kernel of every table for sm_90a, without a GPU.

Every configuration, as launched where rows are and are not multiples of 16 bytes, adding and overwriting: in
bf16 for sites of one, two and three modules, in the other dtypes for sites of two.
Prints what each became, and ends with status 1 if SGMV lost wgmma, TMA or register reallocation, or if
anything spills or exceeds the limits of an SM.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

from .configs import CONFIG_DIR, DTYPES, FALLBACK, PHASES, Config, Entry, Table, config_space, load_table
from .launch import kernels
from .sass import PIPELINE, Compiled, inspect
from .steps import pipeline

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


def _split_of(table: Table, entry: Entry, dtype: str) -> int:
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
