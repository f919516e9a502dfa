# SPDX-License-Identifier: Apache-2.0
"""An order ends once it has ended on all ranks."""

from __future__ import annotations

import pickle
from multiprocessing import Pipe
from threading import Thread
from types import SimpleNamespace

import numpy as np
import pytest

from moe_lora.core.errors import EngineDeadError
from moe_lora.core.host import OwnFolder
from moe_lora.engine.ranks.follower import Answers
from moe_lora.engine.ranks.followers import Done, Followers, LoadedLayers, OrderEnded, shared_layers


@pytest.fixture
def two_followers():
    pipes = [Pipe(), Pipe()]
    yield Followers([here for here, _ in pipes]), [Answers(there) for _, there in pipes]
    for here, there in pipes:
        here.close()
        there.close()


def test_alone_an_order_ends_with_rank_0():
    assert Followers().ended_everywhere([(3, None)]) == [(3, None)]
    assert not Followers().lagging


def test_an_order_ends_with_the_last_rank_and_fails_with_any(two_followers):
    followers, [first, second] = two_followers
    first.send(OrderEnded(1))
    assert followers.ended_everywhere([]) == []
    assert followers.lagging
    assert followers.ended_everywhere([(1, None), (2, None)]) == []
    second.send(OrderEnded(1))
    assert followers.ended_everywhere([]) == [(1, None)]
    error = OSError("the disk is gone")
    second.send(OrderEnded(2, error))
    first.send(OrderEnded(2))
    [(number, found)] = followers.ended_everywhere([])
    assert number == 2
    assert isinstance(found, OSError)
    assert str(found) == str(error)
    assert not followers.lagging


def test_ends_beside_an_answer_are_kept(two_followers):
    followers, [first, second] = two_followers
    first.send(OrderEnded(1))
    for one in (first, second):
        one.send(Done())
    followers.settle()
    second.send(OrderEnded(1))
    assert followers.ended_everywhere([(1, None)]) == [(1, None)]


def test_ends_wait_while_another_thread_reads_answers(two_followers):
    followers, answers = two_followers
    waiting = Thread(target=followers.settle)
    waiting.start()
    while not followers._reading.locked():
        continue
    assert followers.ended_everywhere([(1, None)]) == []
    assert followers.lagging
    for one in answers:
        one.send(OrderEnded(1))
        one.send(Done())
    waiting.join()
    assert followers.ended_everywhere([]) == [(1, None)]


def test_layers_of_followers_are_found_in_their_files():
    with OwnFolder() as folder:
        followers = Followers([None], SimpleNamespace(path=folder))
        there = shared_layers(folder, 1, (3, 5))
        own = np.zeros((3, 5), dtype=bool)
        layers = followers.loaded_layers(own, 4)
        own[2] = there[2, 1] = True
        assert layers[2].tolist() == [False, True, False, False]
        layers.clear(2)
        assert not there.any()


def test_follower_that_is_gone_ends_the_wait():
    here, there = Pipe()
    there.close()
    with pytest.raises(EngineDeadError, match="rank 1 of this instance"):
        Followers([here]).ended_everywhere([])


class OwnError(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def test_error_that_cannot_be_pickled_keeps_its_name_and_text():
    here, there = Pipe()
    Answers(there).send(OrderEnded(1, OwnError("a", "b")))
    assert str(pickle.loads(here.recv_bytes()).error) == "OwnError: a and b"


def test_a_layer_is_loaded_once_all_ranks_have_it():
    own, other = np.zeros((2, 3), dtype=bool), np.zeros((2, 3), dtype=bool)
    layers = LoadedLayers(own, [other])
    own[1, :2] = other[1, 1:] = True
    assert layers[1].tolist() == [False, True, False]
    layers.clear(1)
    own[1] = True
    assert layers[1].tolist() == [False, False, False]
