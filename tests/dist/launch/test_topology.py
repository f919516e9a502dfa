# SPDX-License-Identifier: Apache-2.0
"""The file of roles on several hosts, its names in an address book, and certificates for new hosts."""

from __future__ import annotations

import asyncio
import json
import ssl
from pathlib import Path
from typing import Any

import pytest

from moe_lora.config.cluster import cluster_of
from moe_lora.core.address import ADDRESSES, Address, located, own_host
from moe_lora.core.errors import ConfigError
from moe_lora.dist.launch.enrolment import LIMIT_S, Enrolment, enrol
from moe_lora.dist.launch.host_roles import CONTROLLER, FRONT_END, INSTANCE
from moe_lora.dist.launch.ray_role import CERTIFICATES, STATE, RoleActor
from moe_lora.dist.launch.topology import LORA_SERVER, Hosts, Part, parts_of, roles_file
from moe_lora.dist.net.connection import dial, listen
from moe_lora.dist.net.keys import AUTHORITY, MEMBER, Keys, make_keys
from tests.dist.cluster_jobs import free_port

CONTENT: dict[str, Any] = {
    "model_dir": "/models/base",
    "engine": {"num_instances": 3, "expert_parallel": 2, "num_threads": 4},
    "lora_server": {"layout": "EP2-PP1"},
}
HTTP = {"port": 8000, "tls_cert": None, "drain_s": 1.0, "heartbeat_dead_s": 1.0, "has_key": False}


def hosts(num_front_ends: int = 1) -> Hosts:
    return Hosts(
        source="Ray",
        place="on all hosts",
        folder="/",
        certificates=CERTIFICATES,
        state_dir=STATE,
        num_front_ends=num_front_ends,
        name=lambda role, number: f"{role}-{number}",
    )


def test_parts_have_the_resources_of_their_processes():
    cluster, _ = roles_file(CONTENT, hosts(2))
    assert parts_of(cluster, 2) == [
        Part(role=FRONT_END, count=2),
        Part(role=CONTROLLER, count=1),
        Part(role=LORA_SERVER, count=2, num_gpus=1),
        Part(role=INSTANCE, count=3, num_gpus=2, num_cores=4),
    ]


@pytest.mark.parametrize("num_front_ends", [1, 2])
def test_every_dialled_name_is_a_listening_part(num_front_ends):
    given, content = roles_file(CONTENT, hosts(num_front_ends))
    cluster = cluster_of(content, Path("/private"))
    assert cluster.lora_server is not None
    names = {
        f"{part.role}-{number}:{port}"
        for part in parts_of(given, num_front_ends)
        for number in range(part.count)
        for port in part.ports(number)
    }
    dialled = {str(address) for address in cluster.dialled_addresses().values()}
    dialled |= {cluster.lora_server.address} | ({cluster.controller.address} if cluster.controller else set())
    assert dialled == names
    assert cluster.certificates == "/private/certificates"
    assert cluster.lora_server.store_dir == "/private/state/store"


def test_a_setting_of_hosts_is_refused_for_ray():
    with pytest.raises(ConfigError, match="certificates follows from Ray; leave the setting out"):
        roles_file({**CONTENT, "certificates": "certificates"}, hosts())
    with pytest.raises(ConfigError, match="controllers follows from Ray; leave the setting out"):
        roles_file({**CONTENT, "controllers": 2}, hosts(2))
    with pytest.raises(
        ConfigError, match="model_dir: base is a relative path; give the absolute path on all"
    ):
        roles_file({**CONTENT, "model_dir": "base"}, hosts())


def test_an_address_is_its_own_without_a_book(monkeypatch):
    monkeypatch.delenv(ADDRESSES, raising=False)
    assert located(Address("front-end-0", 7600)) == Address("front-end-0", 7600)


def test_a_wrong_book_is_named(tmp_path, monkeypatch):
    book = tmp_path / "book.json"
    monkeypatch.setenv(ADDRESSES, str(book))
    for text in (None, "{", "[]"):
        if text is not None:
            book.write_text(text)
        with pytest.raises(ConfigError, match="is no address book"):
            located(Address("front-end-0", 7600))


