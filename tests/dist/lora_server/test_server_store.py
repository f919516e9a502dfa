# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from moe_lora.adapters.host_store import HostStore
from moe_lora.core.errors import AdapterError, ConfigError, StorageError
from moe_lora.core.partition import Layout, Partition
from moe_lora.dist.lora_server.messages import EvictOrder, LoadOrder, Memory, Order, ResizeOrder
from moe_lora.dist.lora_server.orders import Orders
from moe_lora.dist.lora_server.rank_memory import shard_pages
from moe_lora.dist.lora_server.server_store import NUM_TRIES, PAUSE_S, ServerAdapterStore, _allocate
from tests.dist.lora_server.cluster import CPU, random_adapter, until
from tests.dist.lora_server.shapes import model_shape
from tests.patience import PATIENCE_S

SHAPE = model_shape()
PARTITION = Partition(SHAPE, Layout.parse("EP2-PP1"), 1)
PAGE_BYTES, PAGES_PER_LAYER, CAPACITY = 256, 64, 3
LAST = SHAPE.num_layers - 1


class Gate:
    """Lets the loader get on layer by layer: it may finish as many as it was let."""

    def __init__(self) -> None:
        self._passes = threading.Semaphore(0)

    def __call__(self) -> None:
        if threading.current_thread().name == "adapter-loads":
            assert self._passes.acquire(timeout=PATIENCE_S)

    def let(self, num_layers: int = 1) -> None:
        self._passes.release(num_layers)


FIRST = 1000


def make_store(on_progress=lambda: None, load_bytes_per_s: float | None = None) -> ServerAdapterStore:
    made = ServerAdapterStore(
        SHAPE,
        PARTITION,
        0,
        Memory(CAPACITY, ((CAPACITY + 2) * PAGES_PER_LAYER * SHAPE.num_layers,), PAGE_BYTES),
        CPU,
        load_bytes_per_s=load_bytes_per_s,
    )
    made.on_progress = on_progress
    return made


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def server_store(gate) -> Iterator[ServerAdapterStore]:
    made = make_store(gate)
    yield made
    gate.let(1000)
    made.stop()


def runs(place: int) -> dict[int, tuple[int, int]]:
    first = place * SHAPE.num_layers
    return {n: ((first + n) * PAGES_PER_LAYER, PAGES_PER_LAYER) for n in range(SHAPE.num_layers)}


def ready(server_store: ServerAdapterStore, slot: int, generation: int) -> list[bool]:
    """Of each layer."""
    pair = np.array([slot], dtype=np.int32), np.array([generation])
    return [server_store.is_ready(*pair, layer) for layer in range(SHAPE.num_layers)]


def stale(server_store: ServerAdapterStore, slot: int, generation: int) -> bool:
    return server_store.is_stale(np.array([slot], dtype=np.int32), np.array([generation]))


def test_shards_of_the_adapters_here_fit_the_runs():
    pages = shard_pages(random_adapter("a", SHAPE), PARTITION, PAGE_BYTES)
    assert max(pages[0].values()) <= PAGES_PER_LAYER


def test_first_layers_are_ready_before_the_last_are_there(server_store, gate):
    server_store.load(1, 5, random_adapter("a", SHAPE), runs(0))
    until(lambda: ready(server_store, 1, 5) == [True, False, False, False])
    gate.let(2)
    until(lambda: ready(server_store, 1, 5) == [True, True, True, False])
    assert not stale(server_store, 1, 5)
    gate.let(1)
    until(lambda: all(ready(server_store, 1, 5)))


def test_newcomer_gets_layers_between_those_of_another(server_store, gate):
    server_store.load(0, 1, random_adapter("a", SHAPE), runs(0))
    until(lambda: ready(server_store, 0, 1)[0])
    server_store.load(1, 1, random_adapter("b", SHAPE), runs(1))
    gate.let(2)
    until(lambda: ready(server_store, 1, 1)[0])
    assert not ready(server_store, 0, 1)[LAST]


def test_layers_that_an_adapter_has_nothing_of_are_there_at_once(server_store):
    some = {layer: run for layer, run in runs(0).items() if layer == LAST}
    server_store.load(0, 1, random_adapter("a", SHAPE), some)
    assert ready(server_store, 0, 1)[:LAST] == [True] * LAST


