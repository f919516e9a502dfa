# SPDX-License-Identifier: Apache-2.0
"""A connection from its first message to its end."""

from __future__ import annotations

import asyncio
import struct
from types import SimpleNamespace

import msgspec
import pytest

from moe_lora.core.address import Address, parse_address
from moe_lora.core.errors import AdapterNotFoundError, ConfigError
from moe_lora.dist.net.codec import CallFrame, Protocol, encode
from moe_lora.dist.net.connection import Pings, dial
from moe_lora.dist.net.peer import Peer, PeerEndedError
from tests.patience import PATIENCE_S

from .parts import CLIENT, Note, Secret, dialled, error_of, serving, until


@pytest.fixture
def place(tmp_path) -> Address:
    return Address(path=str(tmp_path / "socket"))


def test_messages_arrive_in_order_and_calls_are_answered(place):
    async def talk() -> None:
        async with serving(place) as (server, _), dialled(place) as peer:
            for number in range(200):
                peer.send(Note(number))
            assert await peer.call("double", 21) == 42
            assert [note.number for note in server.notes] == list(range(200))
            await until(lambda: len(peer.heard) == 200)
            assert peer.heard == server.notes

    asyncio.run(talk())


def test_who_awaits_an_answer_goes_on_before_the_next_message_is_heard(place):
    async def talk() -> None:
        heard_before: list[int] = []
        async with serving(place) as (server, _), dialled(place) as peer:
            for number in range(20):
                peer.call("wait").add_done_callback(lambda _: heard_before.append(len(peer.heard)))
                await until(lambda number=number: len(server.waiting) > number)
                server.waiting[-1].answer(None)
                server.peers[0].send(Note(number))
                await until(lambda number=number: len(peer.heard) > number)
        assert heard_before == list(range(20))

    asyncio.run(talk())


def test_error_of_a_call_is_raised_where_it_was_made(place):
    async def talk() -> None:
        async with serving(place), dialled(place) as peer:
            with pytest.raises(AdapterNotFoundError, match="no x"):
                await peer.call("find", "x")
            assert await peer.call("double", 1) == 2

    asyncio.run(talk())


@pytest.mark.parametrize("value", [object(), "metr\udce9", 1 << 70])
def test_result_that_can_not_be_sent_is_an_error_of_its_call(place, value):
    async def talk() -> None:
        async with serving(place) as (server, _), dialled(place) as peer:
            waiting = peer.call("wait")
            await until(lambda: server.waiting)
            server.waiting[0].answer(value)
            with pytest.raises(TypeError, match="what wait returned can't be sent"):
                await waiting
            assert await peer.call("double", 1) == 2

    asyncio.run(talk())


def test_call_whose_arguments_can_not_be_sent_is_no_open_call(place):
    async def talk() -> None:
        async with serving(place), dialled(place) as peer:
            with pytest.raises(UnicodeEncodeError):
                peer.call("find", "metr\udce9")
            await asyncio.wait_for(peer.settled(), PATIENCE_S)

    asyncio.run(talk())


def test_call_whose_answer_can_not_be_read_fails(place):
    async def talk() -> None:
        async with serving(place) as (server, _), dialled(place) as peer:
            waiting = peer.call("wait")
            await until(lambda: server.waiting)
            server.waiting[0].answer("no null")
            with pytest.raises(PeerEndedError, match="not understood"):
                await asyncio.wait_for(waiting, PATIENCE_S)
            with pytest.raises(PeerEndedError, match="not understood"):
                await peer.settled()

    asyncio.run(talk())


def test_message_beyond_the_limit_is_not_sent_and_costs_no_connection(place, monkeypatch):
    monkeypatch.setattr("moe_lora.dist.net.peer.MAX_FRAME_BYTES", 1 << 20)

    async def talk() -> None:
        async with serving(place) as (server, _), dialled(place) as peer:
            with pytest.raises(ValueError, match="at most 1048576"):
                peer.send(Note(0, "x" * (1 << 20)))
            with pytest.raises(ValueError, match="at most 1048576"):
                peer.call("find", "x" * (1 << 20))
            waiting = peer.call("wait")
            await until(lambda: server.waiting)
            server.waiting[0].answer("x" * (1 << 20))
            with pytest.raises(TypeError, match="at most 1048576"):
                await waiting
            assert await peer.call("double", 1) == 2
            assert server.notes == []

    asyncio.run(talk())


