# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from moe_lora.dist.launch.roles import FULL_COLLECTION_EVERY, collect_rarely


@pytest.fixture(autouse=True)
def collector_is_as_before() -> Iterator[None]:
    threshold = gc.get_threshold()
    yield
    gc.set_threshold(*threshold)


def test_full_collections_are_rare_and_young_ones_as_before():
    young, middle, _ = gc.get_threshold()
    collect_rarely()
    assert gc.get_threshold() == (young, middle, FULL_COLLECTION_EVERY)


def test_collector_looks_only_at_what_came_later():
    early = [[]]
    collect_rarely()
    late = [[]]
    looked_at = {id(found) for found in gc.get_objects()}
    assert id(early) not in looked_at
    assert id(late) in looked_at
