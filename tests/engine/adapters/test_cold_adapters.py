# SPDX-License-Identifier: Apache-2.0
"""A thousand cold adapters of one tenant, a request each: what becomes of another's at a LoRA Server."""

from __future__ import annotations

import pytest

from moe_lora.engine.adapters.adapter_store import AdapterVersion
from tests.engine.parts import Parts, packed
from tests.virtual_clock import VirtualClock

from .leased_parts import LeasedParts, TableServer

NUM_COLD, PLACES = 1000, 6


def flood(parts: LeasedParts, tenants: tuple[str, str]) -> list[AdapterVersion]:
    """One tenant asks for its two adapters, then the other for all of its own, four at once; the two."""
    own = [parts.manager.add(packed(f"own {number}", 0), None) for number in range(2)]
    cold = [parts.manager.add(packed(f"cold {number}", 0), None) for number in range(NUM_COLD)]
    for asked, tenant in zip((own, cold), tenants, strict=True):
        waiting = [(adapter.name, adapter) for adapter in reversed(asked)]
        while waiting or parts.scheduler.waiting or parts.scheduler.running:
            for name, adapter in [waiting.pop() for _ in range(min(4, len(waiting)))]:
                parts.add(name, range(3), adapter, tenant=tenant)
            parts.step()
            parts.client.hand_on()
            parts.step()
            for sequence in list(parts.scheduler.running):
                parts.scheduler.finish(sequence)
            parts.client.hand_on()
            parts.clock.advance(0.01)
    return own


@pytest.mark.parametrize(("tenants", "stay"), [(("acme", "globex"), True), (("", ""), False)])
def test_they_leave_another_tenants_where_they_are_and_without_tenants_they_do_not(tenants, stay):
    clock = VirtualClock()
    server = TableServer(clock, capacity=PLACES, starvation_s=1.0)
    parts = LeasedParts(server, clock, "i", num_pages=24)
    own = flood(parts, tenants)
    resident = {one.adapter_id for one in server.table.residents()}
    assert [adapter.packed.content_hash in resident for adapter in own] == [stay] * 2


@pytest.mark.parametrize(("tenants", "stay"), [(("acme", "globex"), True), (("", ""), False)])
def test_on_an_instance_too_though_computed_prompts_lie_below_them_and_none_below_the_others(tenants, stay):
    parts = Parts(num_pages=40, max_loras=PLACES)
    own = [parts.manager.add(packed(f"own {number}", 1), None) for number in range(2)]
    cold = [parts.manager.add(packed(f"cold {number}", 1), None) for number in range(5 * PLACES)]
    for asked, tenant, length in zip((own, cold), tenants, (3, 9), strict=True):
        for adapter in asked:
            parts.add(adapter.name, range(length), adapter, tenant=tenant)
            parts.step()
            parts.scheduler.finish(parts.scheduler.running[0])
            parts.clock.advance(0.01)
    assert [parts.manager.info(adapter).residency == "device" for adapter in own] == [stay] * 2
