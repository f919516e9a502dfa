# SPDX-License-Identifier: Apache-2.0
"""Effect of the parts of host-assisted starts, each against its usual alternative.

    python -m bench.host_assisted.bench_host_parts --out bench/results/host_parts.jsonl [--quick]

ipc: an engine's rows to n workers and their deltas back, through shared memory and through UNIX sockets, with
the same work on both sides, and that work without a message; 16 tokens a worker (figure 12).  threads: 256
tokens by n workers, by torch's own threads on as many cores, and by the CPU library in this thread (figure
17).  Workers really compute q, k and v of rank 64, each on its own core beside the engine's; beyond the
machine's cores they share cores, and the result shows mostly their turns.
Source: Toppings sections 4.2 and 7.3.
"""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from bench.harness.interleave import interleave, ratio, repeated
from bench.harness.random_model import ModelSize, write_adapter, write_model
from bench.harness.records import Recorder
from bench.harness.tables import table
from moe_lora.adapters.host_store import HostStore
from moe_lora.adapters.packed import PackedAdapter
from moe_lora.adapters.peft.reader import read_adapter
from moe_lora.core.wrong_files import read_config
from moe_lora.dist.deltas.host_deltas import HostDeltas
from moe_lora.dist.deltas.session import DeltaRequest, FrameLayout, lay_out_request, read_request
from moe_lora.dist.host_workers.worker import StoreDeltas
from moe_lora.dist.host_workers.workers import HostWorkers
from moe_lora.families import shape_of
from moe_lora.lora.row_routing import RoutedAdapter, content_number

from .assisted_device import begun_at

SIZE = ModelSize(
    hidden_size=1024,
    intermediate_size=1024,
    num_layers=2,
    num_experts=0,
    num_experts_per_token=0,
    num_heads=16,
    num_kv_heads=16,
    head_dim=64,
    vocab_size=256,
)
QKV = 0
TOKENS_EACH, TOKENS = 16, 256
_LENGTH = struct.Struct("<q")


class Served:
    """An adapter in a store, and the layout of frames."""

    def __init__(self, folder: Path, lora_rank: int) -> None:
        model_dir = write_model(folder / "model", SIZE)
        modules = ("q_proj", "k_proj", "v_proj")
        path = write_adapter(
            folder / "adapter", SIZE, model_dir, lora_rank, experts=False, seed=1, attention=modules
        )
        self.model_dir = model_dir
        self.shape = shape_of(read_config(model_dir))
        self.packed: PackedAdapter = read_adapter(path, self.shape, torch.bfloat16)
        self.store = HostStore(folder / "store")
        self.store.put(self.packed)

    def layout(self, num_tokens: int) -> FrameLayout:
        return FrameLayout(self.shape, torch.bfloat16, num_tokens)


class SocketWorkers:
    """As host workers, over UNIX sockets: a frame there, the deltas back."""

    def __init__(self, served: Served, num_workers: int, tokens_each: int, cores: Sequence[int]) -> None:
        self._served = served
        self._layout = served.layout(tokens_each)
        self._frames = torch.empty(num_workers, self._layout.request_bytes, dtype=torch.uint8)
        self._sockets: list[socket.socket] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        for number in range(num_workers):
            mine, theirs = socket.socketpair()
            arguments = [
                theirs.fileno(),
                served.model_dir,
                served.store.directory,
                tokens_each,
                cores[number],
            ]
            command = [sys.executable, "-m", "bench.host_assisted.bench_host_parts", "--serve"]
            self._processes.append(
                subprocess.Popen([*command, *map(str, arguments)], pass_fds=[theirs.fileno()])
            )
            theirs.close()
            self._sockets.append(mine)
        for mine in self._sockets:
            assert mine.recv(1), "a worker ended"

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """y += deltas of x, each worker an equal part of the rows."""
        num_parts = len(self._sockets)
        for mine, frame, rows in zip(self._sockets, self._frames, x.tensor_split(num_parts), strict=True):
            message = frame.numpy().data[: lay_out(self._served, frame, self._layout, rows).frame_bytes]
            mine.sendall(_LENGTH.pack(len(message)))
            mine.sendall(message)
        for mine, rows in zip(self._sockets, y.tensor_split(num_parts), strict=True):
            delta = torch.empty_like(rows)
            _receive(mine, delta.view(torch.uint8).numpy().reshape(-1))
            rows += delta

    def close(self) -> None:
        for mine in self._sockets:
            mine.close()
        for process in self._processes:
            process.wait(10)


