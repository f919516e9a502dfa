"""An instance's leases: asked of the leader, granted when there is room, asked again of a new leader."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from dataclasses import asdict

from moe_lora.adapters.host_store import HostStore
from moe_lora.core.errors import CapacityError, LastProblem, LoraServerError
from moe_lora.dist.lora_server.protocol.content import send_content
from moe_lora.dist.lora_server.protocol.control import ControlConnection, dial
from moe_lora.dist.lora_server.protocol.control_messages import (
    Acquire,
    Granted,
    LeasesHello,
    Need,
    Register,
    Registered,
    Release,
    ServerRejected,
    Stats,
    StatsAsked,
    Unregister,
)
from moe_lora.dist.lora_server.server.leases import LeaseStats
from moe_lora.dist.net.codec import Message
from moe_lora.dist.net.keys import Keys
from moe_lora.lora.row_routing import Lease

logger = logging.getLogger(__name__)

_RETRY_S = 0.3
_ANSWER_S = 30.0


class LeaseClient(threading.Thread):
    """Keeps the leases of one instance.  Adapters go by their content hash.

    hello: what to say on connecting (see `control.dial`).  on_change: called, from this object's thread and
    without its lock, after leases came or went, or the leader did.  silence_s: a leader silent for longer is
    gone.  Raises LoraServerError if it is not there at first.
    """

    def __init__(
        self,
        address: str,
        keys: Keys | None,
        hello: LeasesHello,
        store: HostStore,
        on_change: Callable[[], None],
        *,
        silence_s: float,
        connect_timeout_s: float = 60.0,
    ) -> None:
        super().__init__(name="leases", daemon=True)
        self._address = address
        self._keys = keys
        self._hello = hello
        self._store = store
        self._on_change = on_change
        self._silence_s = silence_s
        self._lock = threading.Condition()
        self._registered: set[str] = set()
        self._rejected: dict[str, str] = {}
        self._confirmed: set[str] = set()
        # Number of the acquire, in the order asked, so that a new leader hears it so.
        self._wanted: dict[str, int] = {}
        self._numbers = itertools.count(1)
        self._leases: dict[str, Lease] = {}
        self._stats: dict[int, LeaseStats] = {}
        self._requests = itertools.count(1)
        self._stopping = threading.Event()
        self._connection: ControlConnection | None = dial(address, keys, hello, connect_timeout_s)[0]
        self.start()

    @property
    def connected(self) -> bool:
        return self._connection is not None

    def register(self, adapter_id: str) -> None:
        """Make an adapter of the host store known to the server.

        Raises CapacityError if it could never be resident there; taken on trust while the server is away.
        """
        with self._lock:
            self._registered.add(adapter_id)
            self._rejected.pop(adapter_id, None)
            self._confirmed.discard(adapter_id)
            self._send(Register(adapter_id))
            self._lock.wait_for(
                lambda: adapter_id in self._confirmed or adapter_id in self._rejected or not self.connected,
                _ANSWER_S,
            )
            error = self._rejected.pop(adapter_id, None)
            if error is not None:
                self._registered.discard(adapter_id)
                raise CapacityError(error)

    def unregister(self, adapter_id: str) -> None:
        with self._lock:
            self._registered.discard(adapter_id)
            self._confirmed.discard(adapter_id)
            self._rejected.pop(adapter_id, None)
            self._send(Unregister(adapter_id))

    def acquire(self, adapter_id: str) -> bool:
        """Ask for a lease; False if none can come now: the server is away, or has refused the adapter.

        A lease that comes, then or later, is told by `on_change`.
        """
        with self._lock:
            if adapter_id not in self._wanted:
                self._wanted[adapter_id] = next(self._numbers)
                self._send_acquire(adapter_id)
            return self.connected and adapter_id not in self._rejected

    def lease(self, adapter_id: str) -> Lease | None:
        """The lease that was acquired and granted, as long as it lasts."""
        with self._lock:
            return self._leases.get(adapter_id)

    def release(self, adapter_id: str) -> None:
        """Give the lease back, or stop waiting for it."""
        with self._lock:
            if adapter_id in self._wanted:
                del self._wanted[adapter_id]
                self._leases.pop(adapter_id, None)
                self._send(Release(adapter_id))

    def stats(self, timeout_s: float = 1.0) -> dict[str, int] | None:
        """The leader's counters (`leases.LeaseStats`), None if it does not answer."""
        with self._lock:
            request = next(self._requests)
            self._send(StatsAsked(request))
            self._lock.wait_for(lambda: request in self._stats or not self.connected, timeout_s)
            found = self._stats.pop(request, None)
            self._stats.clear()  # answers that came too late
            return None if found is None else asdict(found)

    def stop(self) -> None:
        self._stopping.set()
        connection = self._connection
        if connection is not None:
            connection.close()
        self.join(timeout=5.0)

    def _send(self, message: Message) -> None:
        """While there is no connection nothing is sent: `_resume` says it all again."""
        if self._connection is None:
            return
        try:
            self._connection.send(message)
        except OSError:
            logger.debug("the leader is gone; %s is said again later", message)

    def _send_acquire(self, adapter_id: str) -> None:
        """The grant repeats the number: one of an acquire that was given up since is not for the next one."""
        self._send(Acquire(adapter_id, self._wanted[adapter_id]))

    def run(self) -> None:
        problem = LastProblem()
        while True:
            connection = self._connection
            if connection is not None:
                self._listen(connection)
                self._lose_all()
            if self._stopping.is_set():
                return
            try:
                self._resume(dial(self._address, self._keys, self._hello, 1.0)[0])
                problem.over()
            except LoraServerError as error:
                if problem.is_new(str(error)):
                    logger.warning("%s", error)
                self._stopping.wait(_RETRY_S)

    def _listen(self, connection: ControlConnection) -> None:
        """Hear the leader out until it is gone."""
        try:
            while not self._stopping.is_set():
                message = connection.receive(1.0, self._silence_s)
                if message is not None:
                    self._hear(connection, message)
        except (EOFError, OSError) as error:
            if not self._stopping.is_set():
                logger.warning("lost the leader of the LoRA Server, and all leases with it: %r", error)
        except Exception:
            logger.exception("the leader of the LoRA Server said what can't be followed")
        connection.close()

    def _resume(self, connection: ControlConnection) -> None:
        """Say to a new leader what is known here and what is wanted."""
        with self._lock:
            self._connection = connection
            for adapter_id in self._registered:
                self._send(Register(adapter_id))
            for adapter_id in self._wanted:
                self._send_acquire(adapter_id)
        logger.info("joined the leader of the LoRA Server again")

    def _lose_all(self) -> None:
        with self._lock:
            self._connection = None
            self._leases.clear()
            self._rejected.clear()
            self._confirmed.clear()
            self._lock.notify_all()
        self._on_change()

    def _supply(self, connection: ControlConnection, adapter_id: str) -> None:
        """Send content that the server lacks, if it is here."""
        try:
            if self._store.restore(adapter_id):
                send_content(connection, self._store, adapter_id)
                return
            problem = "it is not in the store"
        except (OSError, CapacityError) as error:
            problem = str(error)
        logger.error("adapter %s can't be given to the LoRA Server: %s", adapter_id, problem)

    def _hear(self, connection: ControlConnection, message: Message) -> None:
        if isinstance(message, Need):
            self._supply(connection, message.adapter_id)
            return
        with self._lock:
            if isinstance(message, Registered):
                adapter_id = message.adapter_id
                self._confirmed.add(adapter_id)
                if adapter_id in self._wanted and adapter_id not in self._leases:
                    self._send_acquire(adapter_id)  # the first one came before the content
            elif isinstance(message, ServerRejected):
                self._rejected[message.adapter_id] = message.error
                logger.warning(
                    "the LoRA Server does not take adapter %s: %s", message.adapter_id, message.error
                )
            elif isinstance(message, Stats):
                self._stats[message.request] = message.stats
            elif isinstance(message, Granted) and self._wanted.get(message.adapter_id) == message.number:
                self._leases[message.adapter_id] = Lease(message.slot, message.generation)
            self._lock.notify_all()
        if isinstance(message, Granted | ServerRejected):
            self._on_change()
