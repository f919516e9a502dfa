# SPDX-License-Identifier: Apache-2.0
"""Settings that are read again while a front end serves: SIGHUP, as other servers have it."""

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
"""Limits that connections take over when they begin."""
RELOADED = ("log_level", *(one.name for one in fields(LimitsConfig) if one.name not in _FIXED))
"""Settings of `front_end` that change without a restart."""


class Reload:
    """Reads a front end's settings again, and takes over those that can change while it serves.

    read: as they are now, of file and options.  Raises what that raises.
    """

    def __init__(self, read: Callable[[], ClusterConfig]) -> None:
        self._read = read
        self._now = read()
        self._tasks: set[asyncio.Task[None]] = set()
        self.passes_on: list[Callable[[FrontEndConfig], None]] = []
        """Called with what was read again, for processes that know these settings from this one."""

    def begin(self, limits: Limits | None, context: ssl.SSLContext | None = None) -> None:
        """Have it done beside all else.  limits: None: there are none, as at a controller.  context: whose
        certificate is read again."""
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
                # Into another first: one that fails may have taken over the certificate, without its key.
                for one in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), context):
                    one.load_cert_chain(now.tls_cert, now.tls_key)
            except OSError as error:
                logger.error("the certificate %s can't be read again and stays: %s", now.tls_cert, error)

    async def read_again(self, config: FrontEndConfig) -> FrontEndConfig | None:
        """A front end's settings with those that can change as they are now, which is logged.

        None: they can't be read, and stay as they were read before.
        """
        before = self._now.front_end
        try:
            found = await asyncio.to_thread(self._read)
        except Exception as error:  # whatever is wrong with the file, requests go on by what was read before
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
    """What to do at SIGHUP: it says that the terminal was closed, or else, that settings have changed."""
    had_terminal = has_terminal()
    return lambda: stop() if had_terminal and not has_terminal() else reload()


@contextmanager
def hang_ups_ignored() -> Iterator[None]:
    """While a server starts SIGHUP ends it, as SIGTERM does, only if its terminal was closed.

    Until it has a handler that reads settings again: they were read just now.
    """
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL:  # nohup
        yield
        return
    hang_up = on_hang_up(lambda: signal.raise_signal(signal.SIGTERM), lambda: None)
    signal.signal(signal.SIGHUP, lambda *_: hang_up())
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
