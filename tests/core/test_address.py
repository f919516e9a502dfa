# SPDX-License-Identifier: Apache-2.0
"""Addresses of roles: hosts of both families, and hosts that nobody can dial."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from moe_lora.core.address import Address, own_host, parse_address, parse_dialled
from moe_lora.core.errors import ConfigError
from moe_lora.dist.launch.enrolment import Enrolment, enrol
from moe_lora.dist.launch.ray_role import RoleActor
from moe_lora.dist.launch.topology import Part
from moe_lora.dist.net.connection import dial, listen
from moe_lora.dist.net.keys import make_keys
from moe_lora.dist.transport.contract import make_transport
from tests.dist.transport.peers import TIMEOUT_S, pattern

HTTP = {"port": 0, "tls_cert": None, "drain_s": 1, "heartbeat_dead_s": 5, "has_key": False}


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6")


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("[fd00::1]:7600", Address("fd00::1", 7600)),
        ("h:1", Address("h", 1)),
        ("/there", Address(path="/there")),
    ],
)
def test_an_address_reads_as_written(text: str, address: Address) -> None:
    assert parse_address("here", text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    ["::1:7600", "fd00::1", "[fd00::1]", "[h]:1", "[::1:7600", "[]:1", "a]:1", "[1:2]:3", "[fd00::g]:1"],
)
def test_an_address_without_clear_port_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not host:port, such as 10\.0\.0\.1:7600 or \[fd00::1\]:7600"):
        parse_address("here", text)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "0", "0.0", "[::]", "[::0]", "[0:0:0:0:0:0:0:0]", "[::ffff:0.0.0.0]"]
)
def test_no_role_dials_all_addresses_of_a_host(host: str) -> None:
    text = f"{host}:7600"
    with pytest.raises(ConfigError, match=r"dialled by other roles, and names no host; give a name or an IP"):
        parse_dialled("front_end.engines_address", text)
    assert parse_address("front_end.admin_address", text).port == 7600


@ipv6
def test_roles_meet_by_ipv6(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "keys")

    async def visit(connection: Any, origin: str) -> None:
        await connection.send(origin)

    async def meet() -> str:
        async with listen("here", Address("::1"), keys, visit) as place:
            assert own_host(str(place)) == "::1"
            connection = await dial("here", parse_address("here", str(place)), keys)
            try:
                return str(await connection.recv())
            finally:
                await connection.close()

    assert asyncio.run(meet()) == "::1"


@ipv6
def test_a_host_is_enrolled_by_ipv6(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")

    async def meet() -> None:
        enrolment = Enrolment(tmp_path / "keys")
        address = await enrolment.start("::1")
        token = enrolment.add_token("instance-0")
        await asyncio.to_thread(enrol, address, token, enrolment.authority, tmp_path / "own")
        enrolment.stop()

    asyncio.run(meet())


@ipv6
def test_a_role_on_ray_has_ports_of_an_ipv6_host() -> None:
    async def facts() -> Any:
        actor = RoleActor(Part(role="front-end", count=2), 0, HTTP, host="::1")
        found = await actor.facts()
        await actor.stop()
        return found

    found = asyncio.run(facts())
    [address] = found.addresses.values()
    assert parse_address("here", address).host == "::1"
    assert found.url.startswith("http://[::1]:")


@ipv6
def test_pages_arrive_by_ipv6() -> None:
    with (
        make_transport("gloo", host="::1", name="here") as here,
        make_transport("gloo", host="::1", name="there") as there,
    ):
        pages = there.alloc("pages", 100, 1)
        here.put_signal(here.attach(pages.descriptor()), 0, pattern(100, 7), 0, 1)
        there.signal_wait_until(pages, 0, 1, TIMEOUT_S)
        assert pages.bytes.equal(pattern(100, 7))
