# SPDX-License-Identifier: Apache-2.0
"""The data loop over shared memory; a server_store whose layers are there when the test says so."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from moe_lora.dist.deltas.host_deltas import HostCompute
from moe_lora.dist.deltas.session import (
    HEADER_BYTES,
    ClientSession,
    FrameLayout,
    PeerFrames,
    Sent,
    SessionLostError,
    check_ids,
    lay_out_request,
)
from moe_lora.dist.lora_server import data_loop as serving
from moe_lora.dist.lora_server.data_loop import DataLoop, ServerSession, instance_number
from moe_lora.dist.transport import make_transport
from moe_lora.kernels.operands import SlotTable
from moe_lora.lora.row_routing import RoutedAdapter
from tests.dist.lora_server.cluster import CPU, until
from tests.dist.lora_server.shapes import model_shape
from tests.patience import PATIENCE_S

SHAPE = model_shape()
LAYOUT = FrameLayout(SHAPE, torch.float32, 4)
DEPTH = 4
GATE_UP = next(index for index, site in enumerate(SHAPE.sites) if site.num_experts)


class ServerAdapterStore:
    """Two slots of generation 5 without any matrix: deltas are zero."""

    def __init__(self) -> None:
        self.generation = np.full(2, 5)
        self.loaded = np.full((2, SHAPE.num_layers), 5)
        self.reading = threading.Lock()
        self.led, self.num_parts = True, 1
        self.slots = SlotTable(2, SHAPE.num_layers, SHAPE.num_entries, CPU)
        self.arena = torch.zeros(64, dtype=torch.uint8)
        self.contents = {slot: (5, RoutedAdapter(f"adapter {slot}", ())) for slot in (0, 1)}

    def is_stale(self, slot: np.ndarray, generation: np.ndarray) -> bool:
        return bool((generation < self.generation[slot]).any())

    def is_ready(self, slot: np.ndarray, generation: np.ndarray, layer: int) -> bool:
        return bool((self.loaded[slot, layer] == generation).all())


class Client:
    def __init__(self, stage: Stage, instance: str) -> None:
        self.transport = make_transport("shm", name=instance)
        requests = stage.transport.alloc(f"requests {instance}", DEPTH * LAYOUT.request_bytes, 1)
        answers = self.transport.alloc("answers", DEPTH * LAYOUT.answer_bytes, 1)
        self.session = ClientSession(
            self.transport, self.transport.attach(requests.descriptor()), answers, LAYOUT, DEPTH, 20.0
        )
        there = stage.transport.attach(answers.descriptor())
        frames = PeerFrames(stage.transport, there, LAYOUT.answer_bytes, DEPTH)
        self.dropped = threading.Event()
        self.served = ServerSession(instance, instance, requests, frames, LAYOUT, DEPTH)
        self.served.on_drop = self.dropped.set

    def send(
        self, layer: int = 0, site: int = 0, slot: int = 0, generation: int = 5, num_tokens: int = 1
    ) -> Sent:
        top_k = 1 if SHAPE.sites[site].num_experts else 0
        frame = self.session.frame()
        request = lay_out_request(frame, LAYOUT, layer, site, num_tokens, top_k, num_tokens)
        request.slot[:], request.generation[:] = slot, generation
        if request.ids is not None:
            request.ids[:] = 0
        request.x.zero_()
        return self.session.send(request)

    def answered(self, sent: Sent) -> bool:
        delta = self.session.take(sent)
        return bool((delta == 0).all())

    def refused(self, sent: Sent) -> bool:
        try:
            self.session.take(sent)
        except SessionLostError:
            return not self.session.broken
        return False


class Stage:
    """A data loop that is not running yet, and its clients."""

    def __init__(self, host: HostCompute | None = None) -> None:
        self.transport = make_transport("shm", name="server")
        self.server_store = ServerAdapterStore()
        self.loop = DataLoop(SHAPE, self.server_store, self.transport, host=host)
        self.clients: list[Client] = []
        self.order: list[str] = []
        serve = self.loop._serve

        def record(session: ServerSession, request) -> None:
            self.order.append(session.name)
            serve(session, request)

        self.loop._serve = record
        self._thread = threading.Thread(target=self.loop.run, daemon=True)

    def add(self, instance: str) -> Client:
        client = Client(self, instance)
        self.clients.append(client)
        self.loop.add(client.served)
        return client

    def run(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self.loop.stop()
        if self._thread.ident is not None:
            self._thread.join(PATIENCE_S)
            assert not self._thread.is_alive()
        for client in self.clients:
            client.transport.close()
        self.transport.close()


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    made.close()


def test_smallest_and_largest_requests_of_each_site_run_before_the_first_comes(stage, monkeypatch):
    """With small ranks and large ones, where some of a token's experts are elsewhere and where none is."""
    seen, compute = set(), serving.request_deltas

    def note(request, *operands, max_lora_rank, **more):
        check_ids(request, LAYOUT)
        assert (request.slot == -1).all()
        top_k = 0 if request.ids is None else request.ids.shape[1]
        seen.add((request.site, len(request.slot), top_k, max_lora_rank > 64))
        compute(request, *operands, max_lora_rank=max_lora_rank, **more)

    monkeypatch.setattr(serving, "request_deltas", note)
    sites = {site: SHAPE.sites[site].num_experts > 0 for site in (0, GATE_UP)}
    stage.loop.warm_up(LAYOUT, sites)
    sizes = {False: [(1, 0), (4, 0)], True: [(1, 1), (4, 1), (1, 2), (2, 2)]}
    large = (False, True)
    assert seen == {(site, *size, rank) for site in sites for size in sizes[sites[site]] for rank in large}
    assert stage.loop.num_requests == 0


