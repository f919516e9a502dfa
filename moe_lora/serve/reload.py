# SPDX-License-Identifier: Apache-2.0
"""Settings that SIGHUP reloads."""

from __future__ import annotations

import asyncio
import logging
import signal
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace

from moe_lora.config import FrontEndConfig, LimitsConfig
from moe_lora.config.cluster import ClusterConfig
from moe_lora.core.processes import has_terminal, set_log_level

from .limits import Limits

logger = logging.getLogger(__name__)

_FIXED = frozenset({"trusted_proxies", "idle_timeout_s", "max_unread_steps"})
"""Limits fixed at a connection's start."""
RELOADED = ("log_level", *(one.name for one in fields(LimitsConfig) if one.name not in _FIXED))
"""`front_end` settings that change without a restart."""


class Reload:
    """Reads a front end's settings again, and applies changes.  read: may raise."""

    def __init__(self, read: Callable[[], ClusterConfig]) -> None:
        self._read = read
        self._now = read()
        self._tasks: set[asyncio.Task[None]] = set()
        self.passes_on: list[Callable[[FrontEndConfig], None]] = []
        """Called with the reloaded settings, for dependent processes."""

    def begin(self, limits: Limits | None, context: ssl.SSLContext | None = None) -> None:
        """Start the reload as a task.  limits: None at a controller.  context: of TLS."""
        task = asyncio.create_task(self._reload(limits, context))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reload(self, limits: Limits | None, context: ssl.SSLContext | None) -> None:
        now = await self.read_again(self._now.front_end)
        if now is None:
            return
        if limits is not None:
            limits.change(now)
        if context is not None and now.tls_cert is not None:
            try:
                # A trial first: a failed load may have replaced the certificate without its key.
                for one in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), context):
                    one.load_cert_chain(now.tls_cert, now.tls_key)
            except OSError as error:
                logger.error("the certificate %s can't be read again and stays: %s", now.tls_cert, error)

    async def read_again(self, config: FrontEndConfig) -> FrontEndConfig | None:
        """A front end's current settings; None if unreadable: the last settings stay."""
        before = self._now.front_end
        try:
            found = await asyncio.to_thread(self._read)
        except Exception as error:
            logger.error("the settings can't be read again and stay as they are: %s", error)
            return None
        now = {name: getattr(found.front_end, name) for name in RELOADED}
        told = [f"{name}={value}" for name, value in now.items() if value != getattr(before, name)]
        self._now = replace(self._now, front_end=replace(before, **now))
        set_log_level(found.front_end.log_level)
        logger.warning("the settings were read again: %s", ", ".join(told) or "nothing has changed")
        if found != self._now:
            logger.warning(
                "settings that can't change while it serves have changed too; restart it for those"
            )
        for pass_on in self.passes_on:
            try:
                pass_on(self._now.front_end)
            except OSError as error:
                logger.error("processes of this server keep the log level that they have: %s", error)
        return replace(config, **now)


def on_hang_up(stop: Callable[[], None], reload: Callable[[], None]) -> Callable[[], None]:
    """SIGHUP handler: stop if the terminal was closed, else reload."""
    had_terminal = has_terminal()
    return lambda: stop() if had_terminal and not has_terminal() else reload()


@contextmanager
def hang_ups_ignored() -> Iterator[None]:
    """During the start, SIGHUP acts as SIGTERM if the terminal was closed, and else has no effect."""
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL:
        yield
        return
    hang_up = on_hang_up(lambda: signal.raise_signal(signal.SIGTERM), lambda: None)
    signal.signal(signal.SIGHUP, lambda *_: hang_up())
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
