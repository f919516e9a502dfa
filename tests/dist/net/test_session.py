# SPDX-License-Identifier: Apache-2.0
"""Sessions over real sockets: who is let in, and who dials again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from websockets.asyncio.connection import Connection

from moe_lora.core.address import Address
from moe_lora.core.errors import LoraServerError
from moe_lora.dist.net import session
from moe_lora.dist.net.codec import Decoder, Message, encode
from moe_lora.dist.net.connection import dial, listen
from moe_lora.dist.net.keys import Keys, make_keys
from moe_lora.dist.net.peer import Peer, PeerEndedError
from moe_lora.dist.net.session import Dialler, Handshake, Hello, RefusedError, stay_connected
from tests.patience import PATIENCE_S

from .parts import CLIENT, SERVER, Note, Server, error_of, until

HANDSHAKE = Handshake("desk", 3, Decoder(int), dials=CLIENT, listens=SERVER, welcome=Decoder(float))
HELLO = HANDSHAKE.hello("one", 7, "first life")


class Desk(Server):
    """Admits each name once at a time; `refused` first turns some away."""

    def __init__(self, refusals: int = 0) -> None:
        super().__init__()
        self.callers: list[Dialler] = []
        self.num_refused, self._refusals = 0, refusals
        self.inside: set[str] = set()

    def admit(self, caller: Dialler) -> float:
        if self.num_refused < self._refusals or caller.name in self.inside:
            self.num_refused += 1
            raise RefusedError(f"{caller.name} is here already", "choose another name")
        self.inside.add(caller.name)
        return 2.5

    async def serve(self, peer: Peer, caller: Dialler) -> None:
        self.callers.append(caller)
        try:
            await self.talk(peer)
        finally:
            self.inside.discard(caller.name)


@asynccontextmanager
async def desk(
    address: Address, keys: Keys | None = None, refusals: int = 0
) -> AsyncIterator[tuple[Desk, Address]]:
    made = Desk(refusals)
    async with listen("address", address, keys, partial(HANDSHAKE.receive, made.admit, made.serve)) as place:
        yield made, place


async def joined(place: Address, hello: Hello = HELLO, keys: Keys | None = None) -> tuple[Peer, Any]:
    return await HANDSHAKE.open(await dial("address", place, keys), place, hello, PATIENCE_S)


@asynccontextmanager
async def inside(place: Address, hello: Hello = HELLO, keys: Keys | None = None) -> AsyncIterator[Peer]:
    peer, _ = await joined(place, hello, keys)

    async def hear() -> None:
        async for _ in peer.messages():
            pass

    hearing = asyncio.create_task(hear())
    try:
        yield peer
    finally:
        peer.end()
        await hearing
        await peer.closed()


@pytest.fixture
def place(tmp_path) -> Address:
    return Address(path=str(tmp_path / "socket"))


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> Keys:
    return make_keys(tmp_path_factory.mktemp("ours"))


def test_both_ends_learn_what_the_other_says_and_messages_follow(place):
    async def talk() -> None:
        async with desk(place) as (there, _):
            peer, welcome = await joined(place)
            assert welcome == 2.5
            assert there.callers == [Dialler("this host", "one", "first life", 7)]
            peer.send(Note(1))
            assert await peer.next() == Note(1)
            peer.end()
            await peer.closed()
            await until(lambda: not there.inside)

    asyncio.run(talk())


@pytest.mark.parametrize("version", [2, 4], ids=["too old", "too new"])
def test_another_version_is_refused_even_if_its_facts_are_unreadable(place, caplog, version):
    other = replace(HANDSHAKE, version=version).hello("other", {"of another": "form"})

    async def talk() -> None:
        async with desk(place) as (there, _):
            error = await error_of(joined(place, other))
            assert isinstance(error, RefusedError)
            assert error.reason == f"protocol {version} at other and 3 at the desk"
            assert error.way_out == "install the same version"
            assert not there.callers

    asyncio.run(talk())
    assert f"the desk turned away other from this host: protocol {version} at other" in caplog.text


def test_a_later_hello_with_more_fields_is_still_understood(place):
    class Later(Message, frozen=True, tag="Hello"):
        listener: str
        version: int
        name: str
        epoch: str
        payload: str
        more: str

    async def talk() -> None:
        async with desk(place):
            error = await error_of(joined(place, Later("desk", 99, "later", "", "facts", "more")))
            assert "protocol 99 at later and 3 at the desk; install the same version" in str(error)

    asyncio.run(talk())


def test_a_caller_of_another_listener_is_refused_with_both_names(place):
    async def talk() -> None:
        async with desk(place):
            error = await error_of(joined(place, replace(HANDSHAKE, listener="controller").hello("one", 7)))
            assert str(error) == "this is a desk, and one dials a controller; correct the address"

    asyncio.run(talk())


def test_unreadable_facts_of_the_same_version_are_refused(place):
    async def talk() -> None:
        async with desk(place) as (there, _):
            error = await error_of(joined(place, HANDSHAKE.hello("one", "seven")))
            assert isinstance(error, RefusedError)
            assert "the desk can't read the facts of one" in error.reason
            assert not there.callers

    asyncio.run(talk())


def test_a_refused_name_is_let_in_once_the_first_has_left(place):
    async def talk() -> None:
        async with desk(place) as (there, _):
            async with inside(place):
                error = await error_of(joined(place))
                assert str(error) == "one is here already; choose another name"
                async with inside(place, HANDSHAKE.hello("two", 7)) as two:
                    assert await two.call("double", 2) == 4
            await until(lambda: not there.inside)
            async with inside(place) as again:
                assert await again.call("double", 3) == 6

    asyncio.run(talk())


def test_a_caller_that_dies_in_its_hello_is_forgotten(place, caplog):
    async def talk() -> None:
        async with desk(place) as (there, _):
            silent = await dial("address", place, None)
            silent.transport.abort()
            half = await dial("address", place, None)
            half.transport.write(b"\x82\xff" + b"\x00" * 8)
            half.transport.abort()
            await until(lambda: caplog.text.count("turned away a caller from this host") == 2)
            async with inside(place) as peer:
                assert await peer.call("double", 1) == 2
            assert [caller.name for caller in there.callers] == ["one"]

    asyncio.run(talk())


@pytest.mark.parametrize(
    "first", [b"\xde\xad" * 20, b"", b"\x91\xa4Evil", encode(Note(1))], ids=["noise", "none", "kind", "note"]
)
def test_a_first_message_that_is_no_hello_ends_the_connection(place, first):
    async def talk() -> None:
        async with desk(place) as (there, _):
            stranger = await dial("address", place, None)
            await stranger.send(first)
            await asyncio.wait_for(stranger.wait_closed(), PATIENCE_S)
            assert "not understood" in (stranger.close_reason or "")
            async with inside(place) as peer:
                assert await peer.call("double", 1) == 2
            assert len(there.callers) == 1

    asyncio.run(talk())


def test_a_stranger_before_the_handshake_disturbs_nobody(place):
    async def talk() -> None:
        async with desk(place) as (there, _):
            reader, writer = await asyncio.open_unix_connection(place.path)
            writer.write(b"\x00" * 64)
            writer.write_eof()
            await asyncio.wait_for(reader.read(), PATIENCE_S)
            writer.close()
            async with inside(place) as peer:
                assert await peer.call("double", 1) == 2
            assert len(there.callers) == 1

    asyncio.run(talk())


def test_a_second_hello_ends_the_session(place):
    async def talk() -> None:
        async with desk(place) as (there, _), inside(place) as peer:
            peer.send(HELLO)
            await asyncio.wait_for(peer.ended.wait(), PATIENCE_S)
            assert "not understood" in peer.problem
            await until(lambda: not there.inside)

    asyncio.run(talk())


@asynccontextmanager
async def listener_that(
    place: Address, visit: Callable[[Connection], Awaitable[None]]
) -> AsyncIterator[None]:
    async def serve(connection: Connection, host: str) -> None:
        with suppress(Exception):
            await visit(connection)

    async with listen("address", place, None, serve):
        yield


def test_a_listener_that_dies_in_the_handshake_is_an_end_and_not_a_refusal(place):
    async def die(connection: Connection) -> None:
        await connection.recv()
        connection.transport.abort()

    async def talk() -> None:
        async with listener_that(place, die):
            error = await error_of(joined(place))
            assert isinstance(error, PeerEndedError)

    asyncio.run(talk())


def test_a_listener_that_speaks_otherwise_is_named(place):
    async def answer(connection: Connection) -> None:
        await connection.send(b"\xde\xad")
        await connection.wait_closed()

    async def talk() -> None:
        async with listener_that(place, answer):
            error = await error_of(joined(place))
            assert f"{place} sent what is not understood here" in str(error)

    asyncio.run(talk())


def test_a_silent_listener_is_given_up(place):
    async def talk() -> None:
        async with listener_that(place, Connection.wait_closed):
            connection = await dial("address", place, None)
            error = await error_of(HANDSHAKE.open(connection, place, HELLO, 0.1))
            assert isinstance(error, PeerEndedError)
            assert "said nothing for 0.1 s" in str(error)
            await asyncio.wait_for(connection.wait_closed(), PATIENCE_S)

    asyncio.run(talk())


def test_a_cancelled_handshake_leaves_no_connection(place):
    async def talk() -> None:
        heard = asyncio.Event()
        ended = asyncio.Event()

        async def listen_only(connection: Connection) -> None:
            await connection.recv()
            heard.set()
            await connection.wait_closed()
            ended.set()

        async with listener_that(place, listen_only):
            joining = asyncio.create_task(joined(place))
            await asyncio.wait_for(heard.wait(), PATIENCE_S)
            joining.cancel()
            with pytest.raises(asyncio.CancelledError):
                await joining
            await asyncio.wait_for(ended.wait(), PATIENCE_S)

    asyncio.run(talk())


def test_a_bug_of_the_listener_ends_one_session_and_is_logged(place, caplog):
    async def talk() -> None:
        async with desk(place) as (there, _):
            there.talk = partial(_raise, RuntimeError("a bug"))
            peer, _ = await joined(place)
            with pytest.raises(PeerEndedError):
                await peer.next()
            del there.talk
            async with inside(place) as again:
                assert await again.call("double", 1) == 2

    asyncio.run(talk())
    assert "the session of one at the desk failed" in caplog.text


async def _raise(error: Exception, peer: Peer) -> None:
    raise error


def test_between_hosts_only_the_keys_of_the_same_authority_let_in(keys, tmp_path):
    others = make_keys(tmp_path / "others")

    async def talk() -> None:
        async with desk(Address("127.0.0.1", 0), keys) as (there, place):
            error = await error_of(joined(place, keys=others))
            assert isinstance(error, ConnectionError)
            assert "are its certificates of the same authority?" in str(error)
            async with inside(place, keys=keys) as peer:
                assert await peer.call("double", 1) == 2
            assert [caller.host for caller in there.callers] == ["127.0.0.1"]

    asyncio.run(talk())


class Redialled:
    """A process that stays connected to the desk; `served` are its sessions."""

    def __init__(self, place: Address, first: Peer | None = None) -> None:
        self.served: list[Peer] = []
        self.num_dials = 0
        self._place = place
        self.task = asyncio.create_task(stay_connected("a link", self._connect, self._serve, first))

    async def _connect(self) -> Peer:
        self.num_dials += 1
        peer, _ = await joined(self._place)
        return peer

    async def _serve(self, peer: Peer) -> None:
        self.served.append(peer)
        async for _ in peer.messages():
            pass

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])


def test_dialling_goes_on_until_someone_is_there_and_after_each_end(place):
    async def talk() -> None:
        link = Redialled(place)
        await until(lambda: link.num_dials == 2)
        for count in (1, 2):
            async with desk(place) as (there, _):
                await until(lambda count=count: len(link.served) == count and there.callers)
        await until(lambda: all(peer.ended.is_set() for peer in link.served))
        await link.stop()

    asyncio.run(talk())


def test_one_that_is_refused_twice_says_so_once_and_is_let_in_at_last(place, caplog):
    caplog.set_level("INFO", logger="moe_lora")

    async def talk() -> None:
        async with desk(place, refusals=2) as (there, _):
            link = Redialled(place)
            await until(lambda: there.inside == {"one"})
            assert there.num_refused == 2
            assert link.num_dials == 3
            await until(lambda: link.served)
            await link.stop()
            await until(lambda: not there.inside)

    asyncio.run(talk())
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("a link: ")]
    assert said == ["a link: one is here already; choose another name; trying on", f"a link: joined {place}"]


def test_a_first_session_is_served_before_anyone_dials(place):
    async def talk() -> None:
        async with desk(place) as (there, _):
            first, _ = await joined(place)
            link = Redialled(place, first)
            await until(lambda: link.served == [first])
            assert link.num_dials == 0
            there.peers[0].end("enough")
            await until(lambda: len(link.served) == 2)
            assert link.num_dials == 1
            await link.stop()

    asyncio.run(talk())


@pytest.mark.parametrize(
    ("error", "has_traceback"), [(LoraServerError("no"), False), (RuntimeError("no"), True)]
)
def test_a_session_that_fails_each_time_is_ended_and_logged_once(place, caplog, error, has_traceback):
    async def talk() -> None:
        async with desk(place) as (there, _):
            served: list[Peer] = []

            async def fail(peer: Peer) -> None:
                served.append(peer)
                raise error

            async def connect() -> Peer:
                return (await joined(place))[0]

            task = asyncio.create_task(stay_connected("a link", connect, fail))
            await until(lambda: len(served) == 3)
            task.cancel()
            await until(lambda: all(peer.ended.is_set() for peer in (*served, *there.peers)))

    asyncio.run(talk())
    [said] = [one for one in caplog.records if one.getMessage() == "a link: no; trying on"]
    assert bool(said.exc_info) == has_traceback


def test_pauses_grow_up_to_a_bound_and_begin_anew_once_a_session_went_well(monkeypatch):
    problems = ["refused"] * 8 + [None, "refused"]
    pauses: list[float] = []

    async def sleep(pause_s: float) -> None:
        pauses.append(pause_s)
        if not problems:
            raise asyncio.CancelledError

    class NoPeer:
        name = "nobody"

        def end(self) -> None:
            """Nothing is open."""

    async def connect() -> Any:
        return NoPeer()

    async def serve(_: Any) -> None:
        problem = problems.pop(0)
        if problem is not None:
            raise ConnectionError(problem)

    monkeypatch.setattr(session, "asyncio", SimpleNamespace(sleep=sleep))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(stay_connected("a link", connect, serve))
    first, bound = session.FIRST_PAUSE_S, session.LONGEST_PAUSE_S
    grown = [min(bound, first * session.PAUSE_GROWTH**number) for number in range(8)]
    assert pauses[:8] == pytest.approx(grown)
    assert pauses[7] == bound
    assert pauses[8:] == pytest.approx([first, first * session.PAUSE_GROWTH])