def test_instances_take_turns(stage):
    one, other = stage.add("one"), stage.add("other")
    sent = [one.send() for _ in range(4)] + [other.send() for _ in range(2)]
    stage.run()
    until(lambda: len(stage.order) == 6)
    assert stage.order == ["one", "other", "one", "other", "one", "one"]
    assert all(one.answered(request) for request in sent[:4])


def test_turn_announced_often_counts_once_and_ends_when_the_instance_is_served(stage):
    one, other = stage.add("one"), stage.add("other")
    for client in (one, one, other, other):
        client.send(site=GATE_UP)
    stage.loop.turns.bytes.numpy().view(np.int64)[:3] = instance_number("other")
    stage.loop.turns.set_signal(0, 3)
    stage.run()
    until(lambda: len(stage.order) == 4)
    assert stage.order == ["other", "one", "other", "one"]


def test_request_whose_layer_is_loading_lets_others_pass(stage):
    early, late = stage.add("early"), stage.add("late")
    stage.server_store.loaded[0, 1] = 4
    waiting = early.send(layer=1)
    behind = early.send(layer=0)
    passing = [late.send(layer=layer, slot=1) for layer in (0, 1, 2)]
    stage.run()
    assert all(late.answered(request) for request in passing)
    assert stage.order == ["late"] * 3
    stage.server_store.loaded[0, 1] = 5
    stage.loop.wake()
    assert early.answered(waiting)
    assert early.answered(behind)


class HeldHost:
    """A host that computes two tokens in time, a piece each time it is told to; the deltas are zero.

    pieces: the adapter and the number of tokens of each piece begun.
    """

    num_tokens = 2

    def __init__(self) -> None:
        self.pieces: list[tuple[str, int]] = []
        self.go_on = threading.Semaphore(0)

    def compute(self, request, adapters, row_adapter, out) -> None:
        [adapter] = {adapters[index].content_hash for index in row_adapter.tolist()}
        self.pieces.append((adapter, len(row_adapter)))
        assert self.go_on.acquire(timeout=PATIENCE_S)
        assert out.shape[0] == request.num_rows == len(request.slot)
        out.zero_()

    def close(self) -> None:
        """Nothing is held."""


