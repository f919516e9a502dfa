# SPDX-License-Identifier: Apache-2.0
"""A lease in a SQLite file, for processes of one host."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from . import LostLeaseError, StoreError

_TABLE = (
    "CREATE TABLE IF NOT EXISTS leader (id INTEGER PRIMARY KEY, holder TEXT, epoch INTEGER, until_s REAL, "
    "boot TEXT)"
)


class SqliteStore:
    """A `LeaseStore`.  Time is the host's monotonic clock of one boot."""

    def __init__(self, path: str, ttl_s: float) -> None:
        self._path, self._ttl_s = path, ttl_s
        self._holder = self._boot = ""
        with suppress(OSError):
            self._boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        try:
            file = sqlite3.connect(self._path, timeout=self._ttl_s / 5, isolation_level=None)
            with closing(file):
                file.execute("BEGIN IMMEDIATE")
                file.execute(_TABLE)
                yield file
                file.execute("COMMIT")
        except sqlite3.Error as error:
            raise StoreError(
                f"leadership.store=sqlite://{self._path} can't be written: {error}; give a file in a "
                "writable folder of this host"
            ) from error

    def acquire(self, holder: str) -> tuple[str, int]:
        with self._writing() as file:
            found = file.execute("SELECT holder, epoch, until_s, boot FROM leader").fetchone()
            now_s, epoch = time.monotonic(), 0
            if found is not None:
                other, epoch, until_s, boot = found
                if boot == self._boot and until_s > now_s:
                    return str(other), int(epoch)
            self._holder = holder
            row = (holder, epoch + 1, now_s + self._ttl_s, self._boot)
            file.execute("INSERT OR REPLACE INTO leader VALUES (0, ?, ?, ?, ?)", row)
            return holder, epoch + 1

    def renew(self) -> None:
        if not self._set_until(time.monotonic() + self._ttl_s):
            raise LostLeaseError("another controller took the lease")

    def release(self) -> None:
        if self._holder:
            self._set_until(0.0)

    def _set_until(self, until_s: float) -> bool:
        with self._writing() as file:
            changed = file.execute("UPDATE leader SET until_s = ? WHERE holder = ?", (until_s, self._holder))
            return changed.rowcount > 0