def test_load_under_way_goes_on_when_slots_are_added(server_store, gate):
    server_store.start_over(FIRST)
    server_store.load(0, FIRST + 1, random_adapter("a", SHAPE), runs(0))
    until(lambda: ready(server_store, 0, FIRST + 1)[0])
    server_store.grow(CAPACITY + 2)
    gate.let(100)
    until(lambda: all(ready(server_store, 0, FIRST + 1)))
    added = CAPACITY + 1
    assert not stale(server_store, added, FIRST + 1)
    assert stale(server_store, added, FIRST - 1), "an earlier leader's"
    assert not any(ready(server_store, added, FIRST + 1))
    server_store.load(added, FIRST + 1, random_adapter("b", SHAPE), runs(1))
    until(lambda: all(ready(server_store, added, FIRST + 1)))
    server_store.grow(1)
    assert len(server_store.generation) == CAPACITY + 2, "slots are never taken back"


def test_evicted_while_loading_is_stale_and_never_ready(server_store, gate):
    server_store.load(0, 1, random_adapter("a", SHAPE), runs(0))
    until(lambda: ready(server_store, 0, 1)[0])
    server_store.evict(0, 1)
    assert stale(server_store, 0, 1)
    server_store.load(0, 2, random_adapter("b", SHAPE), runs(1))
    gate.let(100)
    until(lambda: all(ready(server_store, 0, 2)))
    assert not ready(server_store, 0, 1)[LAST]
    assert not stale(server_store, 0, 2)


def test_late_load_and_late_eviction_of_old_content_change_nothing(server_store, gate):
    gate.let(100)
    server_store.evict(0, 4)
    server_store.load(0, 5, random_adapter("b", SHAPE), runs(0))
    until(lambda: all(ready(server_store, 0, 5)))
    server_store.load(0, 4, random_adapter("a", SHAPE), runs(0))
    server_store.evict(0, 4)
    assert all(ready(server_store, 0, 5))
    assert not stale(server_store, 0, 5)
    assert server_store.slots.lora_rank[0].any()


@pytest.mark.parametrize("first_generation", [100, 1], ids=["later", "clock set back"])
def test_after_starting_over_nothing_of_before_is_ready(server_store, gate, first_generation):
    gate.let(100)
    server_store.load(0, 5, random_adapter("a", SHAPE), runs(0))
    until(lambda: all(ready(server_store, 0, 5)))
    server_store.start_over(first_generation)
    assert not any(ready(server_store, 0, 5))
    assert stale(server_store, 0, 5) == (first_generation > 5)
    server_store.load(0, first_generation + 1, random_adapter("b", SHAPE), runs(0))
    until(lambda: all(ready(server_store, 0, first_generation + 1)))


def test_layer_written_before_starting_over_does_not_count_for_the_same_load_sent_again(monkeypatch):
    gate, pauses, sleep = Gate(), threading.Semaphore(0), time.sleep

    def pause(duration_s: float) -> None:
        if threading.current_thread().name != "adapter-loads":
            sleep(duration_s)
            return
        pauses.release()
        gate()

    monkeypatch.setattr(time, "sleep", pause)
    server_store = make_store(load_bytes_per_s=1e9)
    server_store.load(0, 5, random_adapter("a", SHAPE), runs(0))
    assert pauses.acquire(timeout=PATIENCE_S), "the first layer is written, and waits for the rate limit"
    server_store.start_over(1)
    server_store.load(0, 5, random_adapter("a", SHAPE), runs(0))
    gate.let(1)
    assert pauses.acquire(timeout=PATIENCE_S), (
        "the old load's step is over, the new one's first layer is written"
    )
    assert not any(ready(server_store, 0, 5))
    gate.let(1000)
    until(lambda: all(ready(server_store, 0, 5)))
    server_store.stop()


class Staged:
    """Stands for page-locked buffers and the loader's stream; notes what they are used for.

    meanwhile: called once in a thread of its own, while the first layer is copied.
    """

    def __init__(self, meanwhile: Callable[[], object]) -> None:
        self.noted: list[str] = []
        self._meanwhile = [meanwhile]

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self.noted.append("copy")
        with ThreadPoolExecutor(1) as other:
            for meanwhile in self._meanwhile:
                other.submit(meanwhile).result(timeout=PATIENCE_S)
        self._meanwhile.clear()
        target.copy_(source)

    def wait_stream(self, other: str) -> None:
        self.noted.append(f"wait for {other}")

    def synchronize(self) -> None:
        self.noted.append("synchronize")


