# SPDX-License-Identifier: Apache-2.0
"""Path of tokens from an instance's socket to a front end's awaiting coroutine, old against new.

    python -m bench.cluster.bench_connection [--streams 64] [--out bench/results/connection.jsonl]

A process writes the outputs of decode steps, one token per stream and step, at full speed; the front end
hands each output to its stream's coroutine.  new: `dist.net` and `dist.cluster.listener.DialledClient`.  old:
pickled data classes over `multiprocessing.connection`, a reading thread, and a call into the event loop per
output.  Measured: outputs per second of the receiving process's CPU time, over all its threads, in
alternating rounds; every output is counted at its stream.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from bench.harness.interleave import Contestant, interleave, ratio
from bench.harness.records import Recorder
from moe_lora.core.address import Address
from moe_lora.core.request import FinishReason, GenerateRequest, ModelInfo, TokenOutput
from moe_lora.dist.cluster.instance_links import HANDSHAKE
from moe_lora.dist.cluster.listener import DialledClient
from moe_lora.dist.net.connection import dial, listen
from moe_lora.dist.net.peer import Peer
from moe_lora.dist.net.session import Dialler
from moe_lora.engine.client.messages import InstanceFacts, Outputs, Request

_INFO = ModelInfo(
    name="m",
    model_dir="m",
    family="mixtral",
    dtype="float32",
    max_model_len=64,
    vocab_size=64,
    max_loras=1,
    eos_token_ids=(),
)


@dataclass(frozen=True, kw_only=True)
class PickledOutput:
    """`TokenOutput` as it was: a data class."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Any, ...] | None = None
    finish_reason: str | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    timing: Any = None
    adapter_version: int | None = None


@dataclass(frozen=True)
class PickledOutputs:
    outputs: list[PickledOutput]


def names(num_streams: int) -> list[str]:
    return [f"cmpl-0123456789abcdef0123456789abcde{n}-0" for n in range(num_streams)]


async def count(stream: AsyncIterator[Any]) -> int:
    """Outputs of a stream up to its end."""
    found = 0
    async for _ in stream:
        found += 1
    return found


class OldPath:
    """`multiprocessing.connection`, a reading thread, pickles."""

    def __init__(self, num_streams: int) -> None:
        self._names = names(num_streams)

    def __call__(self, num_steps: int) -> float:
        """Seconds of CPU time for so many steps."""
        ours, theirs = socket.socketpair()
        sender = start("old", len(self._names), num_steps, str(theirs.fileno()), theirs.fileno())
        theirs.close()
        with Connection(ours.detach()) as connection:
            cpu_s = asyncio.run(self._receive(connection, num_steps))
        sender.wait()
        return cpu_s

    async def _receive(self, connection: Connection, num_steps: int) -> float:
        loop = asyncio.get_running_loop()
        queues: dict[str, asyncio.Queue[PickledOutput]] = {name: asyncio.Queue() for name in self._names}

        def read() -> None:
            while True:
                try:
                    event: PickledOutputs = connection.recv()
                except EOFError:
                    return
                for output in event.outputs:
                    loop.call_soon_threadsafe(queues[output.request_id].put_nowait, output)

        async def stream(name: str) -> AsyncIterator[PickledOutput]:
            while True:
                output = await queues[name].get()
                yield output
                if output.finish_reason is not None:
                    return

        started_s = time.process_time()
        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        counts = await asyncio.gather(*(count(stream(name)) for name in self._names))
        cpu_s = time.process_time() - started_s
        assert counts == [num_steps] * len(self._names), counts
        reader.join()
        return cpu_s


class NewPath:
    """`dist.net`."""

    def __init__(self, num_streams: int) -> None:
        self._names = names(num_streams)

    def __call__(self, num_steps: int) -> float:
        """Seconds of CPU time for so many steps."""
        with tempfile.TemporaryDirectory(prefix="moe_lora-") as folder:
            return asyncio.run(self._receive(Address(path=f"{folder}/s"), num_steps))

    async def _receive(self, address: Address, num_steps: int) -> float:
        measured: asyncio.Future[float] = asyncio.get_running_loop().create_future()

        async def serve(peer: Peer, caller: Dialler) -> None:
            client = DialledClient(peer, "sender")
            reading = asyncio.create_task(client.read())
            started_s = time.process_time()
            requests = [GenerateRequest(request_id=name, prompt_token_ids=(1,)) for name in self._names]
            counts = await asyncio.gather(*(count(client.generate(one)) for one in requests))
            measured.set_result(time.process_time() - started_s)
            assert counts == [num_steps] * len(self._names), counts
            await client.close()
            await reading

        visit = partial(HANDSHAKE.receive, lambda caller: 1.0, serve)
        async with listen("address", address, None, visit):
            sender = start("new", len(self._names), num_steps, address.path)
            cpu_s = await measured
            await asyncio.to_thread(sender.wait)
        return cpu_s


def start(path: str, num_streams: int, num_steps: int, place: str, fd: int | None = None) -> Any:
    words = ["--send", path, "--streams", str(num_streams), "--steps", str(num_steps), "--place", place]
    return subprocess.Popen(
        [sys.executable, "-m", "bench.cluster.bench_connection", *words], pass_fds=() if fd is None else (fd,)
    )


def send_old(num_streams: int, num_steps: int, fd: int) -> None:
    with Connection(fd) as connection:
        for step in range(num_steps):
            reason = "length" if step == num_steps - 1 else None
            connection.send(
                PickledOutputs(
                    [
                        PickledOutput(request_id=name, token_ids=(step,), finish_reason=reason)
                        for name in names(num_streams)
                    ]
                )
            )


async def send_new(num_streams: int, num_steps: int, path: str) -> None:
    hello = HANDSHAKE.hello("sender", InstanceFacts(_INFO))
    connection = await dial("address", Address(path=path), None)
    peer, _ = await HANDSHAKE.open(connection, "the front end", hello)
    asked = 0
    while asked < num_streams:
        asked += isinstance(await peer.next(), Request)

    def steps() -> Any:
        for step in range(num_steps):
            reason: FinishReason | None = "length" if step == num_steps - 1 else None
            yield Outputs(
                [
                    TokenOutput(request_id=name, token_ids=(step,), finish_reason=reason)
                    for name in names(num_streams)
                ]
            )

    peer.send_all(steps())
    async for _ in peer.messages():
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", help="append a record here")
    parser.add_argument("--send", choices=("old", "new"), help=argparse.SUPPRESS)
    parser.add_argument("--place", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.send == "old":
        send_old(options.streams, options.steps, int(options.place))
        return
    if options.send == "new":
        asyncio.run(send_new(options.streams, options.steps, options.place))
        return
    record = Recorder(options.out)
    paths: dict[str, Contestant] = {"old": OldPath(options.streams), "new": NewPath(options.streams)}
    turns = {name: (path, options.steps, options.rounds) for name, path in paths.items()}
    times = interleave(turns, options.rounds)
    result: dict[str, Any] = {
        name: sorted(options.streams / step_s for step_s in found)[len(found) // 2]
        for name, found in times.items()
    }
    result["new_over_old"] = ratio(times["old"], times["new"])
    found = result["new_over_old"]
    print(
        f"outputs/s of CPU time, {options.streams} streams: old {result['old']:,.0f}, "
        f"new {result['new']:,.0f}; ratio {found['median']:.2f} ({found['min']:.2f} to {found['max']:.2f})"
    )
    config = {"streams": options.streams, "steps": options.steps, "rounds": options.rounds}
    record(config, result | {"load_average": os.getloadavg()[0]})


if __name__ == "__main__":
    main()
