# SPDX-License-Identifier: Apache-2.0
"""Ranks of a LoRA Server in processes of their own, to which instances put over `symmetric_memory`."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from moe_lora.config import EngineConfig, LoraServerConfig
from moe_lora.core.partition import Layout
from moe_lora.dist.launch.server_role import build_rank
from moe_lora.dist.transport import device_puts
from moe_lora.kernels.triton.configs import interpreted
from tests.dist.transport import symmetric_memory
from tests.kernels.triton.conftest import interpret_faster

READY_S = 90.0


@contextmanager
def stand_in(folder: str, seed: int) -> Iterator[None]:
    """This process is a member of groups whose memory lies in the folder."""
    if interpreted():
        interpret_faster()
    symmetric_memory.install()
    names = {symmetric_memory.FOLDER: folder, symmetric_memory.SEED: str(seed)}
    places = {"ibgda": symmetric_memory.__name__}
    with patch.dict(os.environ, names), patch.dict(device_puts._PLACES, places):
        yield


def serve(config: EngineConfig, number: int, folder: str, seed: int, told: Any) -> None:
    """One rank.  Over `told` it says when it is there, is told what to change, and at last how it went."""
    with stand_in(folder, seed):
        rank = build_rank(config, number)
        thread = threading.Thread(target=rank.run)
        thread.start()
        told.send(None)
        devices = rank.devices
        assert devices is not None
        while (order := told.recv()) != "end":
            if order == "lack all layers":
                # As if each slot had been given to another: what is asked for has left.
                devices.tables.now.generation.add_(1)
            elif order == "cut":
                symmetric_memory._groups[-1].network.cut = True
            told.send(None)
        network = symmetric_memory._groups[-1].network
        facts = {
            "steps": [session.num_steps for session in devices.sessions],
            "overtaken": network.num_overtaken,
            "requests": rank.loop.num_requests,
        }
        rank.stop()
        thread.join()
        told.send(facts)


class PutServer:
    """config: of instances.  `end` gives each rank's facts."""

    def __init__(self, config: LoraServerConfig, pipes: list[Any]) -> None:
        self.config = config
        self._pipes = pipes
        self.facts: list[dict[str, Any]] = []

    def order(self, what: str) -> None:
        for pipe in self._pipes:
            pipe.send(what)
        for pipe in self._pipes:
            assert pipe.poll(READY_S)
            pipe.recv()

    def end(self) -> list[dict[str, Any]]:
        if not self.facts:
            for pipe in self._pipes:
                pipe.send("end")
            for pipe in self._pipes:
                assert pipe.poll(READY_S)
                self.facts.append(pipe.recv())
        return self.facts


@contextmanager
def put_server(model_dir: Path, layout: str, *, seed: int = 0, **settings: Any) -> Iterator[PutServer]:
    """A server of this layout, for instances of this process."""
    engine = {name: settings.pop(name) for name in ("num_instances", "max_num_seqs") if name in settings}
    with ExitStack() as ends:
        folder = ends.enter_context(tempfile.TemporaryDirectory(prefix="ls"))
        server = LoraServerConfig(
            layout=layout,
            address=f"{folder}/leader",
            store_dir=f"{folder}/store",
            device_puts="ibgda",
            **{"memory_gb": 0.01, **settings},
        )
        config = EngineConfig(model_dir=str(model_dir), dtype="float32", lora_server=server, **engine)
        context, pipes, processes = multiprocessing.get_context("forkserver"), [], []
        context.set_forkserver_preload([__name__])
        for number in range(Layout.parse(layout).num_ranks):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(config, number, folder, seed, there), daemon=True)
            process.start()
            pipes.append(here)
            processes.append(process)
            assert here.poll(READY_S)
            here.recv()
        ends.enter_context(stand_in(folder, seed))
        found = PutServer(server, pipes)
        try:
            yield found
            found.end()
        finally:
            for process in processes:
                process.join(10.0 if found.facts else 0.1)
                process.kill()