@pytest.fixture
def hosted() -> Iterator[tuple[Stage, HeldHost]]:
    """Layer 1 of both slots is on its way; the host has their adapters."""
    host = HeldHost()
    made = Stage(host)
    made.server_store.loaded[:, 1] = 4
    yield made, host
    host.go_on.release(100)
    made.close()


@pytest.mark.parametrize("site", [0, GATE_UP])
def test_instances_take_turns_with_the_host_and_warm_ones_wait_for_none(hosted, site):
    stage, host = hosted
    long, short, warm = (stage.add(name) for name in ("long", "short", "warm"))
    stage.run()
    first = long.send(layer=1, site=site, slot=0, num_tokens=4)
    until(lambda: host.pieces == [("adapter 0", 2)])
    second = short.send(layer=1, site=site, slot=1)
    until(lambda: short.served in stage.loop._host)
    assert all(warm.answered(warm.send(layer=layer, slot=1)) for layer in (0, 2, 0)), "while the host is busy"
    assert host.pieces == [("adapter 0", 2)]
    host.go_on.release(2)
    assert short.answered(second), "after one piece of the other instance"
    until(lambda: host.pieces == [("adapter 0", 2), ("adapter 1", 1), ("adapter 0", 2)])
    host.go_on.release()
    assert long.answered(first)
    assert (second.num_host_rows, first.num_host_rows, stage.loop.num_host_rows) == (1, 4, 5)


def test_host_computes_no_more_of_a_request_whose_layer_has_come(hosted):
    stage, host = hosted
    client = stage.add("one")
    stage.run()
    sent = client.send(layer=1, num_tokens=4)
    until(lambda: host.pieces == [("adapter 0", 2)])
    stage.server_store.loaded[:, 1] = 5
    stage.loop.wake()
    assert client.answered(sent), "by the device, while the host is at its first piece"
    stage.server_store.loaded[:, 1] = 4
    other = client.send(layer=1, slot=1)
    host.go_on.release(2)
    assert client.answered(other)
    assert host.pieces == [("adapter 0", 2), ("adapter 1", 1)]
    assert stage.loop.num_host_rows == 1


@pytest.mark.parametrize("when", ["computed", "begun"])
def test_adapter_that_the_host_can_not_compute_is_refused_and_logged_once(hosted, monkeypatch, caplog, when):
    stage, host = hosted

    def fail(*operands) -> None:
        raise RuntimeError("no memory today")

    if when == "computed":
        host.compute = fail
    else:
        monkeypatch.setattr("moe_lora.dist.deltas.host_deltas.OnHost", fail)
    client, other = stage.add("one"), stage.add("other")
    stage.run()
    for _ in range(3):
        assert client.refused(client.send(layer=1))
        assert other.answered(other.send(layer=0, slot=1))
    [logged] = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "adapter 0" in logged
    assert "no memory today" in logged


def test_request_before_its_load_command_waits_only_while_there_is_a_leader(stage):
    client = stage.add("one")
    first, second = client.send(generation=6), client.send()
    stage.run()
    until(lambda: stage.loop._wake.read_signal(0) > 0)
    assert not stage.order
    stage.server_store.led = False
    stage.loop.wake()
    assert client.refused(first)
    assert client.answered(second), "what is here goes on being served"
    assert stage.loop.num_stale == 1


@pytest.mark.parametrize(("slot", "generation"), [(0, 4), (2, 5), (-1, 5)])
def test_rows_of_other_content_are_refused(stage, slot, generation):
    client = stage.add("one")
    sent = client.send(slot=slot, generation=generation)
    stage.run()
    assert client.refused(sent)


def test_content_that_leaves_while_it_is_read_is_refused(stage, monkeypatch):
    def evicting(*_: object, kernel: str) -> None:
        stage.server_store.generation[0] = 6

    monkeypatch.setattr("moe_lora.dist.lora_server.data_loop.request_deltas", evicting)
    client = stage.add("one")
    sent = client.send()
    stage.run()
    assert client.refused(sent)


