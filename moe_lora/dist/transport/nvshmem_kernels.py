"""Triton kernels that put and wait from the GPU through NVSHMEM's device library.

Import only where torch finds a GPU and libnvshmem_device.bc (NVSHMEM_LIB_DIR): torch offers the device
functions nowhere else, and decorating looks for the library.  NVSHMEM wheels that hold one library per
architecture need a copy or link of libnvshmem_device_sm_90.bc under that name."""
# mypy: disable-error-code="no-untyped-def,attr-defined,no-untyped-call"

import triton
import triton.language as tl
from torch.distributed._symmetric_memory._nvshmem_triton import (
    putmem_signal_block,
    quiet,
    requires_nvshmem,
    signal_op,
    signal_wait_until,
)

_SIGNAL_SET = tl.constexpr(0)
_AT_LEAST = tl.constexpr(3)


@requires_nvshmem
@triton.jit
def put_signal_kernel(dst, src, num_bytes: tl.int64, signal, value: tl.int64, peer: tl.int32):
    """The peer's dst[:num_bytes] = src, then the peer's signal = value. One program."""
    putmem_signal_block(dst, src, num_bytes, signal, value, _SIGNAL_SET, peer)


@requires_nvshmem
@triton.jit
def signal_kernel(signal, value: tl.int64, peer: tl.int32):
    """The peer's signal = value, after what was put before. One program of one warp."""
    quiet()
    signal_op(signal.to(tl.int64), value, _SIGNAL_SET, peer)


@requires_nvshmem
@triton.jit
def wait_kernel(signal, at_least: tl.int64):
    """Returns when signal >= at_least. One program of one warp."""
    signal_wait_until(signal, _AT_LEAST, at_least)
