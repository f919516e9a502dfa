"""What the controller's front_end_listener lets in."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from moe_lora.core.address import Address
from moe_lora.core.errors import ConfigError
from moe_lora.dist.cluster.controller.cluster_state import FRONT_END_SIDE, Admitted, FrontEndHello, Taken
from moe_lora.dist.cluster.controller.controller_link import ControllerLink
from moe_lora.dist.cluster.controller.front_end_listener import Session, front_end_listener
from moe_lora.dist.net.codec import Message, Protocol
from moe_lora.dist.net.connection import dial
from moe_lora.dist.net.keys import make_keys
from moe_lora.dist.net.peer import Peer, PeerEndedError
from moe_lora.engine.client.messages import Beat

from .parts import until


class Told:
    """Notes what front ends do."""

    def __init__(self) -> None:
        self.inside: list[str] = []
        self.heard: list[Any] = []

    def joined(self, session: Session, hello: FrontEndHello) -> None:
        self.inside.append(session.name)

    def received(self, session: Session, message: Message | Any) -> None:
        self.heard.append(message)

    def left(self, session: Session) -> None:
        self.inside.remove(session.name)


@pytest.fixture
def address(tmp_path) -> Address:
    return Address(path=str(tmp_path / "controller"))


def test_front_end_of_another_version_is_refused_with_the_difference(address):
    async def run() -> None:
        told = Told()
        async with front_end_listener("controller.address", address, None, told):
            peer = Peer(await dial("controller.address", address, None), FRONT_END_SIDE, "the controller")
            peer.send(FrontEndHello(name="old", state=None, protocol=0))
            admitted = await peer.receive(10)
            assert isinstance(admitted, Admitted)
            assert "install the same version" in (admitted.refusal or "")
            with pytest.raises(PeerEndedError):
                await peer.receive(10)
            assert told.inside == []

    asyncio.run(run())


def test_message_of_another_link_ends_the_connection(address):
    async def run() -> None:
        told = Told()
        async with front_end_listener("controller.address", address, None, told):
            peer = Peer(await dial("controller.address", address, None), Protocol.of(Admitted), "it")
            peer.send(FrontEndHello(name="one", state=None))
            await peer.receive(10)
            peer.send(Taken(1))
            await until(lambda: told.heard == [Taken(1)])
            peer.send(Beat())
            with pytest.raises(PeerEndedError, match="not understood"):
                await peer.receive(10)
            await until(lambda: told.inside == [])

    asyncio.run(run())


def test_between_hosts_only_certificates_of_the_same_authority_let_in(tmp_path, caplog):
    ours, others = make_keys(tmp_path / "ours"), make_keys(tmp_path / "others")

    async def run() -> None:
        told = Told()
        async with front_end_listener("controller.address", Address("127.0.0.1", 0), ours, told) as place:
            links = [
                ControllerLink(place, keys, name) for keys, name in ((others, "stranger"), (ours, "one"))
            ]
            tasks = [asyncio.create_task(link.run()) for link in links]
            await until(lambda: told.inside == ["one"])
            await until(lambda: "are its certificates of the same authority?" in caplog.text)
            assert not links[0].up
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await until(lambda: told.inside == [])

    asyncio.run(run())


def test_taken_address_is_an_error_that_names_the_setting(address):
    async def run() -> None:
        async with front_end_listener("controller.address", address, None, Told()):
            with pytest.raises(ConfigError, match=r"controller\.address="):
                async with front_end_listener("controller.address", address, None, Told()):
                    pass

    asyncio.run(run())
