# SPDX-License-Identifier: Apache-2.0
"""The leading controller's life: campaign, renewals, end."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import NoReturn

from moe_lora.config import CONTROLLERS
from moe_lora.config.cluster import ClusterConfig
from moe_lora.core.errors import ConfigError, LastProblem
from moe_lora.dist.cluster.controller import ALIVE, READY, set_times

from . import LeaseStore, LostLeaseError, StoreError, open_store

logger = logging.getLogger(__name__)

_POLL_S = 0.4
_RENEW, _AGAIN, _END, _KILL = 0.2, 0.04, 0.8, 0.9
"""Shares of the lease's time: pauses after good and failed renewals; ends by itself and by the kernel."""
_STALLED = "the store does not answer the renewal in time"


class Leader:
    """A controller's place in the election.

    section: of its addresses.  loop: must run for renewals, if set.
    """

    def __init__(self, name: str, store: LeaseStore, ttl_s: float) -> None:
        self.section = f"{CONTROLLERS}.{name}"
        self.loop: asyncio.AbstractEventLoop | None = None
        self._name, self._store, self._ttl_s = name, store, ttl_s
        self._until_s = 0.0
        self._problem = StoreError(_STALLED)
        self._may_hold = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="leadership", daemon=True)

    def campaign(self) -> int:
        """Wait for the lease; returns the epoch.  Renewals go on until `release`."""
        holder, problem, leads = f"{self._name} {secrets.token_hex(8)}", LastProblem(), LastProblem()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        while True:
            set_times(ALIVE)
            try:
                self._may_hold = True
                other, epoch = self._store.acquire(holder)
                self._may_hold = other == holder
                set_times(READY)
                problem.over()
                if other == holder:
                    self._renew()
                    break
                if leads.is_new(f"{other} {epoch}"):
                    leading = other.partition(" ")[0]
                    logger.info("controller %s leads (epoch %d); %s stands by", leading, epoch, self._name)
            except (StoreError, LostLeaseError) as error:
                if problem.is_new(str(error)):
                    logger.warning("controller %s can't lead: %s; trying on", self._name, error)
            time.sleep(min(_POLL_S, _RENEW * self._ttl_s))
        logger.warning("controller %s leads (epoch %d)", self._name, epoch)
        self._thread.start()
        threading.Thread(target=self._watch, name="leadership-watch", daemon=True).start()
        return epoch

    def release(self) -> None:
        """Free the lease, also of an ended campaign.  Idempotent."""
        if self._over.is_set() or not self._may_hold:
            return
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        try:
            self._store.release()
            if self._until_s:
                logger.info("controller %s leads no more", self._name)
        except StoreError as error:
            logger.warning("the lease ends after leadership.ttl_s: %s", error)

    def _renew(self) -> None:
        sent_s = time.monotonic()
        self._store.renew()
        until_s = sent_s + _END * self._ttl_s
        if time.monotonic() >= until_s:
            raise StoreError(_STALLED)
        self._until_s = until_s
        left_s = max(sent_s + _KILL * self._ttl_s - time.monotonic(), 1e-6)
        # Ends a stopped process; in a container the kernel spares process 1.
        if os.getpid() == 1:
            faulthandler.dump_traceback_later(left_s, exit=True)
        else:
            signal.setitimer(signal.ITIMER_REAL, left_s)

    def _keep(self) -> None:
        problem, pause = LastProblem(), _RENEW
        while not self._over.wait(pause * self._ttl_s):
            try:
                self._check_loop()
                self._renew()
                problem.over()
                self._problem, pause = StoreError(_STALLED), _RENEW
            except LostLeaseError as error:
                self._end(error)
            except StoreError as error:
                self._problem, pause = error, _AGAIN
                if problem.is_new(str(error)):
                    logger.warning("the lease of controller %s is not renewed: %s", self._name, error)

    def _watch(self) -> None:
        """End the process once the lease is not renewed in time, also during a call of the store."""
        while not self._over.wait(max(self._until_s - time.monotonic(), 0.0)):
            if time.monotonic() >= self._until_s:
                self._end(self._problem)

    def _check_loop(self) -> None:
        """Raises StoreError if the event loop does not get on."""
        if self.loop is not None and not self._over.is_set():
            beat = threading.Event()
            with suppress(RuntimeError):  # the event loop has ended
                self.loop.call_soon_threadsafe(beat.set)
            if not beat.wait(_RENEW * self._ttl_s):
                raise StoreError("the event loop of this process does not get on")

    def _end(self, error: Exception) -> None:
        logger.error("controller %s leads no more: %s; the process ends for a restart", self._name, error)
        os._exit(os.EX_TEMPFAIL)


@contextmanager
def leading(cluster: ClusterConfig, name: str | None) -> Iterator[tuple[ClusterConfig, Leader]]:
    """Wait until this controller leads; the cluster then has the epoch.

    Raises ConfigError for an unknown name.
    """
    assert cluster.leadership is not None
    if name is None or name not in cluster.controllers:
        names = ", ".join(cluster.controllers)
        raise ConfigError(f"controllers has none named {name!r}; give --name with one of {names}")
    leader = Leader(name, open_store(cluster), cluster.leadership.ttl_s)

    def end(*_: object) -> NoReturn:
        sys.exit(0)

    signal.signal(signal.SIGTERM, end)
    try:
        epoch = leader.campaign()
        yield replace(cluster, leadership=replace(cluster.leadership, epoch=epoch)), leader
    finally:
        leader.release()
