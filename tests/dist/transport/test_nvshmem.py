"""The GPU's own puts: what can be seen without two GPUs, and what runs where they are."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed

from moe_lora.core.errors import ConfigError
from moe_lora.dist.transport import nvshmem

from .peers import pattern

KERNELS = ("put_signal_kernel", "signal_kernel", "wait_kernel")


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


def test_put_and_wait_stay_and_keep_their_order_when_compiled() -> None:
    """The graph that a compiler gets: no operation is dropped, each needs the channel of the one before."""
    ops, graphs = torch.ops.moe_lora_dist, []

    class CapturedError(Exception):
        pass

    def capture(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph.graph)
        raise CapturedError

    def step(channel: torch.Tensor, window: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        ops.put_signal(channel, window, 0, window[:8] * 2, words, 0, 1, 1)
        ops.signal_wait_until(channel, window, words, 1, 1)
        ops.put_signal(channel, window, 0, window[:8] * 2, words, 0, 2, 1)
        return window + 1

    compiled = torch.compile(step, backend=aot_autograd(fw_compiler=capture), fullgraph=True)
    with torch.no_grad(), pytest.raises(BackendCompilerFailed, match="CapturedError"):
        compiled(*(torch.zeros(n, dtype=torch.int64) for n in (1, 64, 16)))
    graphs[0].eliminate_dead_code()
    calls = [node for node in graphs[0].nodes if "auto_functionalized" in str(node.target)]
    names = [node.args[0].name().partition("::")[2] for node in calls]
    assert names == ["put_signal", "signal_wait_until", "put_signal"]
    for earlier, later in itertools.pairwise(calls):
        assert any(earlier in node.all_input_nodes for node in later.all_input_nodes)


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
    torch.cuda.set_device(member)
    nvshmem.register()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("ibgda", store=store, rank=member, world_size=size)
    assert dist.group.WORLD is not None
    group: Any = dist.group.WORLD._get_backend(torch.device("cuda"))
    window = group.alloc(1 << 20, 4)
    for value, num_bytes in enumerate((1, 63, 4096, 100_001, 1 << 20), start=1):
        data = pattern(num_bytes, value).cuda()
        group.put_signal(window, 0, data, 1, value, (member + 1) % size)
        group.signal_wait_until(window, 1, value)
        assert torch.equal(window.bytes[:num_bytes], data)
        group.put_signal(window, 0, None, 2, value, (member - 1) % size)  # it may write again
        group.signal_wait_until(window, 2, value)
    torch.cuda.synchronize()
    dist.destroy_process_group()


@pytest.mark.gpu
def test_puts_arrive_in_a_ring_of_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    size = torch.cuda.device_count()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.multiprocessing.spawn(ring, args=(store.port, size), nprocs=size)
