# SPDX-License-Identifier: Apache-2.0
"""An instance's leases: requested from the leader, and again from a new leader."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from moe_lora.adapters.host_store import HostStore
from moe_lora.core.errors import CapacityError, LoraServerError
from moe_lora.dist.net.codec import Message
from moe_lora.dist.net.peer import Peer, PeerEndedError
from moe_lora.dist.net.session import stay_connected
from moe_lora.lora.row_routing import Lease
from moe_lora.policies.caching.caching import ANYBODY, Asker

from .content import num_blocks, send_blocks
from .control import REJOIN_S, Hear, network
from .messages import AdapterFailed, Need

logger = logging.getLogger(__name__)

_ANSWER_S = 30.0


class LeaseClient:
    """Keeps the leases of one instance, by adapters' content hash.

    The engine's thread states needs and reads grants; the event loop of the control connections does the
    rest.  on_change: called there after changes of leases or leader.  on_failure: called there with a failed
    adapter and the error; the next `register` makes the server try again.  join_leader: connects as an
    instance, with a time limit and a message handler.
    Raises LoraServerError without a leader within timeout_s.
    """

    def __init__(
        self,
        join_leader: Callable[[float, Hear], Awaitable[Peer]],
        store: HostStore,
        on_change: Callable[[], None],
        timeout_s: float,
        on_failure: Callable[[str, Exception], None] = lambda adapter_id, error: None,
    ) -> None:
        self._join_leader = join_leader
        self._store = store
        self._on_change = on_change
        self._on_failure = on_failure
        self._registered: set[str] = set()
        self._rejected: dict[str, Exception] = {}
        # Acquire number and askers, in order of calls, for a new leader.  Of the engine's thread.
        self._wanted: dict[str, tuple[int, tuple[Asker, ...]]] = {}
        self._numbers = itertools.count(1)
        self._granted: dict[str, tuple[int, Lease]] = {}
        """With the acquire's number: a grant for an abandoned acquire is not for the next."""
        self._peer: Peer | None = None
        self._joined = network().run(self._start(timeout_s))

    @property
    def connected(self) -> bool:
        return self._peer is not None

    def register(self, adapter_id: str) -> None:
        """Register an adapter of the host store at the server.

        Raises CapacityError if the adapter can never be resident; assumed to fit while the server is away.
        """
        network().run(self._register(adapter_id))

    def unregister(self, adapter_id: str) -> None:
        network().loop.call_soon_threadsafe(self._unregister, adapter_id)

    def acquire(self, adapter_id: str, asker: Asker = ANYBODY) -> bool:
        """Ask for a lease; False if the server is away or has refused the adapter.

        asker: requester; of several, the first in turn counts.  `on_change` reports the lease.
        """
        number, askers = self._wanted.get(adapter_id) or (next(self._numbers), ())
        if asker not in askers and self.lease(adapter_id) is None:
            self._wanted[adapter_id] = number, (*askers, asker)
            network().loop.call_soon_threadsafe(self._acquire, adapter_id, number, (asker,))
        return self.connected and adapter_id not in self._rejected

    def lease(self, adapter_id: str) -> Lease | None:
        """The granted lease of an acquired adapter, while valid."""
        number, lease = self._granted.get(adapter_id, (0, None))
        return lease if number == self._wanted.get(adapter_id, (0,))[0] else None

    def release(self, adapter_id: str) -> None:
        """Return the lease, or cancel the wait."""
        if self._wanted.pop(adapter_id, None) is not None:
            network().loop.call_soon_threadsafe(self._tell, "release", adapter_id)

    def stop(self) -> None:
        self._joined.get_loop().call_soon_threadsafe(self._joined.cancel)
        network().run(self._ended())

    async def _start(self, timeout_s: float) -> asyncio.Task[None]:
        first = self._peer = await self._join(timeout_s)
        return asyncio.create_task(stay_connected("leases", self._join, self._serve, first))

    async def _ended(self) -> None:
        await asyncio.wait([self._joined])
        if self._peer is not None:
            await self._peer.closed()

    async def _join(self, timeout_s: float = REJOIN_S) -> Peer:
        return await self._join_leader(timeout_s, self._hear)

    async def _serve(self, peer: Peer) -> None:
        self._peer = peer
        answers = {adapter_id: peer.call("register", adapter_id) for adapter_id in self._registered}
        for adapter_id, wanted in self._wanted.copy().items():
            self._acquire(adapter_id, *wanted)
        known = [asyncio.create_task(self._make_known(peer, *answer)) for answer in answers.items()]
        await peer.ended.wait()
        await asyncio.gather(*known)
        logger.warning("lost the leader of the LoRA Server, and all leases with it: %s", peer.problem)
        self._peer = None
        self._granted.clear()
        self._rejected.clear()
        self._on_change()

    def _tell(self, method: str, adapter_id: str) -> None:
        """Sends nothing without a connection: the next leader gets the current needs."""
        if self._peer is not None:
            self._peer.call(method, adapter_id)

    async def _register(self, adapter_id: str) -> None:
        self._registered.add(adapter_id)
        self._rejected.pop(adapter_id, None)
        if self._peer is not None:
            answer = self._peer.call("register", adapter_id)
            known = asyncio.create_task(self._make_known(self._peer, adapter_id, answer))
            await asyncio.wait([known], timeout=_ANSWER_S)
        error = self._rejected.pop(adapter_id, None)
        if error is not None:
            self._registered.discard(adapter_id)
            raise error if isinstance(error, CapacityError) else CapacityError(str(error)) from error

    async def _make_known(self, peer: Peer, adapter_id: str, answer: asyncio.Future[Any]) -> None:
        try:
            if not await answer:
                await (await self._give(peer, adapter_id))
                if not await peer.call("register", adapter_id):
                    raise LoraServerError("the LoRA Server can't read the content that it was sent")
                if adapter_id in self._wanted and self.lease(adapter_id) is None:
                    self._acquire(
                        adapter_id, *self._wanted[adapter_id]
                    )  # the first acquire came before the content
        except PeerEndedError:
            return
        except Exception as error:
            self._rejected[adapter_id] = error
            logger.warning("the LoRA Server does not take adapter %s: %s", adapter_id, error)
            self._on_change()

    def _unregister(self, adapter_id: str) -> None:
        self._registered.discard(adapter_id)
        self._rejected.pop(adapter_id, None)
        self._tell("unregister", adapter_id)

    def _acquire(self, adapter_id: str, number: int, askers: tuple[Asker, ...]) -> None:
        if self._peer is not None:
            for asker in askers:
                answer = self._peer.call("acquire", adapter_id, *asker)
                answer.add_done_callback(partial(self._take, adapter_id, number))

    def _take(self, adapter_id: str, number: int, answer: asyncio.Future[tuple[int, int]]) -> None:
        if answer.exception() is None:
            self._granted[adapter_id] = number, Lease(*answer.result())
            self._on_change()

    async def _hear(self, peer: Peer, message: Message) -> None:
        if isinstance(message, Need):
            try:
                await self._give(peer, message.adapter_id)
            except Exception as error:
                logger.error("adapter %s can't be given to the LoRA Server: %s", message.adapter_id, error)
                peer.call("fail_content", message.adapter_id, str(error))
        elif isinstance(message, AdapterFailed):
            self._fail(message.adapter_id, LoraServerError(message.reason))

    def _fail(self, adapter_id: str, error: Exception) -> None:
        self._rejected[adapter_id] = error
        self._granted.pop(adapter_id, None)
        try:
            self._on_failure(adapter_id, error)
        except Exception:
            logger.exception("the failure of adapter %s can't be reported", adapter_id)
        self._on_change()

    async def _give(self, peer: Peer, adapter_id: str) -> asyncio.Future[Any]:
        if not await asyncio.to_thread(self._store.restore, adapter_id):
            raise LoraServerError("it is not in the store")
        answer = peer.call("give", adapter_id, num_blocks(self._store, adapter_id))
        send_blocks(peer, self._store, adapter_id)
        return answer
