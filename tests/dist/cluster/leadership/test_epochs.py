# SPDX-License-Identifier: Apache-2.0
"""Front ends and instances follow the controller of the highest epoch alone."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace

import pytest

from moe_lora.core.address import Address
from moe_lora.core.errors import ControllerAwayError
from moe_lora.dist.cluster.controller.cluster_state import ClusterState, StateChange
from moe_lora.dist.net.fence import Fence
from moe_lora.dist.net.session import RefusedError
from tests.dist.cluster.controller.parts import ControllerSide, FrontEndSide, engines, until
from tests.dist.cluster.controller.test_link import new_link
from tests.dist.cluster.listener_parts import FrontEnd, Instance
from tests.dist.cluster.listener_parts import until as seen


def test_the_leader_of_a_later_epoch_takes_a_front_end_from_the_former(tmp_path, caplog):
    """The former one still runs, as one that was stopped and goes on: what it decides reaches nobody."""
    places = {f"controllers.{name}": Address(path=str(tmp_path / name)) for name in "ab"}

    async def run() -> None:
        fleet = engines()
        old, new = [ControllerSide(fleet, epoch=epoch) for epoch in (7, 8)]
        front_ends = [FrontEndSide(one, places, fleet) for one in ("one", "two")]
        for controller, place in zip((old, new), places.values(), strict=True):
            await controller.start(place)
            await until(lambda: all(one.link.up and one.link.state for one in front_ends))
        await until(lambda: old.listener.sessions == [] and len(new.listener.sessions) == 2)
        await until(lambda: [one.link.state.epoch for one in front_ends] == [8, 8])
        number = max(one.link.state.number for one in front_ends)
        await old.controller.call("load_adapter", "d", "places/d", False)
        old.listener._state_log.state = ClusterState(number=number + 50, epoch=7)
        old.listener._give_out()
        await until(lambda: caplog.text.count("leads in epoch 7, but epoch 8 has begun") >= 2)
        await front_ends[0].link.call("load_adapter", "c", "places/c", False)
        for one in front_ends:
            assert one.link.leader == "controllers.b"
            assert one.link.state.epoch == 8
            assert sorted(one.link.state.served.adapters) == ["a", "b", "c"]
        for one in (*front_ends, old, new):
            await one.stop()

    asyncio.run(run())


@pytest.mark.parametrize("led_first", [False, True])
def test_beside_a_leader_a_controller_without_leadership_reaches_no_front_end(tmp_path, caplog, led_first):
    """As in a roll-out from `controllers: 1` to 2, or back."""
    places = {f"controllers.{name}": Address(path=str(tmp_path / name)) for name in "ab"}

    async def run() -> None:
        fleet = engines()
        alone, leader = [ControllerSide(fleet, epoch=epoch) for epoch in (0, 8)]
        front_end = FrontEndSide("one", places, fleet)
        pairs = list(zip((alone, leader), places.values(), strict=True))
        for controller, place in reversed(pairs) if led_first else pairs:
            await controller.start(place)
            await until(lambda: front_end.link.up and front_end.link.state)
        await until(lambda: "leads in epoch 0, but epoch 8 has begun" in caplog.text)
        await until(lambda: alone.listener.sessions == [] and len(leader.listener.sessions) == 1)
        assert (front_end.link.leader, front_end.link.epoch) == ("controllers.b", 8)
        for one in (front_end, alone, leader):
            await one.stop()

    asyncio.run(run())


def test_a_front_end_refuses_its_only_controller_once_it_had_a_leader(tmp_path, caplog):
    place = Address(path=str(tmp_path / "controller"))

    async def run() -> None:
        fleet = engines()
        front_end = FrontEndSide("one", place, fleet)
        for epoch in (8, 0):
            controller = ControllerSide(fleet, epoch=epoch)
            await controller.start(place)
            if epoch:
                await until(lambda: front_end.link.up)
            else:
                await until(lambda: "leads in epoch 0, but epoch 8 has begun" in caplog.text)
            await controller.stop()
        await front_end.stop()

    asyncio.run(run())


def test_a_change_of_another_state_ends_the_session_with_the_reason():
    link = new_link()
    change = StateChange.between(ClusterState(number=4), ClusterState(number=5))
    with pytest.raises(RefusedError, match="changes state 4, and state None is here"):
        link.receive(change)
    link.receive(ClusterState(number=7))
    with pytest.raises(RefusedError, match="changes state 4, and state 7 is here; restart this front end"):
        link.receive(change)


def test_a_second_leader_of_an_epoch_is_refused_while_the_first_is_linked():
    def peer(name):
        return SimpleNamespace(name=name, ended=asyncio.Event(), abort=aborted.append)

    aborted: list[str] = []
    fence, first, other = Fence(), peer("a"), peer("b")
    fence.admit(first, 1)
    with pytest.raises(ConnectionError, match=r"b and another lead in epoch 1: each has a leadership\.store"):
        fence.admit(other, 1)
    assert len(aborted) == 1
    fence.admit(peer("a"), 1)  # its next link
    fence.admit(other, 2)


def test_an_instance_drops_the_controller_of_a_former_epoch(caplog):
    caplog.set_level(logging.INFO, logger="moe_lora")
    old = FrontEnd(epoch=3)
    new = FrontEnd(epoch=4)
    instance = Instance("i", old.socket)
    try:
        seen(lambda: old.names() == ["i"])
        instance.stop()
        instance = Instance("i", old.socket, new.socket)
        seen(lambda: new.names() == ["i"] and old.names() == [])
        seen(lambda: "leads in epoch 3, but epoch 4 has begun" in caplog.text)
        assert new.names() == ["i"]
    finally:
        instance.stop()
        for one in (new, old):
            one.close()


def test_an_instance_follows_a_leader_and_front_ends_but_no_controller_without_leadership(caplog):
    caplog.set_level(logging.INFO, logger="moe_lora")
    all_of_them = alone, leader, front_end = FrontEnd(), FrontEnd(epoch=4), FrontEnd()
    names, sockets = ("controllers.a", "controllers.b", "one"), [one.socket for one in all_of_them]
    instance = Instance("i", *sockets, names=names)
    try:
        seen(lambda: "leads in epoch 0, but epoch 4 has begun" in caplog.text)
        seen(lambda: leader.names() == ["i"] and alone.names() == [] and front_end.names() == ["i"])
        front_end.close()
        front_end = FrontEnd(front_end.socket)
        seen(lambda: front_end.names() == ["i"])
        assert (leader.names(), alone.names()) == (["i"], [])
    finally:
        instance.stop()
        for one in (leader, alone, front_end):
            one.close()


def test_an_instance_refuses_its_only_controller_once_it_had_a_leader(caplog, tmp_path):
    caplog.set_level(logging.INFO, logger="moe_lora")
    place = str(tmp_path / "controller")
    controller = FrontEnd(place, epoch=4)
    instance = Instance("i", place, names=["controller"])
    try:
        seen(lambda: controller.names() == ["i"])
        controller.close()
        controller = FrontEnd(place)
        seen(lambda: "leads in epoch 0, but epoch 4 has begun" in caplog.text)
        assert controller.names() == []
    finally:
        instance.stop()
        controller.close()


def test_a_state_of_a_later_epoch_counts_whatever_its_number():
    link = new_link()
    for epoch, number in ((1, 50), (2, 20), (1, 60), (2, 21)):
        link.receive(ClusterState(number=number, epoch=epoch))
    assert link.state.order == (2, 21)


def test_without_a_leader_changes_are_refused_with_the_reason():
    link = new_link(places={"controllers.a": Address(path="/a"), "controllers.b": Address(path="/b")})
    with pytest.raises(
        ControllerAwayError,
        match="no controller leads that is known here: another begins soon, or all are down",
    ):
        asyncio.run(link.call("load_adapter", "a", "path", False))
