# SPDX-License-Identifier: Apache-2.0
"""The GPU's own puts: what can be seen without two GPUs, and what runs where they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from moe_lora.core.errors import ConfigError
from moe_lora.dist.transport import nvshmem
from moe_lora.dist.transport.device_puts import PUT_BLOCKS

from .peers import pattern

KERNELS = ("put_pieces", "put_rows")


def library_folder() -> Path | None:
    """Where libnvshmem_device.bc is, if anywhere."""
    from torch.distributed._symmetric_memory._nvshmem_triton import NvshmemLibFinder

    try:
        return Path(NvshmemLibFinder.find_device_library()).parent
    except RuntimeError:
        return None


def test_backend_is_known_by_its_name() -> None:
    nvshmem.register()
    nvshmem.register()
    assert dist.Backend("ibgda") == "ibgda"
    assert dist.is_backend_available("ibgda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="has CUDA")
def test_group_is_refused_where_cuda_is_missing() -> None:
    nvshmem.register()
    with pytest.raises(ConfigError, match="'ibgda' needs CUDA devices"):
        dist.init_process_group("ibgda", store=dist.HashStore(), rank=0, world_size=1)
    assert not dist.is_initialized()


@pytest.mark.slow
def test_kernels_compile_for_hopper_without_a_gpu() -> None:
    folder = library_folder()
    if folder is None:
        pytest.skip("no libnvshmem_device.bc; set NVSHMEM_LIB_DIR")
    done = subprocess.run(
        [sys.executable, "-m", "tests.dist.transport.compile_nvshmem"],
        env={**os.environ, "NVSHMEM_LIB_DIR": str(folder)},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{name} True True" for name in KERNELS]


def ring(member: int, port: int, size: int) -> None:
    """Each member puts to the next and checks what it got from the one before."""
    from moe_lora.kernels.triton import exchange

    torch.cuda.set_device(member)
    nvshmem.register()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("ibgda", store=store, rank=member, world_size=size)
    assert dist.group.WORLD is not None
    group: Any = dist.group.WORLD._get_backend(torch.device("cuda"))
    half = 1 << 20
    window = group.alloc(2 * half, 4)
    expected, state = (torch.zeros(n, dtype=torch.int64, device="cuda") for n in (4, 1))
    out, came = half * (member % 2), half * ((member - 1) % size % 2)  # so the ring is of an even number
    for value, num_bytes in enumerate((1, 63, 4096, 100_001, half), start=1):
        data = pattern(num_bytes, value).cuda()
        window.bytes[out : out + num_bytes] = data
        group.put_pieces(window, [(out, num_bytes)], 1, (member + 1) % size)
        signals = exchange.Signals(window.words, expected, range(1, 2))
        exchange.launch_wait(signals, PUT_BLOCKS, state, exchange.NO_BOUND)
        assert torch.equal(window.bytes[came : came + num_bytes], data)
        group.put_pieces(window, [(out, 1)], 2, (member - 1) % size)  # it may write again
        signals = signals._replace(numbers=range(2, 3))
        exchange.launch_wait(signals, PUT_BLOCKS, state, exchange.NO_BOUND)
    torch.cuda.synchronize()
    dist.destroy_process_group()


@pytest.mark.gpu
def test_puts_arrive_in_a_ring_of_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    size = torch.cuda.device_count() // 2 * 2
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.multiprocessing.spawn(ring, args=(store.port, size), nprocs=size)
