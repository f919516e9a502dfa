# SPDX-License-Identifier: Apache-2.0
"""Adapter files by content hash: written once, atomically, checked on use."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from moe_lora.adapters.peft.files import CONFIG_FILE, WEIGHTS_FILE
from moe_lora.core.wrong_files import open_file

MANIFEST_FILE = "manifest.json"
_BLOCK_BYTES = 1 << 20
_HASH = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class Staged:
    """Whole files on disk, without a hash name yet.  num_bytes: of the adapter's files."""

    folder: Path
    content_hash: str
    num_bytes: int
    linked: bool


class ContentStore:
    """`folder`/HASH/ holds an adapter's two files, or links to them, and their manifest.

    The manifest has sha256 and bytes of each file; HASH is the manifest's sha256.  A rename after sync names
    a folder, so a crash leaves no partial content.  Callers serialise `place`, `delete` and `sweep`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self._sweep_unfinished()

    def path(self, content_hash: str) -> Path:
        return self.folder / content_hash

    @contextmanager
    def staged(self, source: Path, *, link: bool, root: str | None = None) -> Iterator[Staged]:
        """A copy of a PEFT folder's files (link: symbolic links), for `place`.

        root: folder that must contain the files.  Raises OSError, AdapterError.
        """
        with self._lock(fcntl.LOCK_SH):
            folder = Path(tempfile.mkdtemp(dir=self.folder, prefix=".staged-"))
            try:
                files = {
                    name: _take(source / name, folder / name, link, root)
                    for name in (CONFIG_FILE, WEIGHTS_FILE)
                }
                manifest = json.dumps({"files": files}, sort_keys=True, indent=1).encode()
                with (folder / MANIFEST_FILE).open("wb") as file:
                    file.write(manifest)
                    file.flush()
                    os.fsync(file.fileno())
                folder.chmod(0o755)
                _sync_folder(folder)
                yield Staged(
                    folder=folder,
                    content_hash=hashlib.sha256(manifest).hexdigest(),
                    num_bytes=sum(int(facts["bytes"]) for facts in files.values()),
                    linked=link,
                )
            finally:
                shutil.rmtree(folder, ignore_errors=True)

    def place(self, staged: Staged) -> None:
        """Name the files.  Repairs existing content; copies never become links."""
        place = self.path(staged.content_hash)
        try:
            os.rename(staged.folder, place)
        except OSError:
            if not staged.linked or self.problem(staged.content_hash) is not None:
                for file in sorted(staged.folder.iterdir()):
                    os.replace(file, place / file.name)
                _sync_folder(place)
        _sync_folder(self.folder)

    def problem(self, content_hash: str) -> str | None:
        """The fault of the content with the file's name; None if intact.  Reads everything."""
        path = self.path(content_hash) / MANIFEST_FILE
        try:
            manifest = path.read_bytes()
        except OSError as error:
            return f"{path} is lost ({error.strerror})"
        if hashlib.sha256(manifest).hexdigest() != content_hash:
            return f"{path} was altered"
        for name, facts in json.loads(manifest)["files"].items():
            path = self.path(content_hash) / name
            where = f"{path} (a link to {os.readlink(path)})" if path.is_symlink() else str(path)
            try:
                if path.stat().st_size != facts["bytes"] or _sha256(path) != facts["sha256"]:
                    return f"{where} was altered"
            except OSError as error:
                return f"{where} is lost ({error.strerror})"
        return None

    def delete(self, content_hash: str) -> None:
        """Delete content; after a crash nothing partial remains under the hash."""
        dying = tempfile.mkdtemp(dir=self.folder, prefix=".deleted-")
        with suppress(FileNotFoundError):
            os.rename(self.path(content_hash), dying)
        shutil.rmtree(dying, ignore_errors=True)

    def sweep(self, kept: Collection[str]) -> list[str]:
        """Delete remains of crashes: content outside `kept`, and staged files without an active stager.

        Returns the deleted names.
        """
        swept = []
        for place in sorted(self.folder.iterdir()):
            if _HASH.fullmatch(place.name) and place.name not in kept:
                self.delete(place.name)
                swept.append(place.name)
        return swept + self._sweep_unfinished()

    def _sweep_unfinished(self) -> list[str]:
        swept = []
        with suppress(OSError), self._lock(fcntl.LOCK_EX | fcntl.LOCK_NB):
            for place in sorted(self.folder.glob(".*-*")):
                shutil.rmtree(place, ignore_errors=True)
                swept.append(place.name)
        return swept

    @contextmanager
    def _lock(self, kind: int) -> Iterator[None]:
        """Shared by stagers, to tell their folders from a dead writer's."""
        with (self.folder / ".lock").open("a") as file:
            fcntl.flock(file, kind)
            yield


def _take(source: Path, target: Path, link: bool, root: str | None) -> dict[str, str | int]:
    """Copy or link one file; returns its manifest entry (of the written bytes, for a copy)."""
    if link:
        target.symlink_to(source.resolve())
        return {"sha256": _sha256(source, root=root), "bytes": source.stat().st_size}
    with target.open("wb") as writer:
        digest = _sha256(source, copy=writer, root=root)
        writer.flush()
        os.fsync(writer.fileno())
        return {"sha256": digest, "bytes": writer.tell()}


def _sha256(path: Path, copy: BinaryIO | None = None, root: str | None = None) -> str:
    """sha256 of a file's content, also written to `copy`."""
    digest = hashlib.sha256()
    with open_file(path, path.name, root) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            if copy is not None:
                copy.write(block)
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
