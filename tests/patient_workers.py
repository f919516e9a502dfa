# SPDX-License-Identifier: Apache-2.0
"""Host workers of a busy machine are slow, not silent: an engine waits for their rows as long as a test."""

from __future__ import annotations

from contextlib import AbstractContextManager
from unittest import mock

from moe_lora.dist.host_workers.worker_link import WorkerTimes

from .patience import PATIENCE_S


def workers_have_time() -> AbstractContextManager[object]:
    """Engines built here have no limit of their own for an answer."""
    usual = WorkerTimes()
    return mock.patch.object(WorkerTimes.__init__, "__defaults__", (PATIENCE_S, usual.slowdown))