def staged_store(meanwhile: Callable[[ServerAdapterStore], object], monkeypatch) -> ServerAdapterStore:
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: "the default stream")
    made = make_store()
    made._stream = made._staging = Staged(lambda: meanwhile(made))
    return made


def test_staged_layers_are_the_same_bytes_and_nobody_waits_for_their_copies(monkeypatch):
    plain, staged = make_store(), staged_store(lambda store: store.evict(1, 1), monkeypatch)
    for server_store in (plain, staged):
        server_store.arena.zero_()
        server_store.load(0, 5, random_adapter("a", SHAPE), runs(0))
        until(lambda one=server_store: all(ready(one, 0, 5)))
        server_store.stop()
    assert torch.equal(staged.arena, plain.arena)
    assert staged.arena.any()
    assert torch.equal(staged.slots.a_offset, plain.slots.a_offset)
    others = "wait for the default stream"
    assert staged._staging.noted == [others, "copy", "synchronize", others] * SHAPE.num_layers
    assert stale(staged, 1, 1)


def test_layer_whose_adapter_leaves_while_it_is_copied_is_pointed_at_by_nothing(monkeypatch):
    server_store = staged_store(lambda store: store.evict(0, 5), monkeypatch)
    server_store.load(0, 5, random_adapter("a", SHAPE), runs(0))
    until(lambda: server_store._staging.noted[-1:] == ["synchronize"])
    server_store.load(0, 7, random_adapter("b", SHAPE), {LAST: runs(1)[LAST]})
    until(lambda: all(ready(server_store, 0, 7)))
    server_store.stop()
    assert not server_store.slots.lora_rank[0, :LAST].any()
    assert server_store.slots.lora_rank[0, LAST].any()


def test_layer_that_can_not_be_loaded_makes_its_adapter_stale_and_the_next_one_loads(server_store, gate):
    gate.let(100)
    too_small = {layer: (first, 1) for layer, (first, _) in runs(0).items()}
    server_store.load(0, 1, random_adapter("a", SHAPE), too_small)
    until(lambda: stale(server_store, 0, 1))
    server_store.load(0, 2, random_adapter("a", SHAPE), runs(0))
    until(lambda: all(ready(server_store, 0, 2)))


@dataclass
class Rank:
    """A rank without the content of "a", and what it asked for."""

    orders: Orders
    server_store: ServerAdapterStore
    store: HostStore
    needed: list[str]

    def hear(self, order: Order) -> None:
        asyncio.run(self.orders.hear(order))

    def regain(self, file: bytes) -> None:
        """The content comes."""
        self.store.adopt("a", [file])
        asyncio.run(self.orders.regained("a"))


@pytest.fixture
def rank(tmp_path) -> Iterator[Rank]:
    store, server_store, needed = HostStore(tmp_path / "rank"), make_store(), []
    yield Rank(Orders(server_store, store, needed.append), server_store, store, needed)
    server_store.stop()


@pytest.fixture
def file(tmp_path) -> bytes:
    leaders = HostStore(tmp_path / "leader")
    leaders.put(random_adapter("a", SHAPE))
    return leaders.path("a").read_bytes()


def load_order(generation: int) -> LoadOrder:
    return LoadOrder("a", 0, generation, runs(0))


def test_content_that_is_not_here_is_asked_for_and_then_loaded(rank, file):
    rank.hear(load_order(1))
    assert rank.needed == ["a"]
    assert not any(ready(rank.server_store, 0, 1))
    rank.regain(file)
    until(lambda: all(ready(rank.server_store, 0, 1)))


def test_content_that_comes_after_the_eviction_is_not_brought_back(rank, file):
    rank.hear(load_order(1))
    rank.hear(EvictOrder(0, 1))
    rank.regain(file)
    rank.hear(load_order(2))
    until(lambda: all(ready(rank.server_store, 0, 2)))
    assert stale(rank.server_store, 0, 1)


