"""What ptxas made of a kernel: registers, memory and the instructions that matter, read from a cubin."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

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
