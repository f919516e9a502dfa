# SPDX-License-Identifier: Apache-2.0
"""What an engine that was away is told to load, pin and unload."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from moe_lora.core.errors import CapacityError, EngineDeadError
from moe_lora.core.request import AdapterInfo
from moe_lora.dist.cluster.instances import ServedVersion
from moe_lora.dist.cluster.listener import catch_up
from moe_lora.engine.client.client import CallableEngine


class ToldClient(CallableEngine):
    """Notes what it is told.  fails: method -> what it raises."""

    def __init__(self, **fails: Exception) -> None:
        self.loaded: set[str] = set()
        self._fails = fails

    async def call(self, method: str, name: str, *args: Any) -> Any:
        if method in self._fails:
            raise self._fails[method]
        if method == "load_adapter":
            self.loaded.add(name)
            return AdapterInfo(
                name=name, version=1, lora_rank=1, nbytes=1, targets=(), path=args[0], residency="host"
            )
        if method == "unload_adapter":
            self.loaded.remove(name)
        return None


PINNED = {"a": ServedVersion("folder", 1, pinned=True)}


def test_adapter_that_was_loaded_and_could_not_be_pinned_is_unloaded_again():
    client, have, missing = ToldClient(pin_adapter=CapacityError("no room")), {}, set()
    asyncio.run(catch_up(client, PINNED, have, missing))
    assert (client.loaded, missing) == (set(), {"a"})


@pytest.mark.parametrize("before", [{}, {"a": ServedVersion("folder", 0)}])
def test_adapter_that_could_not_be_loaded_is_missing(before):
    client, missing = ToldClient(load_adapter=CapacityError("no room")), set()
    client.loaded = set(before)
    asyncio.run(catch_up(client, PINNED, dict(before), missing))
    assert (client.loaded, missing) == (set(), {"a"})


def test_missing_adapter_that_is_no_longer_served_is_not_unloaded_again():
    client, have, missing = ToldClient(pin_adapter=CapacityError("no room")), {}, set()
    asyncio.run(catch_up(client, PINNED, have, missing))
    asyncio.run(catch_up(client, {}, have, missing))
    assert (have, missing) == ({}, set())


def test_engine_that_ends_meanwhile_is_told_so():
    with pytest.raises(EngineDeadError):
        asyncio.run(catch_up(ToldClient(load_adapter=EngineDeadError("gone")), PINNED, {}, set()))
