# SPDX-License-Identifier: Apache-2.0
"""Parts of the first run on a GPU: device puts through NVSHMEM."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .run_log import Log

if TYPE_CHECKING:
    import torch


LIBRARY_DIR = "NVSHMEM_LIB_DIR"
LIBRARY = "libnvshmem_device.bc"


def nvshmem_wheel() -> Path | None:
    """The folder of NVSHMEM's libraries, if its wheel is installed."""
    try:
        spec = importlib.util.find_spec("nvidia.nvshmem")
    except ModuleNotFoundError:  # nothing of nvidia's
        return None
    places = [] if spec is None else spec.submodule_search_locations
    return next((Path(place) / "lib" for place in places or ()), None)


def device_library(wheel: Path | None, scratch: Path) -> dict[str, str]:
    """Environment for torch with NVSHMEM's device library; {}: found without, or not at all.

    A wheel with one library per architecture gets a link to Hopper's in `scratch`, under torch's name.
    """
    if LIBRARY_DIR in os.environ or wheel is None or (wheel / LIBRARY).exists():
        return {}
    found = next(iter(sorted(wheel.glob("libnvshmem_device*sm_90*.bc"))), None)
    if found is None:
        return {}
    scratch.mkdir(parents=True, exist_ok=True)
    link = scratch / LIBRARY
    link.unlink(missing_ok=True)
    link.symlink_to(found)
    return {LIBRARY_DIR: str(scratch)}


def shmem1(log: Log) -> None:
    _shmem(log, 1)


def shmem2(log: Log) -> None:
    _shmem(log, 2)


def _shmem(log: Log, size: int) -> None:
    """Puts with signals around a ring of `size` processes on one GPU, through NVSHMEM."""
    settings = {
        **os.environ,
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(29500 + size),
        **device_library(nvshmem_wheel(), log.folder / "nvshmem"),
    }
    log("shmem", library={name: settings[name] for name in (LIBRARY_DIR,) if name in settings})
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "bench.gpu.first_run", str(log.folder), "shmem_rank", "--here"],
            env={**settings, "RANK": str(dist_rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for dist_rank in range(size)
    ]
    texts, deadline_s = [], time.monotonic() + (35 if size == 1 else 15)
    for rank in ranks:
        try:
            left_s = max(0.0, deadline_s - time.monotonic())
            texts.append(rank.communicate(timeout=left_s)[0][-500:])
        except subprocess.TimeoutExpired:
            rank.kill()
            texts.append("timeout " + rank.communicate()[0][-500:])
    log("shmem", processes_on_one_gpu=size, said=texts)
    if not all("ARRIVED" in text for text in texts) or any(rank.returncode for rank in ranks):
        raise RuntimeError(f"{size} processes on one GPU did not all receive by NVSHMEM")


def shmem_rank(log: Log) -> None:
    """One process of `_shmem`."""
    import torch
    import torch.distributed as dist

    from moe_lora.dist.transport import nvshmem
    from moe_lora.dist.transport.device_puts import PUT_BLOCKS
    from moe_lora.kernels.triton import exchange

    torch.cuda.set_device(0)
    nvshmem.register()
    dist.init_process_group("ibgda")
    assert dist.group.WORLD is not None
    group: Any = dist.group.WORLD._get_backend(torch.device("cuda"))
    window = group.alloc(1 << 20, 4, 10.0)
    window.bytes.fill_(1)
    expected, state = (torch.zeros(n, dtype=torch.int64, device="cuda") for n in (4, 1))
    signals = exchange.Signals(window.words, expected, range(1, 2))
    peer = (dist.get_rank() + 1) % dist.get_world_size()
    for _ in range(60):
        group.put_pieces(window, [(0, window.num_bytes)], 1, peer)
        exchange.launch_wait(signals, PUT_BLOCKS, state, 10_000_000)
    torch.cuda.synchronize()
    assert not int(state), "a put did not arrive"
    print("ARRIVED", int(window.bytes.sum()), flush=True)
    if dist.get_world_size() == 1:
        for num_bytes in (4 << 10, 64 << 10, 512 << 10):
            state = torch.zeros(1, dtype=torch.int64, device="cuda")
            halves = send_and_receive(group, group.alloc(2 * num_bytes, 2, 10.0), num_bytes, state)
            us = _echo_us(*halves)
            assert not int(state), "an exchange of two streams was given up"
            log("shmem", echo_bytes=num_bytes, us=us)


def send_and_receive(
    group: Any, window: Any, num_bytes: int, state: torch.Tensor
) -> tuple[Callable[[int], None], Callable[[int], None]]:
    """Launches that put num_bytes to this process under a signal's number, and wait for them.

    The window has two places and two signals.  state: int64 [1], not 0 after an abandoned wait.
    """
    import torch

    from moe_lora.dist.transport.device_puts import PUT_BLOCKS
    from moe_lora.kernels.triton import exchange

    expected, own = torch.zeros(2, dtype=torch.int64, device=group.device), group.rank()

    def send(number: int) -> None:
        group.put_pieces(window, [(number * num_bytes, num_bytes)], number, own)

    def receive(number: int) -> None:
        signals = exchange.Signals(window.words, expected, range(number, number + 1))
        exchange.launch_wait(signals, PUT_BLOCKS, state, 10_000_000)

    return send, receive


def _echo_us(send: Callable[[int], None], receive: Callable[[int], None], exchanges: int = 20) -> float:
    """Median microseconds of a round trip between two streams; each stream's launches are a graph."""
    import torch

    for number in (0, 1):  # compiles
        send(number)
        receive(number)
    torch.cuda.synchronize()
    client, server = (send, receive), (receive, send)
    streams, graphs = [torch.cuda.Stream() for _ in range(2)], [torch.cuda.CUDAGraph() for _ in range(2)]
    for end, graph, stream in zip((client, server), graphs, streams, strict=True):
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(exchanges):
                for number, launch in enumerate(end):
                    launch(number)
    times = []
    for _ in range(20):
        begin, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for graph, stream in zip(reversed(graphs), reversed(streams), strict=True):
            with torch.cuda.stream(stream):
                begin.record()
                graph.replay()
                done.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(done) * 1e3 / exchanges)
    return sorted(times)[len(times) // 2]
