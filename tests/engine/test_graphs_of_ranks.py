# SPDX-License-Identifier: Apache-2.0
"""Ranks that share a model's experts compute steps by graphs, with what they tell each other between these.

Two ranks of one instance on stand-ins for CUDA devices.  (Started by
`tests/kernels/triton/test_in_interpreter.py`.)
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import pytest
import torch

from moe_lora.engine.ranks.exchange import Exchanges
from moe_lora.engine.step.step_batch import CaptureSteps
from moe_lora.kernels.triton.configs import interpreted
from tests.families import ALL_TARGETS, make_adapter, make_checkpoint, shard_of
from tests.models.harness import MAX_TOKENS, Harness
from tests.patience import PATIENCE_S
from tests.stand_in_device import StandIn, stand_in_device

from .on_device import OnDevice

pytestmark = pytest.mark.skipif(not interpreted(), reason="in a process of its own, with TRITON_INTERPRET=1")
SIZE = 2
PROMPTS = [(0, [3]), (-1, [11]), (1, [13])]
GRAPHS = {"rows": (4,), "max_tokens": MAX_TOKENS}


class InTurn:
    """Exchanges of rows between threads of which one runs at a time: until it waits for the other."""

    def __init__(self) -> None:
        self.runs = threading.Lock()
        self._all = threading.Barrier(SIZE, timeout=PATIENCE_S)
        self._rows: list[torch.Tensor | None] = [None] * SIZE
        self.num_asked = [0] * SIZE

    def wait(self) -> None:
        self.runs.release()
        try:
            self._all.wait()
        finally:
            self.runs.acquire()

    def fill(self, dist_rank: int, y: torch.Tensor) -> None:
        self.num_asked[dist_rank] += 1
        self._rows[dist_rank] = y.held.clone()
        self.wait()
        y.held.copy_(sum(self._rows))
        self.wait()


class Rank:
    """`ExpertExchange` of one of them."""

    def __init__(self, turns: InTurn, dist_rank: int) -> None:
        self._turns, self._dist_rank = turns, dist_rank

    def fill(self, y: torch.Tensor, ids: torch.Tensor) -> None:
        self._turns.fill(self._dist_rank, y)


@pytest.mark.slow
def test_steps_are_those_of_a_rank_that_holds_all_experts(tmp_path):
    """Captured ahead and when they are needed, by a rank that schedules and one that follows."""
    base = make_checkpoint("mixtral", tmp_path / "base", seed=0)
    adapters = [
        make_adapter("mixtral", base, tmp_path / str(r), r, ALL_TARGETS, seed=r, scale=0.5) for r in (4, 9)
    ]
    turns, orders = InTurn(), SimpleQueue()

    def steps(device: OnDevice) -> list[torch.Tensor]:
        """Of one without adapter, which captures nothing, and of others; once the first wants no logits."""
        base_step = device.step(slice(1, 2))
        rows = [device.step(slice(0, 3), silent=[0]), device.step(slice(0, 3)), device.step(slice(2, 3))]
        return [base_step, *rows]

    def lead() -> tuple[OnDevice, list[torch.Tensor]]:
        device = rank(0, announce=orders.put)
        device.runner.warm_up([0] * 5)
        found = steps(device)
        orders.put(None)
        return device, found

    def follow() -> OnDevice:
        device = rank(1)
        while True:
            turns.runs.release()
            message = orders.get(timeout=PATIENCE_S)
            turns.runs.acquire()
            if message is None:
                return device
            if isinstance(message, CaptureSteps):
                device.runner.capture(message)
            else:
                device.runner.execute(message)

    def rank(dist_rank: int, **more) -> OnDevice:
        shard = shard_of(base, expert_parallel=SIZE, dist_rank=dist_rank)
        exchanges = Exchanges(Rank(turns, dist_rank))
        return OnDevice(Harness(base, adapters, shard=shard), PROMPTS, exchanges=exchanges, **more, **GRAPHS)

    def of_thread(run):
        with turns.runs, StandIn():
            return run()

    with stand_in_device(), ThreadPoolExecutor(SIZE) as pool:
        wanted = steps(OnDevice(Harness(base, adapters), PROMPTS, **GRAPHS))
        leading, following = pool.submit(of_thread, lead), pool.submit(of_thread, follow)
        follower, (leader, found) = following.result(timeout=PATIENCE_S), leading.result(timeout=PATIENCE_S)
    for ours, whole in zip(found, wanted, strict=True):
        assert torch.equal(ours, whole)
    for device in (leader, follower):
        shapes = [bool(shape.places) for shape in device.graphs._graphs]
        assert shapes == [False, True], "ahead, and when the first adapter came"
        assert device.graphs.num_replayed == 4
        assert all(len(graph.pieces) == 2 * 2 + 1 for graph in device.graphs._graphs.values())
    assert turns.num_asked[0] == turns.num_asked[1] > 0
