# SPDX-License-Identifier: Apache-2.0
"""What the controller's front_end_listener lets in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from moe_lora.core.address import Address
from moe_lora.core.errors import ConfigError
from moe_lora.dist.cluster.controller import ALIVE, READY
from moe_lora.dist.cluster.controller.cluster_state import ClusterState, Taken
from moe_lora.dist.cluster.controller.protocol import HANDSHAKE
from moe_lora.dist.cluster.instances import Holding
from moe_lora.dist.net.connection import dial
from moe_lora.dist.net.keys import Keys, make_keys
from moe_lora.dist.net.session import RefusedError
from moe_lora.engine.client.messages import Beat, PauseOrder, PauseScope
from tests.patience import PATIENCE_S

from .parts import ControllerSide, FrontEndSide, until


@asynccontextmanager
async def listening(
    address: Address, keys: Keys | None = None
) -> AsyncIterator[tuple[ControllerSide, Address]]:
    """A controller that is ready, and where it listens."""
    controller = ControllerSide([])
    place = await controller.start(address, keys)
    try:
        yield controller, place
    finally:
        await controller.stop()


def inside(controller: ControllerSide) -> list[str]:
    return [session.name for session in controller.listener.sessions]


@pytest.fixture
def address(tmp_path) -> Address:
    return Address(path=str(tmp_path / "controller"))


@pytest.mark.parametrize("variable", [ALIVE, READY])
def test_a_leader_s_event_loop_sets_the_time_of_the_probe_s_file(address, monkeypatch, tmp_path, variable):
    file = tmp_path / "probed"
    monkeypatch.setenv(variable, str(file))

    async def run() -> None:
        async with listening(address):
            await until(file.exists)
            file.unlink()
            await until(file.exists)

    asyncio.run(run())


def test_front_end_of_another_version_is_refused_with_the_difference(address):
    async def run() -> None:
        async with listening(address) as (controller, _):
            connection = await dial("controller.address", address, None)
            old = replace(HANDSHAKE, version=0).hello("old", None)
            with pytest.raises(RefusedError, match="install the same version"):
                await HANDSHAKE.open(connection, address, old)
            await connection.wait_closed()
            assert inside(controller) == []

    asyncio.run(run())


def test_a_new_controller_without_adapters_replaces_the_former_one_s_state(address):
    async def run() -> None:
        controller = ControllerSide([])
        controller.instance_registry._adapters.clear()
        controller.instance_registry._versions.clear()
        await controller.start(address)
        front_end = FrontEndSide("one", address, [])
        front_end.link.state = ClusterState(number=7, holdings={"gone": Holding("a")})
        await until(lambda: front_end.link.state.number > 7)
        assert front_end.link.state.holdings == {}
        await front_end.stop()
        await controller.stop()

    asyncio.run(run())


def test_message_of_another_link_ends_the_connection(address):
    async def run() -> None:
        async with listening(address) as (controller, _):
            connection = await dial("controller.address", address, None)
            peer, _ = await HANDSHAKE.open(connection, address, HANDSHAKE.hello("one", None))
            peer.send(Taken(1))
            await until(lambda: [one.taken for one in controller.listener.sessions] == [1])
            peer.send(Beat())
            async for _ in peer.messages():
                pass
            assert "one sent what is not understood here" in peer.problem
            await until(lambda: inside(controller) == [])

    asyncio.run(run())


def test_between_hosts_only_certificates_of_the_same_authority_let_in(tmp_path, caplog):
    ours, others = make_keys(tmp_path / "ours"), make_keys(tmp_path / "others")

    async def run() -> None:
        async with listening(Address("127.0.0.1", 0), ours) as (controller, place):
            dialling = [
                FrontEndSide(name, place, [], keys=keys)
                for keys, name in ((others, "stranger"), (ours, "one"))
            ]
            await until(lambda: inside(controller) == ["one"])
            await until(lambda: "are its certificates of the same authority?" in caplog.text)
            assert not dialling[0].link.up
            for one in dialling:
                await one.stop()
            await until(lambda: inside(controller) == [])

    asyncio.run(run())


def test_pauses_end_once_a_lost_front_end_leaves_only_leaving_ones(address):
    async def run() -> None:
        async with listening(address) as (controller, _):
            leaving, staying = [FrontEndSide(name, address, []) for name in ("leaving", "staying")]
            await leaving.link.leave()  # before its connection
            await until(lambda: len(inside(controller)) == 2)
            registry = controller.instance_registry
            orders = registry.standing_orders()
            orders.pauses[""] = PauseOrder(PauseScope(), "keep", time.monotonic() + PATIENCE_S)
            await until(lambda: [one.is_leaving for one in controller.listener.sessions].count(True) == 1)
            assert orders.pauses
            await staying.stop()
            await until(lambda: not orders.pauses)
            assert inside(controller) == ["leaving"]
            await leaving.stop()

    asyncio.run(run())


def test_taken_address_is_an_error_that_names_the_setting(address):
    async def run() -> None:
        async with listening(address):
            with pytest.raises(ConfigError, match=r"controller\.address="):
                async with listening(address):
                    pass

    asyncio.run(run())
