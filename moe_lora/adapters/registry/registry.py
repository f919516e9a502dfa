# SPDX-License-Identifier: Apache-2.0
"""The registry: adapters, their versions, base models and files.

The table is SQLite in WAL mode, with one writer at a time and a checked schema version.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from moe_lora.adapters.peft.files import max_rank, read_config, target_names, weights_file
from moe_lora.core.errors import AdapterError, AdapterExistsError, AdapterNotFoundError, RegistryError
from moe_lora.core.host import folder_locked
from moe_lora.core.records import BROKEN, READY, REMOVED, RegisteredAdapter
from moe_lora.core.request import COMPOSED, name_problem
from moe_lora.core.shape import rank_problem
from moe_lora.core.wrong_files import read_header

from .content_store import ContentStore, Staged

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

_REPAIR = f"""
UPDATE adapters SET lora_rank = ?, state = replace(state, '{BROKEN}', '{READY}') WHERE content_hash = ?
"""

_ALIASES = """
CREATE TABLE IF NOT EXISTS aliases (
    base_hash TEXT NOT NULL,
    name TEXT NOT NULL,
    content BLOB NOT NULL,
    PRIMARY KEY (base_hash, name)
) WITHOUT ROWID
"""
"""Of the first alias on: readers of earlier registries know no such table."""


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


COLUMNS = tuple(field.name for field in fields(RegisteredAdapter) if field.name != "path")
SELECT = f"SELECT {', '.join(COLUMNS)} FROM adapters AS a"
INSERT = f"INSERT INTO adapters ({', '.join(COLUMNS)}) VALUES (:{', :'.join(COLUMNS)})"
LIVE = f"state != '{REMOVED}'"
CURRENT = f"""{LIVE} AND NOT EXISTS (
    SELECT 1 FROM adapters AS b WHERE b.name = a.name AND b.version > a.version AND b.{LIVE})"""
"""The last version of a name that is not removed."""
MAX_OWNER_CHARS = 256


class Registry:
    """Adapters of a folder, shared by threads and processes.

    Changes are atomic and durable at a method's return, also under kill.  The folder must be on a local file
    system, for SQLite's WAL.

    create: make an absent folder.  Raises RegistryError on open, and in every method if the database fails.
    """

    def __init__(self, folder: str | Path, *, create: bool = False) -> None:
        self.folder = Path(folder).resolve()
        try:
            self._database = RegistryDatabase(self.folder, create=create)
            self._store = ContentStore(self.folder / "store")
        except OSError as error:
            raise RegistryError(
                f"the registry {self.folder} can't be opened: {error.strerror}; "
                "choose another folder, or check its permissions"
            ) from error

    def __enter__(self) -> Registry:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._database.close()

    def add(
        self,
        name: str,
        source: str | Path,
        *,
        base_hash: str,
        owner: str = "",
        link: bool = False,
        root: str | None = None,
        max_lora_rank: int | None = None,
    ) -> RegisteredAdapter:
        """Register the PEFT folder `source` as the next version of `name`, and store its files.

        The current version's content makes no new version, but repairs its files.  link: refer to the files
        instead of a copy.  root: folder that must contain the resolved files; None: any.  max_lora_rank:
        limit of the pairs' ranks; None: no limit.  Raises AdapterError for a bad name, owner or folder,
        AdapterExistsError for another base model's name.
        """
        if problem := name_problem(name):
            raise AdapterError(f"the name {name[:50]!r} {problem}")
        if len(owner) > MAX_OWNER_CHARS or not owner.isprintable():
            raise AdapterError(f"owner must be at most {MAX_OWNER_CHARS} printable characters")
        source = Path(source)
        read_config(source)
        read_header(weights_file(source))
        with self._staged(source, link, root) as staged, self._database.writing() as connection:
            # Of the stored files: the source may have changed.
            config = read_config(staged.folder)
            lora_rank = max_rank(config, read_header(weights_file(staged.folder)))
            if max_lora_rank is not None and lora_rank > max_lora_rank:
                raise AdapterError(f"adapter {name!r}: {rank_problem(lora_rank, max_lora_rank)}")
            current = self._current(name)
            if current is not None and current.base_hash != base_hash:
                raise AdapterExistsError(
                    f"{name!r} is an adapter of the base model {current.base_hash[:12]}, not of "
                    f"{base_hash[:12]}; choose another name, or remove it first"
                )
            self._store.place(staged)
            connection.execute(_REPAIR, (lora_rank, staged.content_hash))
            if current is None or current.content_hash != staged.content_hash:
                row = {
                    "name": name,
                    "lora_rank": lora_rank,
                    "alpha": config.lora_alpha,
                    "targets": json.dumps(target_names(config)),
                    "num_bytes": staged.num_bytes,
                    "content_hash": staged.content_hash,
                    "base_hash": base_hash,
                    "source": str(source.resolve()).encode(errors="replace").decode(),
                    "owner": owner,
                    "state": READY,
                    "created_s": time.time(),
                }
                last = "SELECT coalesce(max(version), 0) FROM adapters WHERE name = ?"
                [[last_version]] = connection.execute(last, (name,))
                connection.execute(INSERT, row | {"version": last_version + 1})
            return self.get(name)

    def get(self, name: str, version: int | None = None) -> RegisteredAdapter:
        """A version of `name`, by default the current: the last that is not removed.

        Raises AdapterNotFoundError.
        """
        if version is None:
            found = self._current(name)
            if found is None:
                raise _unknown(name)
            return found
        for one in self.versions(name):
            if one.version == version:
                return one
        raise AdapterNotFoundError(f"{name!r} has no version {version} in the registry")

    def versions(self, name: str) -> list[RegisteredAdapter]:
        """All versions of `name` in order, including removed.  Raises AdapterNotFoundError."""
        found = self._named(name, "name = ? ORDER BY version")
        if not found:
            raise _unknown(name)
        return found

    def adapters(
        self,
        *,
        base_hash: str | None = None,
        state: str | None = None,
        after: str = "",
        limit: int | None = None,
    ) -> list[RegisteredAdapter]:
        """Current versions by name, at most `limit`, after the name `after`.

        base_hash, state: filters.
        """
        query, values = f"{SELECT} WHERE {CURRENT} AND name > ?", [after]
        for column, wanted in (("base_hash", base_hash), ("state", state)):
            if wanted is not None:
                query += f" AND {column} = ?"
                values.append(wanted)
        rows = self._database.read(f"{query} ORDER BY name LIMIT {-1 if limit is None else limit}", values)
        return [self._from_row(row) for row in rows]

    def resolve(self, name: str, base_hash: str, version: int | None = None) -> RegisteredAdapter:
        """A version for this base with files checked now.  Reads all files.

        Raises AdapterNotFoundError, or AdapterError for a removed version, another base model, or a lost or
        altered file.
        """
        found = self.get(name, version)
        where = f"adapter {name!r} version {found.version}"
        if found.state == REMOVED:
            raise AdapterError(f"{where} was removed from the registry; add it again")
        if found.base_hash != base_hash:
            raise AdapterError(
                f"{where} is registered for the base model {found.base_hash[:12]}, this one is "
                f"{base_hash[:12]}; serve it with the base it was trained for"
            )
        if problem := self._settle(found):
            raise AdapterError(f"{where} can't be served: {problem}")
        return found

    def remove(self, name: str, version: int | None = None) -> list[RegisteredAdapter]:
        """Mark a version of `name` removed, by default all, and delete unneeded files.

        Returns the removed versions.  Version numbers are not reused.  Raises AdapterNotFoundError.
        """
        with self._database.writing() as connection:
            live = [one for one in self.versions(name) if one.state != REMOVED]
            removed = [one for one in live if version in (None, one.version)]
            if not removed:
                what = repr(name) if version is None else f"version {version} of {name!r}"
                raise AdapterNotFoundError(f"{what} is not in the registry, or was removed before")
            connection.executemany(
                f"UPDATE adapters SET state = '{REMOVED}' WHERE name = ? AND version = ?",
                [(name, one.version) for one in removed],
            )
        # Last: a crash may leave files without a version, never a version without files.
        with self._database.writing():
            for content_hash in {one.content_hash for one in removed}:
                if not self._is_needed(content_hash):
                    self._store.delete(content_hash)
        return removed

    def check(self) -> list[tuple[RegisteredAdapter, str | None]]:
        """Every version that is not removed, with its fault or None; updates states.

        Also deletes remains of dead writers.  Reads all files.
        """
        query = f"{SELECT} WHERE {LIVE} ORDER BY name, version"
        found = [(one, self._settle(one)) for one in map(self._from_row, self._database.read(query))]
        with self._database.writing():
            needed = f"SELECT DISTINCT content_hash FROM adapters WHERE {LIVE}"
            self._store.sweep({content_hash for (content_hash,) in self._database.read(needed)})
        return found

    def aliases(self, base_hash: str) -> dict[str, bytes]:
        """What `save_alias` kept, by name."""
        if not self._database.read("SELECT 1 FROM sqlite_master WHERE name = 'aliases'"):
            return {}
        query = "SELECT name, content FROM aliases WHERE base_hash = ? ORDER BY name"
        return dict(self._database.read(query, (base_hash,)))

    def save_alias(self, base_hash: str, name: str, content: bytes | None) -> None:
        """Keep an alias of adapters of this base; None: forget the alias."""
        with self._database.writing() as connection:
            connection.execute(_ALIASES)
            connection.execute("DELETE FROM aliases WHERE base_hash = ? AND name = ?", (base_hash, name))
            if content is not None:
                connection.execute("INSERT INTO aliases VALUES (?, ?, ?)", (base_hash, name, content))

    def _current(self, name: str) -> RegisteredAdapter | None:
        return next(iter(self._named(name, f"{CURRENT} AND name = ?")), None)

    def _named(self, name: str, condition: str) -> list[RegisteredAdapter]:
        if name_problem(name.removeprefix(COMPOSED)):  # earlier releases took such names
            return []
        return [self._from_row(row) for row in self._database.read(f"{SELECT} WHERE {condition}", (name,))]

    def _is_needed(self, content_hash: str) -> bool:
        query = f"SELECT 1 FROM adapters WHERE content_hash = ? AND {LIVE} LIMIT 1"
        return bool(self._database.read(query, (content_hash,)))

    def _settle(self, one: RegisteredAdapter) -> str | None:
        """Check a version's files and update its state; returns the fault or None."""
        problem = self._store.problem(one.content_hash)
        if (problem is None) != (one.state == READY):
            with self._database.writing() as connection:
                # Again, under the lock against repair and deletion.
                problem = self._store.problem(one.content_hash)
                connection.execute(
                    f"UPDATE adapters SET state = ? WHERE content_hash = ? AND {LIVE}",
                    (READY if problem is None else BROKEN, one.content_hash),
                )
        if problem is None:
            return None
        return f"{problem}; add it again from its source ({one.source}) to repair it, or remove it"

    @contextmanager
    def _staged(self, source: Path, link: bool, root: str | None) -> Iterator[Staged]:
        try:
            with self._store.staged(source, link=link, root=root) as staged:
                yield staged
        except OSError as error:
            raise RegistryError(
                f"{self.folder}: {error}; check disk and permissions, and try again"
            ) from error

    def _from_row(self, row: tuple[Any, ...]) -> RegisteredAdapter:
        columns = dict(zip(COLUMNS, row, strict=True))
        columns["targets"] = tuple(json.loads(columns["targets"]))
        # Not by pathlib: a list makes tens of thousands of these.
        return RegisteredAdapter(**columns, path=f"{self._store.folder}/{columns['content_hash']}")


def _unknown(name: str) -> AdapterNotFoundError:
    return AdapterNotFoundError(f"no adapter {name[:100]!r} is in the registry")
