from __future__ import annotations

import threading

import pytest
import torch

from moe_lora.adapters import HostStore, PackedAdapter, PackedLayer
from moe_lora.core.errors import AdapterNotFoundError


def packed(name: str, rank: int = 4) -> PackedAdapter:
    layer = PackedLayer(
        data=torch.zeros(rank * 16),
        table=torch.zeros(1, 3, dtype=torch.int64),
        scale=torch.zeros(1),
    )
    return PackedAdapter(
        name=name,
        layers=(layer,),
        max_lora_rank=rank,
        nbytes=layer.nbytes,
        content_hash=str(rank),
        targets=("q",),
    )


def test_newest_version_is_served_and_older_ones_stay_until_removed():
    store = HostStore()
    first, second = packed("a", 2), packed("a", 4)
    assert (store.put("a", first), store.put("a", second)) == (1, 2)
    assert store.get("a") is second
    assert store.get("a", 1) is first
    assert store.newest_version("a") == 2
    assert store.bytes == first.nbytes + second.nbytes
    store.remove("a", 1)
    with pytest.raises(AdapterNotFoundError, match="no version 1"):
        store.get("a", 1)
    assert store.bytes == second.nbytes


def test_version_numbers_are_never_given_twice():
    store = HostStore()
    store.put("a", packed("a"))
    store.remove("a")
    assert "a" not in store
    assert store.put("a", packed("a")) == 2
    store.remove("a", 2)
    assert len(store) == 0
    assert store.bytes == 0


def test_unknown_names_are_refused_with_the_known_ones():
    store = HostStore()
    store.put("known", packed("known"))
    for call in (store.get, store.remove, store.newest_version):
        with pytest.raises(AdapterNotFoundError, match="no adapter named 'other'; loaded adapters: known"):
            call("other")


def test_listing_is_sorted_and_tells_rank_targets_and_bytes():
    store = HostStore()
    for name in ("b", "a", "b"):
        store.put(name, packed(name, 8))
    listed = store.listing()
    assert [(entry.name, entry.version) for entry in listed] == [("a", 1), ("b", 1), ("b", 2)]
    assert (listed[0].max_lora_rank, listed[0].targets, listed[0].nbytes) == (8, ("q",), 512)


def test_concurrent_puts_all_get_their_own_version():
    store, versions = HostStore(), []

    def put_many() -> None:
        for _ in range(50):
            versions.append(store.put("a", packed("a")))

    threads = [threading.Thread(target=put_many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(versions) == list(range(1, 201))
