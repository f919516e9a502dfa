# SPDX-License-Identifier: Apache-2.0
"""Puts issued by the GPU: NVSHMEM through torch's symmetric memory, as torch.distributed backend "ibgda".

Two streams of one process have put on an H200 (docs/results/gpu.md); two GPUs NEVER RAN: `alloc` requires a
successful put between neighbours.  Source: InfiniLoRA section 5.1, IBGDA; pytorch issue 191858 (the handle's
own put_signal does nothing).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from moe_lora.core.errors import ConfigError, LoraServerError

from .contract import check_range, check_signal, check_sizes
from .device_puts import PUT_BLOCKS, STATUS_BYTES, WORDS_PER_SIGNAL, AnswerRows, SymmetricWindow

BACKEND = "ibgda"
_SELF_TEST_BYTES = 4096
_SELF_TEST_S = 30.0
_MEET_S = 120.0
_Gloo: Any = dist.ProcessGroupGloo


class IbgdaGroup(_Gloo):
    """A gloo group for host collectives, with puts from the GPU."""

    def __init__(self, store: dist.Store, group_rank: int, group_size: int, timeout: timedelta) -> None:
        super().__init__(store, group_rank, group_size, timeout)
        self._num_windows = 0
        self.device = torch.device("cuda", torch.cuda.current_device())

    def alloc(self, num_bytes: int, num_signals: int, timeout_s: float = _SELF_TEST_S) -> SymmetricWindow:
        """See `DevicePuts`.

        Raises ConfigError if this group is not the whole world, or for a put later than timeout_s.
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
        # The self-test needs one more signal, and a page per member.
        test_bytes = self.size() * _SELF_TEST_BYTES
        num_bytes, num_signals = num_bytes + test_bytes, num_signals + 1
        data = symmetric.empty(num_bytes, dtype=torch.uint8, device=self.device).zero_()
        words = symmetric.empty(num_signals * WORDS_PER_SIGNAL, dtype=torch.int64, device=self.device).zero_()
        world = dist.group.WORLD
        assert world is not None
        if self.size() > 1:
            for tensor in (data, words):
                symmetric.rendezvous(tensor, group=world)
        torch.cuda.current_stream().synchronize()
        self.meet()
        whole = SymmetricWindow(
            label=label, num_bytes=num_bytes, num_signals=num_signals, bytes=data, words=words
        )
        self._self_test(whole, timeout_s)
        self._num_windows += 1
        num_bytes, num_signals = num_bytes - test_bytes, num_signals - 1
        bytes_, words = data[:num_bytes], words[: num_signals * WORDS_PER_SIGNAL]
        return replace(whole, num_bytes=num_bytes, num_signals=num_signals, bytes=bytes_, words=words)

    def meet(self) -> None:
        """See `DevicePuts`."""
        try:
            self.barrier().wait()
        except RuntimeError as error:
            raise LoraServerError(f"a member of {self.size()} did not come: {error}") from error

    def put_pieces(
        self, window: SymmetricWindow, places: Sequence[tuple[int, int]], signal: int, peer: int
    ) -> None:
        """See `DevicePuts`.  Raises ValueError for impossible puts."""
        from . import nvshmem_kernels

        for offset_bytes, num_bytes in places:
            self._check(window, offset_bytes, num_bytes, signal, peer)
        nvshmem_kernels.launch_put_pieces(window, places, signal, peer)

    def put_rows(
        self, window: SymmetricWindow, answer: AnswerRows, status_bytes: int, signal: int, peer: int
    ) -> None:
        """See `DevicePuts`.  Raises ValueError for impossible puts."""
        from . import nvshmem_kernels

        self._check(window, status_bytes, PUT_BLOCKS * STATUS_BYTES, signal, peer)
        nvshmem_kernels.launch_put_rows(window, answer, status_bytes, signal, peer)

    def close(self) -> None:
        """NVSHMEM's members leave only with their processes."""

    def _check(
        self, window: SymmetricWindow, offset_bytes: int, num_bytes: int, signal: int, peer: int
    ) -> None:
        check_signal(window, signal)
        if not 0 <= peer < self.size():
            raise ValueError(f"peer={peer} is no member; choose 0 to {self.size() - 1}")
        if num_bytes < 1:
            raise ValueError(f"num_bytes={num_bytes}: a put has one byte or more")
        check_range(window, offset_bytes, num_bytes)

    def _self_test(self, window: SymmetricWindow, timeout_s: float) -> None:
        me, size = self.rank(), self.size()
        before, last = (me - 1) % size, window.num_signals - 1
        starts = [window.num_bytes - (size - member) * _SELF_TEST_BYTES for member in (me, before)]
        sent, came = (window.bytes[start : start + _SELF_TEST_BYTES] for start in starts)
        sent.fill_(1 + me % 250)
        self.put_pieces(window, [(starts[0], _SELF_TEST_BYTES)], last, (me + 1) % size)
        # Polled on the host: a device can't give up a wait.
        deadline = time.monotonic() + timeout_s
        while window.read_signal(last) < PUT_BLOCKS:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"member {me}: the put of member {before} did not arrive in {timeout_s:g} s; "
                    "check NVSHMEM's transport (NVSHMEM_DEBUG=INFO, NVSHMEM_IB_ENABLE_IBGDA=1, GPU peer "
                    "access) or set lora_server.device_puts='none'"
                )
        if not bool((came == 1 + before % 250).all()):
            raise ConfigError(
                f"member {me}: a signal of member {before} came before its data; don't use "
                f"{BACKEND!r} on this system"
            )
        self.meet()


def check_machine() -> None:
    """Raises ConfigError without a CUDA device or NVSHMEM."""
    if not torch.cuda.is_available():
        raise ConfigError(
            f"backend {BACKEND!r} needs CUDA devices, and torch finds none; set lora_server.device_puts="
            "'none'"
        )
    from torch.distributed._symmetric_memory import is_nvshmem_available

    if not is_nvshmem_available():
        raise ConfigError(
            f"backend {BACKEND!r} needs NVSHMEM, and this torch has none; pip install nvidia-nvshmem-cu13 "
            "beside a CUDA build of torch"
        )


def _create(store: dist.Store, group_rank: int, group_size: int, timeout: timedelta) -> IbgdaGroup:
    check_machine()
    group = IbgdaGroup(store, group_rank, group_size, timeout)
    _groups.append(group)  # torch keeps only the C++ object
    return group


_groups: list[IbgdaGroup] = []


def register() -> None:
    """Make backend "ibgda" known to torch.distributed.  Idempotent."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, devices=["cpu", "cuda"])


def join_group(address: str, rank: int, size: int, device: torch.device) -> IbgdaGroup:
    """This process's world: NVSHMEM spans no other."""
    register()
    torch.cuda.set_device(device)
    wait, where = timedelta(seconds=_MEET_S), f"tcp://{address}"
    try:
        dist.init_process_group(BACKEND, where, wait, size, rank)
    except (RuntimeError, ValueError) as error:
        raise LoraServerError(
            f"{size} devices did not meet at {address} in {_MEET_S:g} s: {error}"
        ) from error
    return _groups[-1]