@pytest.mark.parametrize("error", [ValueError, RuntimeError, MemoryError, IndexError])
def test_adapter_whose_deltas_fail_is_refused_and_no_session_ends(stage, monkeypatch, caplog, error):
    compute = serving.request_deltas

    def fail_for_slot_1(request, *operands, **more):
        if 1 in request.slot:
            raise error("these matrices can't be")
        compute(request, *operands, **more)

    monkeypatch.setattr(serving, "request_deltas", fail_for_slot_1)
    one, other = stage.add("one"), stage.add("other")
    stage.run()
    for _ in range(DEPTH + 1):
        bad, good, elsewhere = one.send(slot=1), one.send(), other.send()
        assert one.refused(bad)
        assert one.answered(good)
        assert other.answered(elsewhere)
    assert not one.dropped.is_set()
    assert stage.loop.num_stale == DEPTH + 1
    [logged] = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "adapter 1" in logged
    assert "can't be" in logged


@pytest.mark.parametrize("bad", ["header", "ids"])
def test_client_that_sends_nonsense_is_dropped_and_others_are_served(stage, bad):
    wrong, right = stage.add("wrong"), stage.add("right")
    request = lay_out_request(wrong.session.frame(), LAYOUT, 0, GATE_UP, 1, 1, 1)
    request.ids[:] = 8
    if bad == "header":
        wrong.served.requests.bytes[:HEADER_BYTES] = 255
    wrong.session.send(request)
    sent = right.send()
    stage.run()
    assert right.answered(sent)
    until(lambda: wrong.dropped.is_set() and wrong.served.left.is_set())


def test_client_that_is_gone_is_removed(stage):
    gone, here = stage.add("gone"), stage.add("here")
    gone.send()
    gone.transport.close()
    sent = here.send()
    stage.run()
    assert here.answered(sent)
    until(lambda: gone.served.left.is_set())
    assert gone.dropped.is_set()
    assert not here.dropped.is_set()


def test_memory_of_a_removed_session_is_given_back_once_the_loop_is_past_it(stage):
    client = stage.add("one")
    stage.loop.remove(client.served)
    assert not client.served.left.is_set()
    stage.run()
    assert client.served.left.wait(PATIENCE_S)
    stage.loop.stop()
    stage._thread.join(PATIENCE_S)
    late = stage.add("late")
    stage.loop.remove(late.served)
    assert late.served.left.is_set(), "the loop has ended"


def test_stage_follows_the_turns_of_its_first_rank(stage):
    one, other = stage.add("one"), stage.add("other")
    for client in (one, one, other, other):
        client.send()
    turns = stage.transport.attach(stage.loop.turns.descriptor())
    for number, name in enumerate(["other", "other", "absent", "one"]):
        entry = torch.tensor([instance_number(name)])
        stage.transport.put_signal(turns, number * 8, entry, 0, number + 1)
    stage.run()
    until(lambda: len(stage.order) == 4)
    assert stage.order == ["other", "other", "one", "one"]


def test_first_rank_announces_whose_expert_rows_it_serves(stage):
    follower = make_transport("shm", name="follower")
    turns = follower.alloc("turns", 64 * 8, 1)
    told = stage.transport.attach(turns.descriptor())
    stage.loop.tell(told, 7)
    one = stage.add("one")
    sent = [one.send(site=GATE_UP), one.send(site=0), one.send(site=GATE_UP)]
    stage.run()
    assert all(one.answered(request) for request in sent)
    assert turns.read_signal(0) == 9
    assert turns.bytes.view(torch.int64)[7:9].tolist() == [instance_number("one")] * 2
    stage.loop.tell_no_more(told)
    assert one.answered(one.send(site=GATE_UP))
    assert turns.read_signal(0) == 9
    follower.close()