def lay_out(served: Served, frame: torch.Tensor, layout: FrameLayout, x: torch.Tensor) -> DeltaRequest:
    """A request for the deltas of x, in a frame."""
    request = lay_out_request(frame, layout, 0, QKV, len(x), 0, len(x))
    request.slot[:], request.generation[:] = 0, content_number(served.packed.content_hash)
    request.x.copy_(x)
    return request


def by_frames(workers: HostWorkers, served: Served, x: torch.Tensor, y: torch.Tensor) -> None:
    """y += deltas of x, each worker an equal part of the rows, through frames in shared memory."""
    sessions = [link.session for link in workers.links.values()]
    layout, sent = served.layout(TOKENS_EACH), []
    for session, rows in zip(sessions, x.tensor_split(len(sessions)), strict=True):
        assert session is not None, "a worker ended"
        sent.append(session.send(lay_out(served, session.frame(), layout, rows)))
    for session, one, rows in zip(sessions, sent, y.tensor_split(len(sessions)), strict=True):
        assert session is not None, "a worker ended"
        rows += session.take(one)


def _receive(connection: socket.socket, into: np.ndarray) -> bool:
    """Fill the array; False if the other side hung up."""
    view = into.data
    while len(view):
        received = connection.recv_into(view)
        if not received:
            return False
        view = view[received:]
    return True


