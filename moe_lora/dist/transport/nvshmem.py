"""Puts issued by the GPU: NVSHMEM through torch's symmetric memory, as torch.distributed backend "ibgda".

NOT YET RUN: it was written where no two GPUs were at hand.  The kernels compile for sm_90a against
NVSHMEM's device library; the rest awaits a first run, which is why `alloc` tests one put between each pair
of neighbours and refuses to go on when it does not arrive.

    register(); init_process_group("ibgda")
    ibgda = dist.group.WORLD._get_backend(torch.device("cuda"))
    window = ibgda.alloc(num_bytes, num_signals)         # collective
    ibgda.put_signal(window, offset_bytes, src, signal, value, peer)
    ibgda.signal_wait_until(window, signal, at_least)    # on the stream

The contract's words, but not its class: memory is symmetric, and NVSHMEM's members are fixed at start, so
nobody joins or returns.  put_signal and signal_wait_until queue work on the current CUDA stream and return
at once; the values of a signal must grow (the device sets them, it does not compare).  Both are opaque
operations that declare one channel tensor mutated, or torch.compile would drop or reorder them.

Source: InfiniLoRA section 5.1, IBGDA; pytorch issue 191858 (the handle's own put_signal does nothing).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from moe_lora.core.errors import ConfigError

from .descriptor import LINE_BYTES, check_range, check_signal, check_sizes

BACKEND = "ibgda"
_WORDS_PER_SIGNAL = LINE_BYTES // 8
_SELF_TEST_BYTES = 4096
_Gloo: Any = dist.ProcessGroupGloo


@dataclass(frozen=True, kw_only=True, eq=False)
class SymmetricWindow:
    """Memory that every member has at the same place; a put names the member whose copy it writes."""

    label: str
    num_bytes: int
    num_signals: int
    bytes: torch.Tensor
    """uint8 [num_bytes], CUDA"""
    words: torch.Tensor
    """int64 [num_signals * 8], CUDA; word 8 * i is signal i"""
    channel: torch.Tensor
    """int64 [1], CUDA: orders puts and waits under torch.compile"""

    def read_signal(self, signal: int) -> int:
        """Present value; waits for the stream."""
        check_signal(self, signal)
        return int(self.words[signal * _WORDS_PER_SIGNAL].item())


class IbgdaGroup(_Gloo):
    """A gloo group, for collectives of host tensors, that also puts and waits from the GPU."""

    def __init__(self, store: dist.Store, group_rank: int, group_size: int, timeout: timedelta) -> None:
        super().__init__(store, group_rank, group_size, timeout)
        self._num_windows = 0

    def alloc(self, num_bytes: int, num_signals: int, timeout_s: float = 30.0) -> SymmetricWindow:
        """Zeroed symmetric memory; every member calls it with the same sizes, in the same order.

        Raises ConfigError if this group is not the whole world, or if a put does not arrive within timeout_s.
        """
        from torch.distributed import _symmetric_memory as symmetric

        label = f"symmetric-{self._num_windows}"
        check_sizes(label, num_bytes, num_signals)
        if self.size() != dist.get_world_size():
            raise ConfigError(
                f"an {BACKEND} group of {self.size()} in a world of {dist.get_world_size()}: NVSHMEM numbers "
                "the members of the world; use the world's group"
            )
        symmetric.set_backend("NVSHMEM")
        device = torch.device("cuda", torch.cuda.current_device())
        # One signal and a page more than asked for: the self-test's.
        data = symmetric.empty(num_bytes + _SELF_TEST_BYTES, dtype=torch.uint8, device=device).zero_()
        count = (num_signals + 1) * _WORDS_PER_SIGNAL
        words = symmetric.empty(count, dtype=torch.int64, device=device).zero_()
        world = dist.group.WORLD
        assert world is not None
        for tensor in (data, words):
            symmetric.rendezvous(tensor, group=world)
        torch.cuda.synchronize()
        self.barrier().wait()
        channel = torch.zeros(1, dtype=torch.int64, device=device)
        whole = SymmetricWindow(
            label=label,
            num_bytes=num_bytes + _SELF_TEST_BYTES,
            num_signals=num_signals + 1,
            bytes=data,
            words=words,
            channel=channel,
        )
        self._self_test(whole, timeout_s)
        self._num_windows += 1
        bytes_, words = data[:num_bytes], words[: num_signals * _WORDS_PER_SIGNAL]
        return replace(whole, num_bytes=num_bytes, num_signals=num_signals, bytes=bytes_, words=words)

    def put_signal(
        self,
        window: SymmetricWindow,
        offset_bytes: int,
        src: torch.Tensor | None,
        signal: int,
        value: int,
        peer: int,
    ) -> None:
        """window[offset : offset + src.nbytes] = src and signal = value in peer's memory, on the stream.

        src: contiguous, CUDA, any dtype.  value: below 2**63.  Raises ValueError.
        """
        check_signal(window, signal, value)
        if not 0 <= peer < self.size():
            raise ValueError(f"peer={peer} is no member; choose 0 to {self.size() - 1}")
        data = window.bytes[:0] if src is None else src
        if not data.is_cuda or not data.is_contiguous():
            layout = f"strides {data.stride()} on {data.device}"
            raise ValueError(f"src must be a contiguous CUDA tensor, not {layout}")
        check_range(window, offset_bytes if data.nbytes else 0, data.nbytes)
        torch.ops.moe_lora_dist.put_signal(
            window.channel, window.bytes, offset_bytes, data, window.words, signal, value, peer
        )

    def signal_wait_until(self, window: SymmetricWindow, signal: int, at_least: int) -> None:
        """The current stream goes on when signal >= at_least.  Without a time limit: the GPU can't tell."""
        check_signal(window, signal, at_least)
        torch.ops.moe_lora_dist.signal_wait_until(
            window.channel, window.bytes, window.words, signal, at_least
        )

    def _self_test(self, window: SymmetricWindow, timeout_s: float) -> None:
        me, size = self.rank(), self.size()
        offset, last = window.num_bytes - _SELF_TEST_BYTES, window.num_signals - 1
        sent = torch.full((_SELF_TEST_BYTES,), 1 + me % 250, dtype=torch.uint8, device=window.bytes.device)
        self.put_signal(window, offset, sent, last, 1, (me + 1) % size)
        # Looked at from the host: a wait on the device could never be given up.
        deadline = time.monotonic() + timeout_s
        while window.read_signal(last) < 1:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"member {me}: the put of member {(me - 1) % size} did not arrive in {timeout_s:g} s; "
                    "check NVSHMEM's transport (NVSHMEM_DEBUG=INFO, NVSHMEM_IB_ENABLE_IBGDA=1, GPU peer "
                    "access) or use transport 'nixl'"
                )
        self.signal_wait_until(window, last, 1)
        expected = 1 + (me - 1) % size % 250
        if not bool((window.bytes[offset:] == expected).all()):
            raise ConfigError(
                f"member {me}: a signal of member {(me - 1) % size} came before its data; don't use "
                f"{BACKEND!r} on this system"
            )
        self.barrier().wait()


