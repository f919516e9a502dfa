"""What ptxas made of a kernel: registers, memory and the instructions that matter, read from a cubin."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

MAX_REGISTERS = 255
MAX_SHARED_BYTES = 227 * 1024
MARKS = TENSOR_CORES, COPIES, TMA = "HGMMA", "LDGSTS.128", "UTMALDG"
"""Products by warpgroup, 16-byte copies into shared memory, those by TMA: what SGMV is made of on Hopper."""
_SM_SHARED_BYTES, _SM_REGISTERS, _RESERVED_BYTES = 228 * 1024, 65536, 1024
_BITS = {"f32": 32, "i32": 32, "bf16": 16, "f16": 16, "i8": 8, "f8E4M3FN": 8}


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """Resources of one compiled kernel; bytes are per program, stack and local per thread."""

    registers: int
    shared_bytes: int
    stack_bytes: int
    local_bytes: int
    spill_instructions: int
    instructions: frozenset[str]
    bytes_in_flight: int = 0
    threads: int = 128

    def in_flight_per_sm(self, programs: int) -> int:
        """Bytes that loops keep on their way to an SM, with so many programs on it or as many as fit."""
        by_shared = _SM_SHARED_BYTES // (self.shared_bytes + _RESERVED_BYTES)
        by_registers = _SM_REGISTERS // (-(-max(self.registers, 1) // 8) * 8 * self.threads)
        return min(programs, by_shared, by_registers) * self.bytes_in_flight

    def complaints(self, required: tuple[str, ...] = (), bytes_in_flight: int = 0) -> list[str]:
        """What is wrong with it: lost instructions or buffers, spills, limits exceeded.  Empty if nothing
        is."""
        found = [f"lost {name}" for name in required if name not in self.instructions]
        if self.bytes_in_flight < bytes_in_flight:
            found.append(f"keeps {self.bytes_in_flight} bytes in flight instead of {bytes_in_flight}")
        if "USETMAXREG" in self.instructions:
            found.append(
                "is warp-specialized: Triton waits there for no copy by pointer, and writes tensor maps anew "
                "while loads may still read them"
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


def inspect(cubin: bytes, dynamic_shared_bytes: int, ttgir: str = "", threads: int = 128) -> Compiled:
    """Read a cubin with the cuobjdump that Triton brings along.

    dynamic_shared_bytes: Triton's own figure (`metadata.shared`), which the cubin does not know.  ttgir:
    Triton's last form of the kernel before LLVM's, which has the loops' buffers.
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
    return replace(
        parse(usage, sass, dynamic_shared_bytes), bytes_in_flight=staged_bytes(ttgir), threads=threads
    )


def staged_bytes(ttgir: str) -> int:
    """Bytes that loops keep on their way: of each ring of buffers, all but the one that is computed on."""
    rings = re.findall(r"local_alloc[^:]*: \(\) -> !ttg\.memdesc<(\d+)x([\dx]+)x([a-zA-Z]\w*),", ttgir)
    return sum(
        (int(ring) - 1) * prod(map(int, shape.split("x"))) * _BITS[kind] // 8
        for ring, shape, kind in rings
        if kind in _BITS and "x" in shape
    )


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
        instructions=frozenset(opcodes) | {COPIES for _ in re.findall(r"\bLDGSTS\.[\w.]*\b128\b", sass)[:1]},
    )
