# SPDX-License-Identifier: Apache-2.0
"""Who has no certificate of the cluster, and who stands between two that have one."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from pathlib import Path

import pytest

from moe_lora.core.address import Address
from moe_lora.core.errors import ConfigError
from moe_lora.dist.net.connection import dial
from moe_lora.dist.net.keys import AUTHORITY, AUTHORITY_KEY, MEMBER, Keys, make_keys
from tests.patience import PATIENCE_S

from .parts import Note, Relay, dialled, error_of, serving, until

LOOPBACK = Address("127.0.0.1", 0)


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> Keys:
    return make_keys(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def others(tmp_path_factory) -> Keys:
    return make_keys(tmp_path_factory.mktemp("others"))


def test_members_of_one_authority_talk(keys):
    async def talk() -> None:
        async with serving(LOOPBACK, keys) as (_, place), dialled(place, keys) as peer:
            assert await peer.call("double", 21) == 42

    asyncio.run(talk())


def test_certificate_of_another_authority_is_turned_away(keys, others):
    async def talk() -> None:
        async with serving(LOOPBACK, keys) as (server, place):
            error = await error_of(dial("address", place, others))
            assert isinstance(error, ConnectionError)
            assert "are its certificates of the same authority?" in str(error)
            assert server.peers == []

    asyncio.run(talk())


def test_member_does_not_talk_to_a_server_of_another_authority(keys, others):
    async def talk() -> None:
        async with serving(LOOPBACK, others) as (server, place):
            error = await error_of(dial("address", place, keys))
            assert "are its certificates of the same authority?" in str(error)
            assert server.peers == []

    asyncio.run(talk())


def test_stranger_without_a_certificate_is_turned_away(keys):
    async def talk() -> None:
        async with serving(LOOPBACK, keys) as (server, place):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            reader, writer = await asyncio.open_connection("127.0.0.1", place.port, ssl=context)
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            with contextlib.suppress(ssl.SSLError, ConnectionError):
                assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
            writer.close()
            assert server.peers == []

    asyncio.run(talk())


@pytest.mark.parametrize(
    "garbage", [b"\x00" * 400, b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00" + b"a" * 99]
)
def test_stranger_without_tls_is_turned_away_and_others_served(keys, garbage):
    async def talk() -> None:
        async with serving(LOOPBACK, keys) as (server, place):
            reader, writer = await asyncio.open_connection("127.0.0.1", place.port)
            writer.write(garbage)
            writer.write_eof()
            with contextlib.suppress(ConnectionError):
                await asyncio.wait_for(reader.read(), PATIENCE_S)
            writer.close()
            async with dialled(place, keys) as peer:
                assert await peer.call("double", 1) == 2
            assert len(server.peers) == 1

    asyncio.run(talk())


@pytest.mark.parametrize("to_server", [True, False])
@pytest.mark.parametrize(
    "bytes_in_between",
    [b"\x17\x03\x03\x00\x20" + b"\x00" * 32, b"\x80\x04\x95", b"\x15\x03\x03\x00\x02\x01\x00"],
)
def test_relay_that_adds_bytes_ends_the_connection_and_nothing_of_it_is_taken(
    keys, to_server, bytes_in_between
):
    async def talk() -> None:
        async with serving(LOOPBACK, keys) as (server, place):
            relay = Relay(place.host, place.port)
            async with relay.listening() as between, dialled(between, keys) as peer:
                assert await peer.call("double", 1) == 2
                there = relay.to_server if to_server else relay.to_client
                assert there is not None
                there.write(bytes_in_between)
                peer.send(Note(1))
                await asyncio.wait_for(peer.ended.wait(), PATIENCE_S)
                await until(lambda: server.ends)
                assert len(server.notes) <= 1

    asyncio.run(talk())


def test_cut_connection_is_told_to_both_ends_and_no_message_is_lost_silently(keys):
    async def talk() -> None:
        async with serving(LOOPBACK, keys) as (server, place):
            relay = Relay(place.host, place.port)
            async with relay.listening() as between:
                async with dialled(between, keys) as peer:
                    for number in range(100):
                        peer.send(Note(number))
                    assert await peer.call("double", 1) == 2
                    waiting = peer.call("wait")
                    relay.cut()
                    assert isinstance(await error_of(waiting), ConnectionError)
                    await until(lambda: server.ends)
                    # What arrived is a beginning of what was sent, and complete up to the last answer.
                    assert [note.number for note in server.notes] == list(range(100))
                async with dialled(between, keys) as again:
                    again.send(Note(100))
                    assert await again.call("double", 2) == 4
                    assert server.notes[-1].number == 100

    asyncio.run(talk())


def test_network_without_certificates_is_an_error_that_says_how_to_make_them(tmp_path):
    for where in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ConfigError, match=r"moe-lora cluster init"):
            Keys(where)

    async def talk() -> None:
        with pytest.raises(ConfigError, match="moe-lora cluster init"):
            async with serving(LOOPBACK):
                pass
        with pytest.raises(ConfigError, match="moe-lora cluster init"):
            await dial("address", Address("127.0.0.1", 1), None)

    asyncio.run(talk())


def test_keys_are_for_their_user_only_and_are_not_made_twice(tmp_path):
    folder = tmp_path / "keys"
    make_keys(folder)
    for name in (AUTHORITY, AUTHORITY_KEY, MEMBER):
        assert (folder / name).stat().st_mode & 0o077 == 0
    before = (folder / MEMBER).read_bytes()
    with pytest.raises(ConfigError, match="has one authority"):
        make_keys(folder)
    assert (folder / MEMBER).read_bytes() == before


def test_member_key_that_does_not_belong_to_the_certificate_is_refused(tmp_path, keys):
    make_keys(tmp_path / "mixed")
    certificate, _, _ = (tmp_path / "mixed" / MEMBER).read_text().partition("-----BEGIN PRIVATE")
    _, begin, key = (keys.folder / MEMBER).read_text().partition("-----BEGIN PRIVATE")
    (tmp_path / "mixed" / MEMBER).write_text(certificate + begin + key)
    with pytest.raises(ConfigError, match="can't be read"):
        Keys(Path(tmp_path / "mixed"))


def test_without_openssl_it_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="openssl, which is not installed"):
        make_keys(tmp_path / "keys")
