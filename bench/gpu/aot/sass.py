# SPDX-License-Identifier: Apache-2.0
"""ptxas's result for a kernel: registers, memory and important instructions, from a cubin."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

MAX_REGISTERS = 255
MAX_SHARED_BYTES = 227 * 1024
MARKS = TENSOR_CORES, COPIES, TMA = "HGMMA", "LDGSTS.128", "UTMALDG"
"""Products by warpgroup, 16-byte copies into shared memory, and TMA copies: SGMV's parts on Hopper."""
WAIT = "ACQBULK"
"""Wait for the previous kernel of the stream, after an early start."""
_GLOBAL = {"LD", "LDG", "LDGSTS", "ST", "STG", "ATOM", "ATOMG", "RED", "REDG", "UBLKCP", "UTMALDG", "UTMASTG"}
_SM_SHARED_BYTES, _SM_REGISTERS, _RESERVED_BYTES = 228 * 1024, 65536, 1024
_BITS = {"f32": 32, "i32": 32, "bf16": 16, "f16": 16, "i8": 8, "f8E4M3FN": 8}


class Ring(NamedTuple):
    """Buffers that a loop fills while computing on one of them.  bits: of an element."""

    buffers: int
    rows: int
    columns: int
    bits: int


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """Resources of one compiled kernel; bytes are per program, stack and local per thread.

    waits_first: waits before any access to global memory.
    """

    registers: int
    shared_bytes: int
    stack_bytes: int
    local_bytes: int
    spill_instructions: int
    instructions: frozenset[str]
    waits_first: bool = False
    rings: tuple[Ring, ...] = ()
    threads: int = 128

    @property
    def bytes_in_flight(self) -> int:
        """Bytes in flight in loops: of each ring, all buffers but the current one."""
        return sum((ring.buffers - 1) * ring.rows * ring.columns * ring.bits // 8 for ring in self.rings)

    def in_flight_per_sm(self, programs: int) -> int:
        """Bytes in flight to an SM, with `programs` programs or as many as fit."""
        by_shared = _SM_SHARED_BYTES // (self.shared_bytes + _RESERVED_BYTES)
        by_registers = _SM_REGISTERS // (-(-max(self.registers, 1) // 8) * 8 * self.threads)
        return min(programs, by_shared, by_registers) * self.bytes_in_flight

    def complaints(
        self,
        required: tuple[str, ...] = (),
        rings: tuple[tuple[int, int, int], ...] = (),
        dependent: bool = False,
    ) -> list[str]:
        """Faults: lost instructions or buffers, spills, exceeded limits, a dependent kernel's late wait.
        Empty if fine.
        """
        found = [f"lost {name}" for name in required if name not in self.instructions]
        if dependent and not self.waits_first:
            found.append("touches memory before it has waited for the kernel before it")
        lost = Counter(rings) - Counter(ring[:3] for ring in self.rings)
        found += [f"lost {number} buffers of {rows} x {columns}" for number, rows, columns in lost.elements()]
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
    """Read a cubin with Triton's cuobjdump.

    dynamic_shared_bytes: Triton's figure (`metadata.shared`), not in the cubin.  ttgir: Triton's last form of
    the kernel before LLVM's, with the loops' buffers.
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
    return replace(parse(usage, sass, dynamic_shared_bytes), rings=rings_of(ttgir), threads=threads)


def rings_of(ttgir: str) -> tuple[Ring, ...]:
    """The rings of two-dimensional buffers in a kernel's loops."""
    found = re.findall(r"local_alloc[^:]*: \(\) -> !ttg\.memdesc<(\d+)x(\d+)x(\d+)x([a-zA-Z]\w*),", ttgir)
    return tuple(
        Ring(int(buffers), int(rows), int(columns), _BITS[kind])
        for buffers, rows, columns, kind in found
        if kind in _BITS
    )


def parse(usage: str, sass: str, dynamic_shared_bytes: int) -> Compiled:
    """The facts in cuobjdump's two listings.  Raises ValueError if the first has none."""
    numbers = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", usage)}
    if not {"REG", "STACK", "LOCAL"} <= set(numbers):
        raise ValueError(f"cuobjdump printed no resource usage: {usage.strip()[:200]!r}")
    # An instruction follows its address comment and, perhaps, a predicate.
    opcodes = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", sass)
    deciding = [opcode for opcode in opcodes if opcode in _GLOBAL | {WAIT}]
    return Compiled(
        registers=numbers["REG"],
        shared_bytes=dynamic_shared_bytes,
        stack_bytes=numbers["STACK"],
        local_bytes=numbers["LOCAL"],
        spill_instructions=sum(opcode in ("LDL", "STL") for opcode in opcodes),
        waits_first=deciding[:1] == [WAIT],
        instructions=frozenset(opcodes) | {COPIES for _ in re.findall(r"\bLDGSTS\.[\w.]*\b128\b", sass)[:1]},
    )
