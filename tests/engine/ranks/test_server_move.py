# SPDX-License-Identifier: Apache-2.0
"""The followers of an instance move to the next LoRA Server at the step of rank 0's order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import SimpleNamespace

import pytest

from moe_lora.config import LoraServerConfig
from moe_lora.core.errors import LoraServerError
from moe_lora.core.host import OwnFolder
from moe_lora.engine.ranks.follower import _obey
from moe_lora.engine.ranks.followers import Followers, RankReport
from moe_lora.engine.ranks.server_move import FollowersMove
from moe_lora.engine.step.step_batch import StepBatch
from tests.dist.lora_server.cluster import until
from tests.patience import PATIENCE_S

FORMER = LoraServerConfig(address="/f/former", layout="EP2-PP1", store_dir="/f/store")
NEXT = replace(FORMER, address="/f/next", layout="EP4-PP1")


class Client:
    """A connection to a server."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()


class OtherRank:
    """A follower without a model.  steps: the server of each step.  gate: a connection waits for it."""

    def __init__(self, dist_rank: int) -> None:
        self.dist_rank = dist_rank
        self.now = Client(FORMER.address)
        self.steps: list[str] = []
        self.reached: list[Client] = []
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None

    def reach(self, server: LoraServerConfig, limit_s: float) -> Client:
        assert self.gate.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        self.reached.append(Client(server.address))
        return self.reached[-1]

    def move_to(self, server: LoraServerConfig, reached: Client) -> Client:
        assert server.address == reached.address
        former, self.now = self.now, reached
        return former

    lora_server = None

    def execute(self, batch: StepBatch) -> None:
        self.steps.append(self.now.address)

    def copier(self, find: object) -> None:
        """None: no orders of copies."""

    def mover(self, on_done: object) -> None:
        """As `copier`."""

    def obey(self, connection: Connection, directory) -> None:
        with pytest.raises(EOFError):
            _obey(connection, self, SimpleNamespace(execute=self.execute), None, directory)


class Instance:
    """Rank 0 and two followers, which are threads."""

    def __init__(self) -> None:
        self.ranks = [OtherRank(1), OtherRank(2)]
        folder, ends = OwnFolder(), [Pipe() for _ in self.ranks]
        self.followers = Followers([here for here, _ in ends], folder)
        self._threads = [
            threading.Thread(target=rank.obey, args=(there, folder.path))
            for rank, (_, there) in zip(self.ranks, ends, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def step(self) -> None:
        """A step that all ranks compute."""
        self.followers.tell(object.__new__(StepBatch))
        self.settle()

    def settle(self) -> None:
        """Until the followers have carried out earlier orders."""
        self.followers.tell(RankReport())
        self.followers.settle(PATIENCE_S)

    def close(self) -> None:
        for rank in self.ranks:
            rank.gate.set()
        self.followers.close()
        for thread in self._threads:
            thread.join(PATIENCE_S)


@pytest.fixture
def instance() -> Iterator[Instance]:
    found = Instance()
    yield found
    found.close()


def waiting(move: FollowersMove) -> tuple[threading.Thread, list[Exception]]:
    errors: list[Exception] = []

    def wait() -> None:
        try:
            move.wait()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread, errors


def test_steps_go_on_while_a_follower_connects_and_all_move_between_the_same_steps(instance):
    late = instance.ranks[1]
    late.gate.clear()
    move = FollowersMove(instance.followers, NEXT, PATIENCE_S)
    thread, errors = waiting(move)
    until(lambda: instance.ranks[0].reached)
    instance.step()
    instance.step()
    assert thread.is_alive()
    late.gate.set()
    thread.join(PATIENCE_S)
    assert not errors
    instance.step()
    formers = [rank.now for rank in instance.ranks]
    move.move()
    instance.step()
    for rank, former in zip(instance.ranks, formers, strict=True):
        assert rank.steps == [FORMER.address] * 3 + [NEXT.address]
        assert former.closed.wait(PATIENCE_S)
        assert not rank.now.closed.is_set()


def test_a_follower_without_a_connection_keeps_all_at_the_former_server(instance):
    reached, failing = instance.ranks
    failing.error = LoraServerError("nobody answers there")
    move = FollowersMove(instance.followers, NEXT, PATIENCE_S)
    with pytest.raises(LoraServerError, match=r"rank 2 .* does not reach .*: nobody answers there"):
        move.wait()
    move.close()
    instance.step()
    assert [rank.steps for rank in instance.ranks] == [[FORMER.address]] * 2
    [client] = reached.reached
    assert client.closed.wait(PATIENCE_S)
    failing.error = None
    again = FollowersMove(instance.followers, NEXT, PATIENCE_S)
    again.wait()
    again.move()
    instance.step()
    assert [rank.now.address for rank in instance.ranks] == [NEXT.address] * 2


def test_a_move_that_is_given_up_closes_connections_that_come_later(instance):
    """And a second move, begun meanwhile, has its own."""
    late = instance.ranks[0]
    late.gate.clear()
    first = FollowersMove(instance.followers, NEXT, PATIENCE_S)
    first.close()
    second = FollowersMove(instance.followers, NEXT, PATIENCE_S)
    instance.step()
    late.gate.set()
    second.wait()
    second.move()
    instance.settle()
    until(lambda: len(late.reached) == 2)
    for rank in instance.ranks:
        until(lambda rank=rank: [one.closed.is_set() for one in rank.reached].count(True) == 1)
        assert not rank.now.closed.is_set()


def test_a_problem_of_one_follower_ends_the_wait_for_another(instance):
    silent, failing = instance.ranks
    silent.gate.clear()
    failing.error = LoraServerError("nobody answers there")
    with pytest.raises(LoraServerError, match=r"rank 2 .*: nobody answers there"):
        FollowersMove(instance.followers, NEXT, PATIENCE_S).wait()


def test_a_silent_follower_and_the_end_of_an_instance_end_the_wait(instance):
    instance.ranks[0].gate.clear()
    with pytest.raises(LoraServerError, match=r"rank 1 .* no connection within 0 s"):
        FollowersMove(instance.followers, NEXT, 0.0).wait()
    thread, errors = waiting(FollowersMove(instance.followers, NEXT, PATIENCE_S))
    instance.followers.close()
    thread.join(PATIENCE_S)
    assert [type(one) for one in errors] == [LoraServerError]
