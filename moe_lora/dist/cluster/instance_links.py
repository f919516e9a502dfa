# SPDX-License-Identifier: Apache-2.0
"""An engine's connections to all front ends, with redials."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from moe_lora.config import CONTROLLER, CONTROLLERS
from moe_lora.core.address import Address
from moe_lora.core.errors import CapacityError
from moe_lora.core.request import GenerateRequest, TokenOutput, token_work
from moe_lora.dist.net.codec import Decoder, Interface, Message, Protocol, verb, verbs_of
from moe_lora.dist.net.connection import dial
from moe_lora.dist.net.peer import Asked, Peer
from moe_lora.dist.net.session import Handshake, Hello, stay_connected
from moe_lora.engine.client.messages import (
    REQUEST_METHODS,
    Abort,
    Alias,
    Beat,
    Call,
    Dead,
    DrainOrder,
    Event,
    Generate,
    Inbox,
    InstanceFacts,
    Move,
    MoveOrder,
    Outputs,
    Pulse,
    Rejected,
    Reply,
    Request,
    Stop,
)
from moe_lora.engine.verbs import ENGINE_VERBS

if TYPE_CHECKING:
    from moe_lora.dist.net.fence import Fence
    from moe_lora.dist.net.keys import Keys

logger = logging.getLogger(__name__)

MAX_JOINED_BYTES = 1 << 14
"""Larger experts of an output go in a separate message."""


@dataclass(eq=False)
class _Request:
    """A running request.  num_prompt: tokens before its first token."""

    peer: Peer
    request_id: str
    num_prompt: int
    left: int


class ConnectionMux:
    """Passes commands of all peers to an engine loop, and each event to its peer.

    Peers may use equal ids; a lost peer gets no events.  Belongs to the connections' event loop.
    """

    def __init__(
        self,
        inbox: Inbox,
        max_model_len: int,
        restart: Callable[[], None] = lambda: None,
        fail: Callable[[], None] = lambda: None,
    ) -> None:
        self._inbox = inbox
        self._restart = restart
        self._own = verbs_of(self)
        self._fail = fail
        self.drain = DrainOrder()
        self.aliases: dict[str, Alias] = {}
        self._max_model_len = max_model_len
        self._open: list[Peer] = []
        self._requests: dict[str, _Request] = {}
        self._names: dict[tuple[Peer, str], str] = {}
        self._calls: dict[int, tuple[Peer, Asked]] = {}
        self._numbers = itertools.count(1)

    def open(self, peer: Peer) -> None:
        self._open.append(peer)

    def close(self, peer: Peer) -> None:
        """End this peer's requests."""
        self._open.remove(peer)
        for name, asked in self._requests.items():
            if asked.peer is peer:
                self._inbox.put(Abort(name))

    def put(self, peer: Peer, message: Message | Asked) -> None:
        """Pass on a peer's command."""
        if isinstance(message, Asked):
            args = message.args
            if message.method in self._own:
                message.answer(self._own[message.method](*args))
                return
            if message.method in REQUEST_METHODS:
                name = self._names.get((peer, args[0]))
                if name is None:
                    message.fail(ValueError(f"request {args[0]!r} is not running here"))
                    return
                args = (name, *args[1:])
            number = next(self._numbers)
            self._calls[number] = peer, message
            call = Call(number, message.method, args)
            if message.method not in REQUEST_METHODS or not self._inbox.answers(call):
                self._inbox.put(call)
        elif isinstance(message, Request):
            try:
                request = message.decoded()
            except TypeError as error:
                peer.send(Rejected(message.request_id, error))
            else:
                self._inbox.put(Generate(self._named(peer, request)))
        elif isinstance(message, Abort):
            name = self._names.get((peer, message.request_id))
            if name is not None:
                self._inbox.put(Abort(name))

    @verb
    def restart(self) -> None:
        """End this process for a restart."""
        self._restart()

    @verb
    def remember_drain(self, order: DrainOrder) -> None:
        """Keep the later order."""
        self.drain = max(self.drain, order, key=lambda one: one.number)

    @verb
    def remember_aliases(self, aliases: Mapping[str, Alias]) -> None:
        """Keep the later aliases."""
        from .aliases import learn

        learn(self.aliases, aliases)

    @verb
    def pass_on(self, orders: Sequence[MoveOrder]) -> int:
        """Send orders to these requests' front ends; returns the number of live requests."""
        found = [(asked, order) for order in orders if (asked := self._requests.get(order.name)) is not None]
        for asked, order in found:
            if asked.peer in self._open:
                asked.peer.send(Move(asked.request_id, order.target, order.kind))
        return len(found)

    def _named(self, peer: Peer, request: GenerateRequest) -> GenerateRequest:
        name = request.request_id
        while name in self._requests:
            name = f"{request.request_id} ({next(self._numbers)})"
        work = token_work(request, self._max_model_len)
        self._requests[name] = _Request(peer, request.request_id, request.known_tokens, work)
        self._names[peer, request.request_id] = name
        return request if name == request.request_id else replace(request, request_id=name)

    def emit(self, event: Event) -> None:
        """Send the loop's event to its peers."""
        if isinstance(event, Outputs):
            for (peer, _), outputs in self._sorted(event.outputs).items():
                if peer in self._open:
                    try:
                        peer.send(Outputs(outputs))
                    except ValueError:
                        self._send_apart(peer, outputs)
        elif isinstance(event, Rejected):
            asked = self._ended(event.request_id)
            if asked.peer in self._open:
                asked.peer.send(Rejected(asked.request_id, event.error))
        elif isinstance(event, Reply):
            peer, call = self._calls.pop(event.call_id)
            if peer not in self._open:
                return
            if event.error is None:
                call.answer(event.value)
            else:
                call.fail(event.error)
        elif isinstance(event, Dead):
            for peer in self._open:
                peer.send(event)
            self._fail()

    def _send_apart(self, peer: Peer, outputs: list[TokenOutput]) -> None:
        """Send a message per output; an unsendable output ends its request."""
        for output in outputs:
            try:
                peer.send(Outputs([output]))
            except ValueError as error:
                self.put(peer, Abort(output.request_id))
                problem = f"a step's output can't be sent ({error}); request fewer log probabilities"
                peer.send(Rejected(output.request_id, CapacityError(problem)))

    def _sorted(self, outputs: list[TokenOutput]) -> dict[tuple[Peer, str], list[TokenOutput]]:
        """Outputs by receiver and, for a separate message, request name."""
        found: dict[tuple[Peer, str], list[TokenOutput]] = {}
        for output in outputs:
            name = output.request_id
            asked = self._requests[name]
            if self._names.get((asked.peer, asked.request_id)) == name:
                if output.token_ids:
                    asked.left -= asked.num_prompt + len(output.token_ids)
                    asked.num_prompt = 0
                if asked.request_id != name:
                    output = msgspec.structs.replace(output, request_id=asked.request_id)
                experts = None if output.prompt is None else output.prompt.experts
                is_alone = experts is not None and len(experts[2]) > MAX_JOINED_BYTES
                found.setdefault((asked.peer, name if is_alone else ""), []).append(output)
            if output.finish_reason is not None:
                self._ended(name)
        return found

    def _ended(self, name: str) -> _Request:
        asked = self._requests.pop(name)
        key = asked.peer, asked.request_id
        if self._names.get(key) == name:
            del self._names[key]
        return asked

    def elsewhere(self, peer: Peer, stuck_s: float, held_back: bool = False) -> Beat:
        """A beat with all other peers' requests."""
        others = [asked for asked in self._requests.values() if asked.peer is not peer]
        return Beat(
            stuck_s=stuck_s,
            num_running=sum(not asked.num_prompt for asked in others),
            num_waiting=sum(asked.num_prompt > 0 for asked in others),
            outstanding_tokens=sum(asked.left for asked in others),
            held_back=held_back,
        )