@torch.library.custom_op("moe_lora_dist::put_signal", mutates_args=("channel",), device_types="cuda")
def _put_signal(
    channel: torch.Tensor,
    window: torch.Tensor,
    offset_bytes: int,
    src: torch.Tensor,
    words: torch.Tensor,
    signal: int,
    value: int,
    peer: int,
) -> None:
    from . import nvshmem_kernels

    word = words[signal * _WORDS_PER_SIGNAL :]
    if src.nbytes == 0:  # the device's put takes no empty ones
        nvshmem_kernels.signal_kernel[(1,)](word, value, peer, num_warps=1)
        return
    data = src.reshape(-1).view(torch.uint8)
    nvshmem_kernels.put_signal_kernel[(1,)](
        window[offset_bytes:], data, data.numel(), word, value, peer, num_warps=32
    )


@torch.library.custom_op(
    "moe_lora_dist::signal_wait_until", mutates_args=("channel", "window"), device_types="cuda"
)
def _signal_wait_until(
    channel: torch.Tensor, window: torch.Tensor, words: torch.Tensor, signal: int, at_least: int
) -> None:
    from . import nvshmem_kernels

    nvshmem_kernels.wait_kernel[(1,)](words[signal * _WORDS_PER_SIGNAL :], at_least, num_warps=1)


@_put_signal.register_fake
def _(*_: Any) -> None:
    return None


@_signal_wait_until.register_fake
def _(*_: Any) -> None:
    return None


def _create(store: dist.Store, group_rank: int, group_size: int, timeout: timedelta) -> IbgdaGroup:
    if not torch.cuda.is_available():
        raise ConfigError(
            f"backend {BACKEND!r} needs CUDA devices, and torch finds none; use transport 'shm'"
        )
    from torch.distributed._symmetric_memory import is_nvshmem_available

    if not is_nvshmem_available():
        raise ConfigError(
            f"backend {BACKEND!r} needs NVSHMEM, and this torch has none; pip install nvidia-nvshmem-cu13 "
            "beside a CUDA build of torch"
        )
    group = IbgdaGroup(store, group_rank, group_size, timeout)
    _groups.append(group)  # torch keeps the C++ object only, and the methods live in this one
    return group


_groups: list[IbgdaGroup] = []


def register() -> None:
    """Make backend "ibgda" known to torch.distributed. Idempotent."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, devices=["cpu", "cuda"])