def serve_socket(fd: int, model_dir: str, store: str, tokens: int, core: int) -> None:
    """A worker behind a UNIX socket, until it is hung up."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    shape = shape_of(read_config(Path(model_dir)))
    layout, deltas = FrameLayout(shape, torch.bfloat16, tokens), StoreDeltas(shape, HostStore(store))
    length, frame = np.zeros(_LENGTH.size, np.uint8), torch.empty(layout.request_bytes, dtype=torch.uint8)
    with socket.socket(fileno=fd) as connection:
        connection.sendall(b"!")
        while _receive(connection, length):
            num_bytes = int(length.view(np.int64)[0])
            _receive(connection, frame.numpy()[:num_bytes])
            request = read_request(frame, layout)
            out = torch.empty(request.num_rows, shape.sites[QKV].total_out_features, dtype=torch.bfloat16)
            deltas.compute(request, out)
            connection.sendall(out.view(torch.uint8).numpy().data)


def over_shared_memory(
    workers: HostWorkers, served: Served, x: torch.Tensor
) -> Callable[[torch.Tensor], None]:
    """y += deltas of x by host workers."""
    begin = begun_at(workers, served.shape, served.packed, len(x))

    def step(y: torch.Tensor) -> None:
        add_to = begin(0, QKV, x, None)
        assert add_to is not None
        add_to(y)

    return step


def measure_ipc(served: Served, counts: Sequence[int], num_rounds: int, num_steps: int) -> list[Any]:
    """Seconds per step of both ways and of the computing alone, by number of workers."""
    free, found = sorted(os.sched_getaffinity(0), reverse=True), []
    free = free[:-1] or free  # one is the engine's
    for count in counts:
        with ExitStack() as held:
            cores = list(islice(cycle(free), count))
            shared = HostWorkers(served.layout(TOKENS_EACH), served.store, count, TOKENS_EACH, cores=cores)
            held.callback(shared.close)
            sockets = SocketWorkers(served, count, TOKENS_EACH, cores)
            held.callback(sockets.close)
            x = torch.randn(count * TOKENS_EACH, SIZE.hidden_size).bfloat16()
            ways: dict[str, Callable[[torch.Tensor], None]] = {
                "shared memory": partial(by_frames, shared, served, x),
                "UNIX socket": partial(sockets.step, x),
                "all in process": in_turn([in_process(served, rows) for rows in x.tensor_split(count)]),
            }
            seconds = timed(ways, x, served, num_rounds, num_steps)
            found.append({"num_workers": count, "seconds": seconds, "num_cores": len(set(cores))})
    return found


def measure_threads(served: Served, num_rounds: int, num_steps: int) -> list[Any]:
    """Seconds per step of workers, of torch's threads, and of the CPU library, by number of cores."""
    found = []
    cores = sorted(os.sched_getaffinity(0), reverse=True)
    x = torch.randn(TOKENS, SIZE.hidden_size).bfloat16()
    weights = [matrices(served, name) for name in ("q", "k", "v")]
    for count in range(1, len(cores) + 1):
        each = -(-TOKENS // count)
        with ExitStack() as held:
            workers = HostWorkers(served.layout(each), served.store, count, each, cores=cores[:count])
            held.callback(workers.close)
            held.callback(torch.set_num_threads, torch.get_num_threads())
            ways: dict[str, Callable[[torch.Tensor], None]] = {
                "workers": over_shared_memory(workers, served, x),
                "torch's threads": partial(by_torch, count, x, weights),
            }
            if count == 1:
                ways["CPU library, in process"] = in_process(served, x)
            found.append({"num_cores": count, "seconds": timed(ways, x, served, num_rounds, num_steps)})
    return found


def matrices(served: Served, module: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B of a module, scaled, of the same sizes as the adapter's (for times: any numbers do)."""
    rank = served.packed.max_lora_rank
    width = served.shape.sites[QKV].out_features[("q", "k", "v").index(module)]
    return torch.randn(rank, SIZE.hidden_size).bfloat16(), torch.randn(width, rank).bfloat16()


def by_torch(
    num_threads: int, x: torch.Tensor, weights: Sequence[tuple[torch.Tensor, torch.Tensor]], y: torch.Tensor
) -> None:
    """y += x A B of all modules by torch's matrix product on num_threads threads."""
    torch.set_num_threads(num_threads)
    y += torch.cat([(x @ a.T) @ b.T for a, b in weights], dim=1)
    torch.set_num_threads(1)


def in_process(served: Served, x: torch.Tensor) -> Callable[[torch.Tensor], None]:
    """The worker's own computation in this thread, without a message."""
    layout, host = served.layout(len(x)), HostDeltas(served.shape, served.store)
    frame = torch.empty(layout.request_bytes, dtype=torch.uint8)
    request = lay_out_request(frame, layout, 0, QKV, len(x), 0, len(x))
    request.x.copy_(x)
    adapters = [RoutedAdapter(served.packed.content_hash, served.packed.targets)]
    rows = np.zeros(len(x), dtype=np.int64)

    def step(y: torch.Tensor) -> None:
        delta = torch.empty_like(y)
        host.compute(request, adapters, rows, delta)
        y += delta

    return step


def in_turn(steps: Sequence[Callable[[torch.Tensor], None]]) -> Callable[[torch.Tensor], None]:
    """Each step on its equal part of the rows."""

    def step(y: torch.Tensor) -> None:
        for one, rows in zip(steps, y.tensor_split(len(steps)), strict=True):
            one(rows)

    return step


def timed(
    ways: Mapping[str, Callable[[torch.Tensor], None]],
    x: torch.Tensor,
    served: Served,
    num_rounds: int,
    num_steps: int,
) -> dict[str, list[float]]:
    """Seconds by turns, after a first step of each."""
    y = torch.zeros(len(x), served.shape.sites[QKV].total_out_features, dtype=torch.bfloat16)
    contestants = {}
    for name, step in ways.items():
        step(y)
        contestants[name] = (repeated(partial(step, y)), num_steps, num_rounds)
    return interleave(contestants, num_rounds)


def lines(part: str, found: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """A row per number of workers or cores: medians, and the alternative over ours in the same round."""
    rows = []
    for one in found:
        (key, number), (_, seconds) = list(one.items())[:2]
        ours = next(iter(seconds))
        row = {"part": part, key: str(number), "num_cores": str(one["num_cores"])}
        for name, times in seconds.items():
            over = ratio(times, seconds[ours])
            row[f"{name}, ms"] = f"{1e3 * float(np.median(times)):.3f}"
            if name != ours:
                row[f"{name} / {ours}"] = f"{over['median']:.2f} ({over['min']:.2f}-{over['max']:.2f})"
        rows.append(row)
    return rows


@click.command(help=__doc__, context_settings={"ignore_unknown_options": True})
@click.option("--out", type=click.Path(), help="Append records to this file.")
@click.option("--quick", is_flag=True, help="Two rounds, to see that it runs.")
@click.option("--serve", nargs=5, hidden=True, help="Be a worker behind a socket.")
def main(out: str | None, quick: bool, serve: tuple[str, ...] | None) -> None:
    if serve:
        fd, model_dir, store, tokens, core = serve
        serve_socket(int(fd), model_dir, store, int(tokens), int(core))
        return
    recorder = Recorder(out)
    num_rounds, num_steps = (2, 5) if quick else (11, 100)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        served = Served(Path(folder), lora_rank=64)
        started_s = time.monotonic()
        parts = {
            "ipc": measure_ipc(served, (1, 2) if quick else (1, 2, 4, 8), num_rounds, num_steps),
            "threads": measure_threads(served, num_rounds, num_steps),
        }
    for part, found in parts.items():
        recorder({"bench": "host_parts", "part": part, "size": SIZE.describe()}, {"found": found})
        click.echo(table(lines(part, found), f"\n{part}"))
    click.echo(f"\n{time.monotonic() - started_s:.0f} s")


if __name__ == "__main__":
    main()