INSTANCE_INTERFACE = Interface({**ENGINE_VERBS, **verbs_of(ConnectionMux)})
HANDSHAKE = Handshake(
    "front end",
    version=23,
    payload=Decoder(InstanceFacts),
    dials=Protocol.of(Request, Abort, answers=INSTANCE_INTERFACE),
    listens=Protocol.of(Outputs, Rejected, Dead, Beat, Move, asks=INSTANCE_INTERFACE),
    welcome=Decoder(tuple[float, int]),
)
"""The epoch: constant in the engine's process.  The welcome: seconds between beats, a leader's epoch or 0."""


class FrontEndLinks:
    """Links to each listener, for an engine loop's commands and events.

    Belongs to the creator's event loop.
    """

    def __init__(
        self, addresses: Mapping[str, Address], keys: Keys | None, inbox: Inbox, max_model_len: int
    ) -> None:
        self._addresses = addresses
        self._keys = keys
        self._inbox = inbox
        self._mux = ConnectionMux(inbox, max_model_len, self._restart, self._fail)
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        self._heartbeat_s: dict[Peer, float] = {}
        self._fence: Fence | None = None
        self.failed = False
        """True if the engine failed."""
        self.restarts = False
        """True if `run` ended for a restart."""

    def emit(self, event: Event) -> None:
        """Send an event to its peers, from any thread."""
        with suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._mux.emit, event)

    def stop(self) -> None:
        """End `run`, from any thread or signal handler."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stopping.set)

    def _restart(self) -> None:
        self.restarts = True
        self._stopping.set()

    async def run(self, instance: str, epoch: str, facts: InstanceFacts, pulse: Pulse) -> None:
        """Serve until `stop`, then stop the engine loop."""

        def hello() -> Hello:
            return HANDSHAKE.hello(
                instance, replace(facts, drain=self._mux.drain, aliases=self._mux.aliases), epoch
            )

        links = []
        for name, address in self._addresses.items():
            connect, serve = partial(self._connect, name, address, hello), partial(self._serve, name, pulse)
            links.append(asyncio.create_task(stay_connected(name, connect, serve)))
        await self._stopping.wait()
        self._inbox.put(Stop())
        peers = list(self._heartbeat_s)
        for peer in peers:
            peer.end("the engine was stopped")
        await asyncio.gather(*(peer.closed() for peer in peers))
        for link in links:
            link.cancel()
        await asyncio.gather(*links, return_exceptions=True)

    def _fail(self) -> None:
        self.failed = True
        self._stopping.set()

    async def _connect(self, name: str, address: Address, hello: Callable[[], Hello]) -> Peer:
        connection = await dial(name, address, self._keys)
        peer, (heartbeat_s, epoch) = await HANDSHAKE.open(connection, address, hello())
        of_several = name.startswith(f"{CONTROLLERS}.")
        if epoch or of_several or (self._fence is not None and name == CONTROLLER):
            from moe_lora.dist.net.fence import Fence

            self._fence = self._fence or Fence()
            self._fence.admit(peer, epoch)
        self._heartbeat_s[peer] = heartbeat_s
        return peer

    async def _serve(self, name: str, pulse: Pulse, peer: Peer) -> None:
        """Take commands until the connection ends."""
        self._mux.open(peer)
        beats = asyncio.create_task(self._beat(peer, pulse))
        try:
            # A separate task: a message resumes the reader alone.
            await asyncio.create_task(self._read(peer))
        finally:
            beats.cancel()
            self._mux.close(peer)
            del self._heartbeat_s[peer]
        if not self._stopping.is_set():
            logger.warning("lost %s: %s; its requests end here", name, peer.problem)

    async def _read(self, peer: Peer) -> None:
        async for message in peer.messages():
            self._mux.put(peer, message)

    async def _beat(self, peer: Peer, pulse: Pulse) -> None:
        interval_s = self._heartbeat_s[peer]
        while True:
            peer.send(self._mux.elsewhere(peer, pulse.stuck_s(), pulse.held_back))
            await asyncio.sleep(interval_s)