def test_call_that_overfills_the_queue_fails(place, monkeypatch):
    monkeypatch.setattr("moe_lora.dist.net.peer.MAX_QUEUED_BYTES", 1 << 20)

    async def talk() -> None:
        async with serving(place), dialled(place) as peer:
            with pytest.raises(PeerEndedError, match="does not read"):
                await asyncio.wait_for(peer.call("find", "x" * (1 << 20)), PATIENCE_S)

    asyncio.run(talk())


def test_calls_fail_when_the_connection_ends(place):
    async def talk() -> None:
        async with serving(place) as (server, _), dialled(place) as peer:
            waiting = peer.call("wait")
            await until(lambda: server.waiting)
            server.peers[0].end("enough for today")
            with pytest.raises(PeerEndedError, match="enough for today"):
                await waiting
            await asyncio.wait_for(peer.ended.wait(), PATIENCE_S)
            with pytest.raises(PeerEndedError, match="enough for today"):
                await peer.call("double", 1)
            peer.send(Note(1))  # of no use, and no error

    asyncio.run(talk())


def test_cancellation_that_comes_with_the_first_message_is_not_lost(place):
    """`asyncio.wait_for` before Python 3.12 loses it, and who waits for the task's end waits for ever."""

    async def talk() -> None:
        loop = asyncio.get_running_loop()

        def receives(data: bytes) -> object:
            loop.call_soon(task.cancel)
            return CLIENT.receives(data)

        async def use() -> None:
            await peer.receive(PATIENCE_S)
            await asyncio.sleep(60)

        async with serving(place):
            peer = Peer(await dial("address", place, None), SimpleNamespace(receives=receives), "the server")
            task = asyncio.create_task(use())
            peer.send(Note(1))
            await asyncio.wait([task], timeout=PATIENCE_S)
            assert task.cancelled()
            peer.end()
            await peer.closed()

    asyncio.run(talk())


def test_what_was_sent_before_the_end_arrives(place):
    async def talk() -> None:
        async with serving(place) as (server, _):
            async with dialled(place) as peer:
                for number in range(50):
                    peer.send(Note(number, "x" * 10_000))
                peer.end("done")
            await until(lambda: server.ends)
            assert len(server.notes) == 50
            assert server.ends == ["done"]

    asyncio.run(talk())


def test_abandoned_calls_are_waited_for_by_nobody_but_who_wants_all_to_be_done(place):
    async def talk() -> None:
        async with serving(place) as (server, _), dialled(place) as peer:
            waiting = peer.call("wait")
            await until(lambda: server.waiting)
            peer.abandon_calls(TimeoutError("too long"))
            assert isinstance(await error_of(waiting), TimeoutError)
            settled = asyncio.create_task(peer.settled())
            await asyncio.sleep(0.05)
            assert not settled.done()
            server.waiting[0].answer(None)
            await asyncio.wait_for(settled, PATIENCE_S)

    asyncio.run(talk())


def test_unknown_type_ends_the_connection_and_says_so(place):
    async def talk() -> None:
        async with serving(place) as (server, _), dialled(place) as peer:
            peer.send(Secret("x"))
            await until(lambda: server.ends)
            assert "not understood" in server.ends[0]
            await asyncio.wait_for(peer.ended.wait(), PATIENCE_S)
            assert "not understood" in peer.problem
            assert server.notes == []

    asyncio.run(talk())


def test_unknown_method_is_refused_and_the_connection_goes_on(place):
    async def talk() -> None:
        async with serving(place), dialled(place) as peer:
            future = peer.call("double", 1)
            peer.send(CallFrame(99, "__init__", msgspec.Raw(encode(()))))
            assert await future == 2
            assert await peer.call("double", 2) == 4

    asyncio.run(talk())


@pytest.mark.parametrize("garbage", [b"\x00" * 64, b"GET / HTTP/1.1\r\n\r\n", b"\xde\xad" * 5000])
def test_stranger_who_does_not_speak_it_is_turned_away_and_others_served(place, garbage):
    async def talk() -> None:
        async with serving(place) as (server, _):
            reader, writer = await asyncio.open_unix_connection(place.path)
            writer.write(garbage)
            writer.write_eof()
            await asyncio.wait_for(reader.read(), PATIENCE_S)
            writer.close()
            async with dialled(place) as peer:
                assert await peer.call("double", 1) == 2
            assert len(server.peers) == 1

    asyncio.run(talk())


