# SPDX-License-Identifier: Apache-2.0
"""Compiles kernels for sm_90a without a GPU, and prints and judges the results."""

from __future__ import annotations

import gc
import importlib
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TYPE_CHECKING, Any

from .sass import MARKS, Compiled, inspect

if TYPE_CHECKING:
    from .aot import Build


class _Hopper:
    """Triton's driver answers for sm_90a; no real device."""

    def get_current_device(self) -> str:
        return "sm_90a"

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


def leave_in_cache(build: Build) -> None:
    """Fill Triton's cache with a launch's code for sm_90a.

    For a process without launches: Triton compiles for sm_90a from then on.
    """
    _compiled(build)


def _compiled(build: Build) -> Any:
    from triton.runtime.driver import driver

    from moe_lora.kernels.triton.configs import OPTIONS

    function = getattr(importlib.import_module(build.module), build.kernel)
    driver.set_active(_Hopper())
    return function.warmup(*build.operands, grid=(1,), **build.meta, **OPTIONS)


def compile_build(build: Build) -> Compiled:
    """As `leave_in_cache`, and read the machine code."""
    compiled = _compiled(build)
    return inspect(
        compiled.asm["cubin"],
        compiled.metadata.shared,
        compiled.asm["ttgir"],
        32 * compiled.metadata.num_warps,
    )


def line(build: Build, compiled: Compiled) -> str:
    """One row of the printed table."""
    variant = [name.lower() for name, on in build.meta.items() if on is True]
    variant += [str(build.meta[name]) for name in ("MODULES", "NAME", "GROUP") if name in build.meta]
    variant += [f"{build.meta['BLOCK_T']}t"] if "GATED" in build.meta else []
    marks = " ".join(f"{name if name in compiled.instructions else '-':<11}" for name in MARKS)
    in_flight = compiled.in_flight_per_sm(build.programs_per_sm) // 1024
    return (
        f"{build.kernel:<14}{build.dtype:<5}{compiled.registers:>4}{compiled.shared_bytes:>8}"
        f"{compiled.stack_bytes:>6}{compiled.local_bytes:>6}{compiled.spill_instructions:>7}{in_flight:>6}"
        f"  {marks}{'+'.join(variant) or '-':<16}{build.label}"
    )


def check(builds: list[Build], processes: int = 2) -> list[str]:
    """Compile all, print the table on arrival, return faults."""
    wanted = " ".join(f"{name:<11}" for name in MARKS)
    header = (
        f"{'kernel':<14}{'type':<5}{'regs':>4}{'shared':>8}{'stack':>6}{'local':>6}{'spills':>7}{'KB/SM':>6}"
        f"  {wanted}"
    )
    print(f"{'':9}{header}{'variant':<16}config")
    wrong: list[str] = []
    # Workers are forks: collecting this process's process group would wait for its threads.
    gc.collect()
    with ProcessPoolExecutor(processes, initializer=gc.disable) as pool:
        running = {pool.submit(compile_build, build): build for build in builds}
        for number, done in enumerate(as_completed(running), 1):
            build = running[done]
            if done.exception() is not None:
                found = [f"does not compile: {done.exception()}"]
                row = f"{build.kernel:<14}{build.dtype:<5} does not compile"
            else:
                compiled = done.result()
                found = compiled.complaints(build.required, build.rings, build.meta.get("DEPENDENT", False))
                row = line(build, compiled)
            print(f"[{number:>3}/{len(builds)}]{' !' if found else '  '}{row.rstrip()}"[:220], flush=True)
            wrong += [f"{build.kernel} {build.dtype} {build.label}: {complaint}" for complaint in found]
    return wrong
