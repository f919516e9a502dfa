"""NIXL's reads and writes from their start to their end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from .nixl_window import NixlRemoteWindow, Transfer

_log = logging.getLogger(__name__)


class Transfers:
    """Starts and ends the transfers of one agent."""

    def __init__(
        self,
        agent: Any,
        errors: tuple[type[Exception], ...],
        lock: threading.RLock,
        meanwhile: Callable[[], None],
    ) -> None:
        """errors: what NIXL raises.  lock: held around each use of the agent.  meanwhile: done while
        waiting."""
        self._agent, self._errors, self._lock, self._meanwhile = agent, errors, lock, meanwhile

    def start(
        self, operation: str, tensor: torch.Tensor, remote: NixlRemoteWindow, offset: int, notice: bytes = b""
    ) -> Transfer:
        """Begin to WRITE or READ; `ended` sends the notice. Raises PeerGoneError."""
        with self._lock:
            return self._start(operation, tensor, remote, offset, notice)

    def _start(
        self, operation: str, tensor: torch.Tensor, remote: NixlRemoteWindow, offset: int, notice: bytes
    ) -> Transfer:
        registered = self._agent.register_memory([(tensor.data_ptr(), tensor.nbytes, 0, "")], "DRAM")
        here = self._agent.get_xfer_descs([(tensor.data_ptr(), tensor.nbytes, 0)], "DRAM")
        there = self._agent.get_xfer_descs([(remote.address + offset, tensor.nbytes, 0)], "DRAM")
        try:
            handle = self._agent.initialize_xfer(operation, here, there, remote.agent, b"")
            self._agent.transfer(handle)
        except self._errors as error:
            self._agent.deregister_memory(registered)
            raise remote.gone(error) from None
        return Transfer(handle=handle, registered=registered, tensor=tensor, notice=notice)

    def ended(self, transfers: list[Transfer], remote: NixlRemoteWindow) -> bool:
        """Let transfers get on, drop those that are done, in their order, and send their notices.

        Returns whether none is left.  Raises PeerGoneError.
        """
        # NIXL could send the notices itself, but then one would overtake an earlier write under way.
        with self._lock:
            while transfers:
                try:
                    state = self._advance(transfers[0], remote)
                    reason: object = "its process has ended"
                except self._errors as error:
                    state, reason = "ERR", error
                if state == "PROC":
                    return False
                self._release(transfers.pop(0))
                if state != "DONE":
                    self.give_up(transfers)
                    raise remote.gone(reason)
        return True

    def _advance(self, transfer: Transfer, remote: NixlRemoteWindow) -> str:
        state = "DONE" if transfer.handle is None else str(self._agent.check_xfer_state(transfer.handle))
        if state == "DONE" and transfer.notice:
            self._agent.send_notif(remote.agent, transfer.notice)
        return state

    def finish(self, transfers: list[Transfer], remote: NixlRemoteWindow, timeout_s: float) -> None:
        """Wait until the transfers that are in the list by now have ended; other threads may add to it.

        Raises PeerGoneError, also after timeout_s.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            last = transfers[-1] if transfers else None
        while not self.ended(transfers, remote) and last in transfers:
            if time.monotonic() > deadline:
                self.give_up(transfers)
                raise remote.gone(f"no answer within timeout_s={timeout_s:g}")
            self._meanwhile()  # the peer may be waiting for this process to take what it puts

    def give_up(self, transfers: list[Transfer]) -> None:
        """Cancel transfers, and empty the list."""
        while transfers:
            self._release(transfers.pop())

    def _release(self, transfer: Transfer) -> None:
        if transfer.handle is None:
            return
        with self._lock:
            try:
                self._agent.release_xfer_handle(transfer.handle)
            except self._errors:
                _log.warning("NIXL keeps a transfer that can't be cancelled")
            self._agent.deregister_memory(transfer.registered)
