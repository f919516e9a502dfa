# SPDX-License-Identifier: Apache-2.0
"""Compiles the NVSHMEM kernels for sm_90a without a GPU; prints a line per kernel. Run by test_nvshmem."""

import torch.utils._triton
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

torch.utils._triton.has_triton = lambda: True  # torch hides the device functions where there is no GPU

from moe_lora.dist.transport import nvshmem_kernels as kernels  # noqa: E402

_PIECE = ("*u8", "i64")
_ROWS = ("*u8", "i64", "i32", "*i32", "*i32", "i32", "i32", "i32", *("*i64",) * 4, "i32")
SIGNATURES = {
    "put_pieces": (*_PIECE, *_PIECE, "*i64", "i32"),
    "put_rows": (*_ROWS, "*i64", "*i64", "i32"),
}
CONSTANTS = {"put_rows": {"HAS_IDS": True}}

for name, types in SIGNATURES.items():
    decorated = getattr(kernels, name)
    function = decorated.jit_func
    constants = CONSTANTS.get(name, {})
    types_of = dict(zip(function.arg_names, types, strict=False)) | dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=function, signature=types_of, constexprs=constants)
    libraries = tuple(decorated.extern_libs.items())
    compiled = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1, "extern_libs": libraries}
    )
    print(name, len(compiled.asm["cubin"]) > 0, "nvshmem" in compiled.asm["ptx"])
