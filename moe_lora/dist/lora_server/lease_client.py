"""An instance's leases: asked of the leader, granted when there is room, asked again of a new leader."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from typing import Any

from moe_lora.adapters.host_store import HostStore
from moe_lora.core.errors import CapacityError, LoraServerError
from moe_lora.kernels.step import Lease

from .content import send_content
from .control import ControlConnection, Message, dial
from .membership import SILENCE_S

logger = logging.getLogger(__name__)

_RETRY_S = 0.3
_ANSWER_S = 30.0


class LeaseClient(threading.Thread):
    """Keeps the leases of one instance.  Adapters go by their content hash.

    hello: what to say on connecting (see `control.dial`).  on_change: called, from this object's thread, with
    an adapter and its lease, or None when it was lost.  Raises LoraServerError if the leader is not there.
    """

    def __init__(
        self,
        address: str,
        key: bytes,
        hello: Message,
        store: HostStore,
        on_change: Callable[[str, Lease | None], None],
        connect_timeout_s: float = 60.0,
    ) -> None:
        super().__init__(name="leases", daemon=True)
        self._address = address
        self._key = key
        self._hello = hello
        self._store = store
        self._on_change = on_change
        self._lock = threading.Condition()
        self._registered: set[str] = set()
        self._wanted: set[str] = set()
        self._held: set[str] = set()
        self._answers: dict[str, str | None] = {}
        self._stats: dict[int, Any] = {}
        self._requests = itertools.count(1)
        self._stopping = threading.Event()
        self._connection: ControlConnection | None = dial(address, key, hello, connect_timeout_s)[0]
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
            self._answers.pop(adapter_id, None)
            self._send("register", adapter_id)
            self._lock.wait_for(lambda: adapter_id in self._answers or not self.connected, _ANSWER_S)
            error = self._answers.pop(adapter_id, None)
            if error is not None:
                self._registered.discard(adapter_id)
                raise CapacityError(error)

    def unregister(self, adapter_id: str) -> None:
        with self._lock:
            self._registered.discard(adapter_id)
            self._send("unregister", adapter_id)

    def acquire(self, adapter_id: str) -> None:
        """Ask for a lease, once; `on_change` tells when it is there."""
        with self._lock:
            if adapter_id not in self._wanted:
                self._wanted.add(adapter_id)
                self._send("acquire", adapter_id)

    def release(self, adapter_id: str) -> None:
        """Give the lease back, or stop waiting for it."""
        with self._lock:
            if adapter_id in self._wanted:
                self._wanted.discard(adapter_id)
                self._held.discard(adapter_id)
                self._send("release", adapter_id)

    def stats(self, timeout_s: float = 1.0) -> dict[str, int] | None:
        """The leader's counters (`leases.LeaseStats`), None if it does not answer."""
        with self._lock:
            request = next(self._requests)
            self._send("stats", "", request=request)
            self._lock.wait_for(lambda: request in self._stats or not self.connected, timeout_s)
            found: dict[str, int] | None = self._stats.pop(request, None)
            return found

    def stop(self) -> None:
        self._stopping.set()
        connection = self._connection
        if connection is not None:
            connection.close()
        self.join(timeout=5.0)

    def _send(self, kind: str, adapter_id: str, **fields: Any) -> None:
        """While there is no connection nothing is sent: `_resume` says it all again."""
        if self._connection is None:
            return
        try:
            self._connection.send(kind, adapter_id=adapter_id, **fields)
        except OSError:
            logger.debug("the leader is gone; %s %s is said again later", kind, adapter_id)

    def run(self) -> None:
        while not self._stopping.is_set():
            connection = self._connection
            try:
                if connection is None:
                    connection = dial(self._address, self._key, self._hello, 1.0)[0]
                    self._resume(connection)
                while not self._stopping.is_set():
                    message = connection.receive(1.0, SILENCE_S)
                    if message is not None:
                        self._hear(connection, message)
            except LoraServerError:
                self._stopping.wait(_RETRY_S)
            except (EOFError, OSError) as error:
                if not self._stopping.is_set():
                    logger.warning("lost the leader of the LoRA Server, and all leases with it: %r", error)
            if connection is not None:
                connection.close()
            self._lose_all()

    def _resume(self, connection: ControlConnection) -> None:
        """Say to a new leader what is known here and what is wanted."""
        with self._lock:
            self._connection = connection
            for adapter_id in self._registered:
                self._send("register", adapter_id)
            for adapter_id in self._wanted:
                self._send("acquire", adapter_id)

    def _lose_all(self) -> None:
        with self._lock:
            self._connection = None
            lost, self._held = self._held, set()
            self._lock.notify_all()
        for adapter_id in lost:
            self._on_change(adapter_id, None)

    def _hear(self, connection: ControlConnection, message: Message) -> None:
        kind, adapter_id = message["kind"], message.get("adapter_id", "")
        if kind == "need":
            send_content(connection, self._store, adapter_id)
            return
        with self._lock:
            if kind in ("registered", "rejected"):
                self._answers[adapter_id] = message.get("error")
            elif kind == "stats":
                self._stats[message["request"]] = message["stats"]
            elif kind == "granted" and adapter_id in self._wanted:
                self._held.add(adapter_id)
            else:
                return
            self._lock.notify_all()
        if kind == "granted":
            self._on_change(adapter_id, Lease(message["slot"], message["generation"]))