async def raw_frame(place: Address, content: bytes, wait_s: float = PATIENCE_S) -> tuple[bool, str]:
    """Open a connection, then write these bytes beneath it; whether it ended within wait_s, and why."""
    async with serving(place) as (server, _):
        connection = await dial("address", place, None)
        connection.transport.write(content)
        try:
            await asyncio.wait_for(connection.wait_closed(), wait_s)
        except asyncio.TimeoutError:
            connection.transport.abort()
            await until(lambda: server.ends)
            return False, server.ends[0]
        await until(lambda: server.ends)
        assert server.notes == []
        return True, server.ends[0]


def test_frame_of_2_gb_is_refused_before_it_is_read(place):
    header = b"\x82\xff" + struct.pack("!Q", 2 << 30) + b"\x00" * 4
    ended, _ = asyncio.run(raw_frame(place, header))
    assert ended


def test_half_a_frame_is_no_message(place):
    ended, why = asyncio.run(raw_frame(place, b"\x82\xe4" + b"\x00" * 20, wait_s=0.5))
    assert not ended
    assert why


def test_text_frame_is_refused(place):
    ended, why = asyncio.run(raw_frame(place, b"\x81\x84" + b"\x00" * 4 + b"text"))
    assert ended
    assert "not understood" in why


def test_peer_that_does_not_read_holds_up_nobody_and_is_ended_at_last(place, monkeypatch):
    monkeypatch.setattr("moe_lora.dist.net.peer.MAX_QUEUED_BYTES", 20 << 20)

    async def talk() -> None:
        async with serving(place) as (server, _):
            deaf = Peer(await dial("address", place, None), CLIENT, "the server")
            deaf.send(Note(0))
            await until(lambda: server.notes)
            async with dialled(place) as peer:
                for number in range(40):
                    server.peers[0].send(Note(number, "x" * 1_000_000))
                    assert await peer.call("double", number) == 2 * number
            assert server.peers[0].ended.is_set()
            assert "does not read" in server.peers[0].problem
            deaf.abort("done")

    asyncio.run(talk())


def test_peer_whose_loop_stands_still_is_noticed_by_pings(place):
    async def talk() -> None:
        pings = Pings(interval_s=0.05, timeout_s=0.3)
        async with serving(place, pings=pings) as (server, _):
            _, writer = await asyncio.open_unix_connection(place.path)
            writer.write(
                b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
            )
            await until(lambda: server.ends)
            writer.close()

    asyncio.run(talk())


def test_what_answers_and_is_none_of_ours_is_an_error_that_says_so(place):
    async def talk() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"220 mail.example ESMTP\r\n")
            writer.close()

        async with await asyncio.start_unix_server(answer, place.path):
            error = await error_of(dial("address", place, None))
            assert isinstance(error, ConnectionError)
            assert "turned this process away" in str(error)

    asyncio.run(talk())


def test_socket_that_a_dead_process_left_is_taken_and_one_in_use_is_not(place):
    async def talk() -> None:
        async with serving(place):
            with pytest.raises(ConfigError, match="in use; choose another"):
                async with serving(place):
                    pass
        import socket

        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(place.path)
        async with serving(place), dialled(place) as peer:
            assert await peer.call("double", 1) == 2

    asyncio.run(talk())


@pytest.mark.parametrize("address", ["here", "host:", ":80", "host:99999", "host:0", "a..b:80", "socket"])
def test_address_that_is_none_is_refused_with_the_setting(address):
    with pytest.raises(ConfigError, match=r"controller\.address="):
        parse_address("controller.address", address)


def test_protocol_without_calls_answers_none(place):
    async def talk() -> None:
        async with serving(place) as (server, _):
            silent = Protocol.of(Note)
            async with dialled(place, protocol=silent) as peer:
                peer.send(Note(1))
                await until(lambda: server.notes)
                server.peers[0].send(CallFrame(1, "double", msgspec.Raw(encode((1,)))))
                await asyncio.sleep(0.05)
                assert not peer.ended.is_set()

    asyncio.run(talk())
