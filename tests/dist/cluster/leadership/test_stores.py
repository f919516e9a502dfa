# SPDX-License-Identifier: Apache-2.0
"""Each store has one holder at a time, and epochs that rise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_lora.dist.cluster.leadership import LostLeaseError, StoreError
from moe_lora.dist.cluster.leadership.leader import _END

from .stores import LOST, TTL_S, UNHEARD, Etcd, File, Kubernetes, Store, moved_clock

STORES = (File, Etcd, Kubernetes)


@pytest.fixture(params=STORES, ids=lambda kind: kind.__name__)
def store(request, tmp_path) -> Iterator[Store]:
    found = request.param(tmp_path)
    with moved_clock(found):
        yield found


def test_each_holder_has_an_epoch_above_the_former_one_s(store):
    a, b = (store.open(name) for name in "ab")
    first, second, third = store.epochs
    assert a.acquire("a") == ("a", first)
    assert b.acquire("b") == ("a", first)
    a.renew()
    store.now_s += 4
    a.renew()
    store.now_s += 4
    assert b.acquire("b") == ("a", first)
    store.now_s += 2
    if store.sees:
        assert b.acquire("b") == ("a", first)
        store.now_s += 3
    assert b.acquire("b") == ("b", second), "a lease that is not renewed ends"
    b.renew()
    with pytest.raises(LostLeaseError):
        a.renew()
    with suppress(StoreError):  # etcd has forgotten the lease
        a.release()
    assert a.acquire("a") == ("b", second), "a former holder frees nothing"
    b.release()
    assert a.acquire("a") == ("a", third)


def test_after_a_deletion_another_may_hold_the_lease_and_epochs_still_rise(store):
    if isinstance(store, File):
        pytest.skip("an emptied file forgets the epochs")
    a, b = (store.open(name) for name in "ab")
    epochs = []
    for _ in range(2):
        _, epoch = a.acquire("a")
        a.renew()
        store.delete()
        holder, other = b.acquire("b")
        assert holder == "b"
        with pytest.raises(LostLeaseError):
            a.renew()
        b.release()
        epochs += [epoch, other]
    assert b.acquire("b")[0] == "b"
    store.delete()
    # A new process knows nothing of former epochs.
    holder, epoch = store.open("c").acquire("c")
    assert (holder, sorted({*epochs, epoch})) == ("c", [*epochs, epoch])


CLIENTS = "ab"
ACTIONS = (*["call"] * 8, "release", "die")


class Controller:
    """A controller as `Leader` runs it, without threads.  until_s: end of its own time as the leader."""

    def __init__(self, name: str, store: Store, holders: dict[int, str]) -> None:
        self._name, self._store, self._holders = name, store, holders
        self._num_starts = 0
        self._start()

    def _start(self) -> None:
        self._num_starts += 1
        self._holder, self._lease = f"{self._name} {self._num_starts}", self._store.open(self._name)
        self._has_lease, self.until_s = False, 0.0

    @property
    def leads(self) -> bool:
        return self.until_s > self._store.now_s

    def look(self) -> None:
        """End the process of a leader whose time is over."""
        if self.until_s and not self.leads:
            self._start()

    def move(self, step: str) -> None:
        if step == "call" and self._has_lease:
            self._renew()
        elif step == "call":
            with suppress(StoreError):
                self._acquire()
        else:
            if step == "release":
                with suppress(StoreError):
                    self._lease.release()
            self._start()

    def _acquire(self) -> None:
        holder, epoch = self._lease.acquire(self._holder)
        if holder == self._holder:
            self._has_lease = True
            assert epoch in self._holders or epoch > max(self._holders, default=0)
            assert self._holders.setdefault(epoch, holder) == holder

    def _renew(self) -> None:
        try:
            self._lease.renew()
            self.until_s = self._store.now_s + _END * TTL_S
        except LostLeaseError:
            self._start()
        except StoreError:
            self._has_lease = self.leads  # else the campaign goes on


@pytest.mark.parametrize("kind", STORES, ids=lambda kind: kind.__name__)
@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 1 << 32), loses=st.booleans(), deletes=st.sampled_from((False, False, True)))
def test_no_epoch_has_two_leaders_whatever_calls_are_lost(kind, seed, loses, deletes):
    # Drawn evenly: hypothesis's own lists seldom have a whole change of leaders.
    draw = Random(seed)
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with TemporaryDirectory(dir=memory) as folder:
        store = kind(Path(folder))
        with moved_clock(store):
            store.faults = (draw.choice((LOST, UNHEARD, *[""] * 8)) if loses else "" for _ in count())
            holders: dict[int, str] = {}
            controllers = {name: Controller(name, store, holders) for name in CLIENTS}
            was_deleted = False
            for _ in range(30):
                store.now_s += draw.choice((0.0, 0.0, 0.0, 1.0, 3.5))
                if deletes and draw.random() < 0.1:
                    with suppress(KeyError, NotImplementedError):
                        store.delete()
                        was_deleted = True
                for one in controllers.values():
                    one.look()
                controllers[draw.choice(CLIENTS)].move(draw.choice(ACTIONS))
                # The leader of a deleted lease learns of the deletion at the next renewal.
                assert sum(one.leads for one in controllers.values()) <= 1 or was_deleted
