# SPDX-License-Identifier: Apache-2.0
"""The registry's table: SQLite in WAL mode, one writer at a time, a checked schema version."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moe_lora.core.errors import RegistryError
from moe_lora.core.host import folder_locked

DATABASE_FILE = "registry.sqlite"
SCHEMA_VERSION = 1
APPLICATION_ID = 0x4D4C5241
BUSY_TIMEOUT_S = 30.0
_SCHEMA = """
CREATE TABLE adapters (
    name TEXT NOT NULL,
    version INTEGER NOT NULL,
    lora_rank INTEGER NOT NULL,
    alpha REAL NOT NULL,
    targets TEXT NOT NULL,
    num_bytes INTEGER NOT NULL,
    content_hash TEXT NOT NULL,
    base_hash TEXT NOT NULL,
    source TEXT NOT NULL,
    owner TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('ready', 'broken', 'removed')),
    created_s REAL NOT NULL,
    PRIMARY KEY (name, version)
) WITHOUT ROWID
"""


class RegistryDatabase:
    """The database in a folder, for all threads and several processes.

    create: make an absent folder.  An empty folder becomes a registry.  Raises RegistryError for a folder
    with other content, and for a database of another program or schema version.
    """

    def __init__(self, folder: Path, *, create: bool) -> None:
        self.path = folder / DATABASE_FILE
        if create:
            folder.mkdir(parents=True, exist_ok=True)
        if not folder.is_dir():
            raise RegistryError(
                f"there is no registry at {folder}; moe-lora adapters add --registry {folder} makes one"
            )
        self._mutex = threading.RLock()
        # One process at a time opens the database and creates its table.
        with folder_locked(folder), self._explained():
            if not self.path.exists() and any(folder.iterdir()):
                raise RegistryError(
                    f"{folder} is not a registry: it has no {DATABASE_FILE} and is not empty; "
                    "give the folder of a registry, or an empty one"
                )
            self._connection = sqlite3.connect(
                self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            try:
                self._prepare()
            except BaseException:
                self._connection.close()
                raise

    def close(self) -> None:
        with self._mutex:
            self._connection.close()

    def read(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """All rows of a query, from one snapshot.  Raises RegistryError."""
        with self._mutex, self._explained():
            return self._connection.execute(query, values).fetchall()

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """An exclusive write transaction, rolled back on an exception.  Raises RegistryError."""
        with self._mutex, self._explained():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def _prepare(self) -> None:
        [[found]] = self._connection.execute("PRAGMA user_version")
        [[application]] = self._connection.execute("PRAGMA application_id")
        [[num_tables]] = self._connection.execute("SELECT count(*) FROM sqlite_master")
        if not num_tables and not found:
            self._connection.execute("PRAGMA journal_mode = WAL")
            with self.writing() as connection:
                connection.execute(_SCHEMA)
                connection.execute("CREATE INDEX by_content ON adapters (content_hash)")
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        elif application != APPLICATION_ID:
            raise RegistryError(f"{self.path} is a database of another program; give a registry's folder")
        elif found != SCHEMA_VERSION:
            way_out = (
                "use the moe_lora that wrote it, or a later one"
                if found > SCHEMA_VERSION
                else "add its adapters to a new registry"
            )
            raise RegistryError(
                f"{self.path} has schema version {found}, this moe_lora reads version "
                f"{SCHEMA_VERSION}; {way_out}"
            )
        self._connection.execute("PRAGMA synchronous = FULL")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            busy = "locked" in str(error) or "busy" in str(error)
            read_only = "readonly" in str(error) or "unable to open" in str(error)
            if read_only and not _is_writable(self.path):
                raise RegistryError(
                    f"{self.path.parent} can't be written, which the database needs for reading too; give "
                    "write permission to it and its files, or use a copy of the folder"
                ) from error
            way_out = (
                f"another process has been writing for {BUSY_TIMEOUT_S:g} s; try again"
                if busy
                else "check disk and permissions, or restore the file from a backup"
            )
            raise RegistryError(f"{self.path}: {error}; {way_out}") from error


def _is_writable(path: Path) -> bool:
    return os.access(path.parent, os.W_OK) and (not path.exists() or os.access(path, os.W_OK))