@pytest.mark.parametrize("end", ["content", "evict", "new leader", "late"])
def test_content_on_the_way_is_refused_until_its_load(rank, file, end):
    progress = []
    rank.server_store.on_progress = lambda: progress.append(stale(rank.server_store, 0, 1))
    assert not stale(rank.server_store, 0, 1)
    rank.hear(load_order(1))
    assert progress == [True], "the data loop looks again"
    assert not stale(rank.server_store, 0, 2)
    assert not stale(rank.server_store, 1, 1)
    if end == "content":
        rank.regain(file)
        assert not stale(rank.server_store, 0, 1), "its layers come"
        rank.server_store.await_content(0, 1, rank.server_store.epoch)
        assert not stale(rank.server_store, 0, 1), "too late"
    elif end == "evict":
        rank.hear(EvictOrder(0, 1))
        assert stale(rank.server_store, 0, 1)
        assert not stale(rank.server_store, 0, 2)
    elif end == "new leader":
        rank.orders.start_over(0)
        assert not stale(rank.server_store, 0, 1)
    else:
        rank.orders.start_over(0)
        rank.server_store.await_content(0, 1, rank.server_store.epoch - 1)
        assert not stale(rank.server_store, 0, 1)


@pytest.mark.parametrize("outcome", ["read", "damaged"])
def test_load_that_hangs_across_a_new_session_with_the_leader_writes_over_nobody(
    rank, file, monkeypatch, outcome
):
    """Meanwhile the leader has evicted the adapter, and given its pages to another in a slot of its own."""
    reading, may_read, failures = threading.Event(), threading.Event(), []
    rank.server_store.on_failure = lambda *failure: failures.append(failure)
    rank.store.adopt("a", [file])
    get = rank.store.get

    def hang(content_hash: str, name: str):
        reading.set()
        assert may_read.wait(PATIENCE_S)
        if outcome == "damaged":
            raise AdapterError("no packed adapter")
        return get(content_hash, name)

    monkeypatch.setattr(rank.store, "get", hang)

    async def hear() -> None:
        rank.orders.start_over(0)
        late = asyncio.create_task(rank.orders.hear(load_order(5)))
        await asyncio.to_thread(reading.wait, PATIENCE_S)
        await asyncio.to_thread(rank.orders.start_over, 0)
        rank.server_store.load(1, 1, random_adapter("b", SHAPE), runs(0))
        await asyncio.to_thread(until, lambda: all(ready(rank.server_store, 1, 1)))
        before = rank.server_store.arena.clone()
        may_read.set()
        await late
        assert not stale(rank.server_store, 0, 1), "the slot has heard nothing of the former session"
        assert not rank.server_store._loading
        assert torch.equal(rank.server_store.arena, before)

    asyncio.run(hear())
    assert (failures, rank.needed) == ([], [])
    assert "a" in rank.store


def test_damaged_content_is_asked_for_again_and_loaded(rank, file):
    async def hear() -> None:
        await rank.orders.hear(load_order(1))
        for number, content in enumerate((b"no safetensors", file[:-1], file)):
            while len(rank.needed) <= number:
                await asyncio.sleep(0.01)
            rank.store.adopt("a", [content])
            await rank.orders.regained("a")

    asyncio.run(hear())
    until(lambda: all(ready(rank.server_store, 0, 1)))
    assert rank.needed == ["a"] * 3


def test_a_file_in_a_slot_is_used_however_long_ago_it_was_read(rank, file):
    rank.store.adopt("a", [file])
    rank.hear(load_order(1))
    until(lambda: all(ready(rank.server_store, 0, 1)))
    for is_used in (True, False):
        os.utime(rank.store.path("a"), (1, 1))
        rank.store.sweep_s = 0.0
        rank.store._mapped.clear()  # a load ends
        rank.store.adopt("b", [file])
        assert ("a" in rank.store) == is_used
        rank.hear(EvictOrder(0, 1))


