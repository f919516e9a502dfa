# SPDX-License-Identifier: Apache-2.0
"""Processes of a busy machine are slow, not silent: links wait for each other as long as a test."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest import mock

from moe_lora.dist.net import connection, session

from .patience import PATIENCE_S


def links_have_time() -> AbstractContextManager[object]:
    """Links opened here send no pings, and wait for their peers' first and last messages."""
    usual = connection._options

    def patient(pings: connection.Pings | None) -> dict[str, Any]:
        return usual(None) | {"open_timeout": PATIENCE_S, "close_timeout": PATIENCE_S}

    stack = ExitStack()
    stack.enter_context(mock.patch.object(connection, "_options", patient))
    stack.enter_context(mock.patch.object(session, "OPEN_S", PATIENCE_S))
    return stack