def test_a_dial_finds_a_listener_that_moved(tmp_path, monkeypatch):
    keys, book, name = make_keys(tmp_path / "keys"), tmp_path / "book.json", Address("front-end-0", 7600)
    monkeypatch.setenv(ADDRESSES, str(book))

    async def visit(connection: Any, origin: str) -> None:
        await connection.send(origin)

    async def meet() -> None:
        book.write_text(json.dumps({str(name): f"127.0.0.1:{free_port()}"}))
        async with listen("engines_address", name, keys, visit) as place:
            assert place == name
            connection = await dial("front-end", name, keys)
            assert await connection.recv() == "127.0.0.1"
            await connection.close()

    for _ in range(2):
        asyncio.run(meet())
    assert own_host(str(name)) == "127.0.0.1"


async def enrolled(folder: Path, *tokens: str | None) -> list[Keys | Exception]:
    """Each token's certificate, or the error.  None: a fresh token."""
    enrolment, found = Enrolment(folder), []
    address = await enrolment.start("127.0.0.1")
    for number, token in enumerate(tokens):
        own = folder.parent / f"host-{number}"
        token = token or enrolment.add_token("instance-0")
        try:
            found.append(await asyncio.to_thread(enrol, address, token, enrolment.authority, own))
        except ConfigError as error:
            found.append(error)
        if number == 0:
            with pytest.raises(ConfigError, match="a token counts once"):
                await asyncio.to_thread(enrol, address, token, enrolment.authority, own)
    enrolment.stop()
    return found


def test_a_token_is_a_certificate_once_and_keys_stay(tmp_path):
    authority = make_keys(tmp_path / "keys")
    [keys, refused] = asyncio.run(enrolled(authority.folder, None, "stolen"))
    assert isinstance(keys, Keys)
    assert sorted(path.name for path in keys.folder.iterdir()) == [AUTHORITY, MEMBER]
    assert (keys.folder / MEMBER).stat().st_mode & 0o777 == 0o600
    assert {path.name for path in authority.folder.iterdir()} == {AUTHORITY, "authority.key", MEMBER}
    assert isinstance(refused, ConfigError)

    async def meet() -> None:
        async def visit(connection: Any, origin: str) -> None:
            await connection.send("")

        async with listen("address", Address("127.0.0.1"), authority, visit) as place:
            connection = await dial("address", place, keys)
            await connection.close()

    asyncio.run(meet())


def test_a_stranger_gets_no_token_and_no_room(tmp_path):
    authority, other = make_keys(tmp_path / "keys"), make_keys(tmp_path / "others")

    async def call() -> bytes:
        enrolment = Enrolment(authority.folder)
        address = await enrolment.start("127.0.0.1")
        token = enrolment.add_token("instance-0")
        with pytest.raises(ConfigError, match="no certificate came"):
            await asyncio.to_thread(
                enrol, address, token, Enrolment(other.folder).authority, tmp_path / "host"
            )
        context = ssl.create_default_context(cadata=enrolment.authority)
        context.check_hostname = False
        reader, writer = await asyncio.open_connection(*address.split(":"), ssl=context)
        writer.write(enrolment.add_token("too long").encode() + b"\n" + 100_000 * b"-")
        answer = await asyncio.wait_for(reader.read(), LIMIT_S / 2)
        writer.close()
        # A stranger's certificate left the token unused.
        await asyncio.to_thread(enrol, address, token, enrolment.authority, tmp_path / "host")
        enrolment.stop()
        return answer

    assert asyncio.run(call()) == b""


def test_ports_of_a_host_are_reserved_for_one_role():
    async def both() -> None:
        port = free_port()
        actors = [
            RoleActor(Part(role=FRONT_END, count=2), number, {**HTTP, "port": port}, "127.0.0.1")
            for number in range(2)
        ]
        facts = [await actor.facts() for actor in actors]
        assert facts[0].url == f"http://127.0.0.1:{port}" != facts[1].url
        with pytest.raises(OSError, match="in use"):
            await asyncio.start_server(lambda *_: None, "127.0.0.1", port)
        for actor in actors:
            await actor.stop()
            await actor.stop()

    asyncio.run(both())


def test_an_older_book_replaces_no_newer_one(monkeypatch):
    async def run() -> None:
        actor = RoleActor(Part(role=LORA_SERVER, count=2), 0, HTTP, "127.0.0.1")
        own = (await actor.facts()).addresses
        actor.set_book(2, {"front-end-0:7600": "10.0.0.2:1"})
        actor.set_book(1, {"front-end-0:7600": "10.0.0.1:1"})
        assert (await actor.facts()).book_number == 2
        [book] = actor.folder.glob("*.json")
        assert json.loads(book.read_text()) == {"front-end-0:7600": "10.0.0.2:1", **own}
        await actor.stop()
        assert not book.parent.exists()

    asyncio.run(run())