@pytest.mark.parametrize("problem", ["damaged", "no room", "evicted"])
def test_content_that_can_not_be_had_is_given_up_after_some_tries(rank, file, problem):
    failures: list[tuple] = []
    rank.server_store.on_failure = lambda *failure: failures.append(failure)

    async def hear() -> None:
        await rank.orders.hear(load_order(1))
        for number in range(NUM_TRIES):
            while len(rank.needed) <= number:
                await asyncio.sleep(0.01)
            if problem == "damaged":
                rank.store.adopt("a", [b"no safetensors"])
                await rank.orders.regained("a")
            else:
                await rank.orders.refused("a", StorageError("no room"))
            if problem == "evicted":
                await rank.orders.hear(EvictOrder(0, 1))
                await asyncio.sleep(2 * PAUSE_S)
                break

    asyncio.run(hear())
    assert stale(rank.server_store, 0, 1)
    if problem == "evicted":
        assert (failures, rank.needed) == ([], ["a"])
    else:
        [(content, generation, error)] = failures
        assert (content, generation) == ("a", 1)
        assert isinstance(error, AdapterError if problem == "damaged" else StorageError)
    assert "a" not in rank.store, "a new load writes the content anew"
    rank.store.adopt("a", [file])
    rank.hear(load_order(2))
    until(lambda: all(ready(rank.server_store, 0, 2)))


def test_order_that_can_not_be_carried_out_stops_no_other(rank, file, monkeypatch):
    def fail(*order) -> None:
        raise MemoryError("no slots today")

    rank.store.adopt("a", [file])
    with monkeypatch.context() as patched:
        for name in ("grow", "evict"):
            patched.setattr(rank.server_store, name, fail)
        rank.hear(ResizeOrder(9))
        rank.hear(EvictOrder(1, 1))
        rank.hear(LoadOrder("a", 99, 1, runs(0)))
    rank.hear(load_order(1))
    until(lambda: all(ready(rank.server_store, 0, 1)))


def failing_copies(
    server_store: ServerAdapterStore, monkeypatch, error: Exception, num_failures: int
) -> None:
    """The adapter "bad" of rank 7 can't be copied so many times."""
    copy, left = server_store._copy, [num_failures]

    def fail(packed, parts, target) -> None:
        if parts[0].table[:, 2].max() == 7 and left[0]:
            left[0] -= 1
            raise error
        copy(packed, parts, target)

    monkeypatch.setattr(server_store, "_copy", fail)


@pytest.mark.parametrize("layer_wise", [True, False])
@pytest.mark.parametrize("error", [OSError("the disk"), StorageError("no file can be opened")])
def test_load_is_tried_again_for_a_cause_that_passes_and_others_load_meanwhile(
    monkeypatch, error, layer_wise
):
    server_store = make_store()
    server_store._layer_wise = layer_wise
    failing_copies(server_store, monkeypatch, error, NUM_TRIES - 1)
    server_store.load(0, 1, random_adapter("bad", SHAPE, 7), BIG)
    server_store.load(1, 1, random_adapter("good", SHAPE), runs(4))
    until(lambda: all(ready(server_store, 1, 1)))
    until(lambda: all(ready(server_store, 0, 1)))
    assert not stale(server_store, 0, 1)
    server_store.stop()


BIG = {layer: (3 * first, 3 * number) for layer, (first, number) in runs(0).items()}


@pytest.mark.parametrize(
    ("error", "num_failures"),
    [
        (OSError("the disk"), NUM_TRIES),
        (ValueError("ranks 0..513"), 1),
        (MemoryError(), 1),
        (KeyError("table"), 1),
    ],
)
@pytest.mark.parametrize("tables_fail", [False, True])
def test_load_that_fails_is_given_up_and_reported_and_the_thread_goes_on(
    monkeypatch, error, num_failures, tables_fail
):
    server_store, failures = make_store(), []
    server_store.on_failure = lambda *failure: failures.append(failure)
    failing_copies(server_store, monkeypatch, error, num_failures)
    if tables_fail:
        left = [RuntimeError("no tables")]

        def fail() -> None:
            if int(server_store.generation[0]) == 2 and left:
                raise left.pop()

        server_store.on_tables = fail
    server_store.load(0, 1, random_adapter("bad", SHAPE, 7), BIG)
    until(lambda: failures)
    assert failures == [("bad", 1, error)]
    assert stale(server_store, 0, 1)
    server_store.load(1, 1, random_adapter("good", SHAPE), runs(4))
    until(lambda: all(ready(server_store, 1, 1)))
    server_store.stop()


def test_memory_that_is_not_there_is_refused_with_what_to_lower():
    with pytest.raises(ConfigError, match=r"no memory on cpu for .* GB .* lower lora_server\.memory_gb"):
        _allocate(2**60, CPU)
