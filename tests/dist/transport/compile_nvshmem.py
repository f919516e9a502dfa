"""Compiles the NVSHMEM kernels for sm_90a without a GPU; prints a line per kernel. Run by test_nvshmem."""

import torch.utils._triton
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

torch.utils._triton.has_triton = lambda: True  # torch hides the device functions where there is no GPU

from moe_lora.dist.transport import nvshmem_kernels as kernels  # noqa: E402

SIGNATURES = {
    "put_signal_kernel": ("*u8", "*u8", "i64", "*i64", "i64", "i32"),
    "signal_kernel": ("*i64", "i64", "i32"),
    "wait_kernel": ("*i64", "i64"),
}

for name, types in SIGNATURES.items():
    decorated = getattr(kernels, name)
    function = decorated.jit_func
    source = ASTSource(
        fn=function, signature=dict(zip(function.arg_names, types, strict=True)), constexprs={}
    )
    libraries = tuple(decorated.extern_libs.items())
    compiled = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1, "extern_libs": libraries}
    )
    print(name, len(compiled.asm["cubin"]) > 0, "nvshmem" in compiled.asm["ptx"])
