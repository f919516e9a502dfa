# SPDX-License-Identifier: Apache-2.0
"""A lease in a file; `test_stores.py` has the meaning of each store."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from moe_lora.dist.cluster.leadership import StoreError, sqlite_store
from moe_lora.dist.cluster.leadership.sqlite_store import SqliteStore


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    found = SimpleNamespace(now_s=1000.0)
    monkeypatch.setattr(sqlite_store, "time", SimpleNamespace(monotonic=lambda: found.now_s))
    return found


def test_a_lease_ends_with_the_boot_of_its_host(tmp_path, clock):
    a, b = (SqliteStore(str(tmp_path / "lease"), 5.0) for _ in "ab")
    a.acquire("a")
    clock.now_s, b._boot = 1.0, "the next"
    assert b.acquire("b") == ("b", 2)


def test_an_unusable_file_is_named(tmp_path):
    with pytest.raises(
        StoreError, match=r"none/lease can't be written: .*; give a file in a writable folder"
    ):
        SqliteStore(str(tmp_path / "none" / "lease"), 5.0).acquire("a")
    SqliteStore(str(tmp_path / "none" / "lease"), 5.0).release()  # no lease, no call
