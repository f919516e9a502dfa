# SPDX-License-Identifier: Apache-2.0
"""Files and batches of owners, and uploaded forms."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import re
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from email.parser import HeaderParser
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from moe_lora.core.errors import ConfigError, StorageError
from moe_lora.core.host import OwnFolder
from moe_lora.serve.http_errors import ApiError, bad_request

logger = logging.getLogger(__name__)

Kind = Literal["file", "batch"]
MAX_RECORDS = 1000
"""Most files, and most batches, per owner."""
ENDED = frozenset({"completed", "failed", "cancelled"})


class Record(msgspec.Struct, kw_only=True):
    """owner: a tenant, "" without keys.  key: the owner's key id.  shown: the object in answers."""

    owner: str
    key: str | None
    number: int
    shown: dict[str, Any]

    @property
    def id(self) -> str:
        return str(self.shown["id"])

    @property
    def kind(self) -> Kind:
        found: Kind = self.shown["object"]
        return found

    @property
    def num_bytes(self) -> int:
        return int(self.shown.get("bytes", 0))

    @property
    def has_ended(self) -> bool:
        return self.shown.get("status") in ENDED


class FullError(ApiError):
    """An owner's files and results have too many bytes."""

    def __init__(self, most_bytes: int) -> None:
        what = f"the files of this key have more than front_end.batch_bytes={most_bytes} bytes; delete some"
        super().__init__(413, what, "file", closes=True)


@contextmanager
def _usable(folder: str | None) -> Iterator[None]:
    try:
        yield
    except BlockingIOError:
        raise ConfigError(f"batch_dir={folder} is in use by another server; choose another") from None
    except OSError as error:
        raise ConfigError(f"batch_dir={folder} can't be used: {error.strerror}") from error


def _locked(folder: Path) -> int:
    """Makes the folder; returns its lock."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return lock


def check_folder(folder: str) -> None:
    """Raises ConfigError for an unusable folder."""
    with _usable(folder):
        os.close(_locked(Path(folder)))


class Store:
    """Records and contents of a folder, for one process at a time.

    folder: None is a temporary folder; after a kill the next server that gets a file or a batch deletes the
    folder.  most_bytes: per owner.  Raises ConfigError for an unusable folder.
    """

    def __init__(self, folder: str | None, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._records: dict[str, Record] = {}
        self._receiving: Counter[str] = Counter()
        self._used: Counter[str] = Counter()
        """Bytes of files by owner."""
        with _usable(folder):
            if folder is None:
                own = OwnFolder(None, "moe_lora-batches-")
                weakref.finalize(self, own.remove)
                folder = str(own.path)
            self._folder = Path(folder)
            self._lock = _locked(self._folder)
            self._read()

    def _read(self) -> None:
        for path in self._folder.iterdir():
            if path.suffix == ".new":
                path.unlink()
            elif path.suffix == ".json":
                try:
                    record = msgspec.json.decode(path.read_bytes(), type=Record)
                    self._records[record.id] = record
                except (ValueError, KeyError) as error:
                    logger.error("batch_dir: %s is left out: %s", path, error)
        ordered = sorted(self._records.items(), key=lambda item: item[1].number)
        self._records = dict(ordered)
        for record in self._records.values():
            self._used[record.owner] += record.num_bytes

    def path(self, name: str) -> Path:
        """Path of a file's content, or of another file."""
        return self._folder / name

    def new_path(self) -> Path:
        """A file; the next start removes the file."""
        return self._folder / f"{uuid.uuid4().hex}.new"

    def add(self, owner: str, key: str | None, shown: dict[str, Any], content: Path | None = None) -> Record:
        """Keep a record with this content; replaces a record of the same id.  Raises StorageError and
        OSError.
        """
        kind = shown["object"]
        prefix = "file-" if kind == "file" else "batch_"
        made = {"id": f"{prefix}{uuid.uuid4().hex}", "created_at": int(time.time()), **shown}
        number = max((one.number for one in self._records.values()), default=0) + 1
        record = Record(owner=owner, key=key, number=number, shown=made)
        if content is not None:
            content.replace(self.path(record.id))
        try:
            self.save(record)
        except StorageError:
            if content is not None:
                self.path(record.id).unlink()
            raise
        before = self._records.get(record.id)
        self._used[owner] += record.num_bytes - (0 if before is None else before.num_bytes)
        self._records[record.id] = record
        return record

    def save(self, record: Record) -> None:
        """Raises StorageError for an unwritable folder."""
        new = self.new_path()
        try:
            new.write_bytes(msgspec.json.encode(record))
            new.replace(self._folder / f"{record.id}.json")
        except OSError as error:
            with suppress(OSError):
                new.unlink(missing_ok=True)
            raise unwritable(error) from error

    def get(self, owner: str, kind: Kind, name: str, param: str | None = None) -> Record:
        """The owner's record.  param: the client's field with the name.  Raises ApiError."""
        found = self._records.get(name)
        if found is None or found.owner != owner or found.kind != kind:
            raise ApiError(404, f"there is no {kind} {name[:128]!r} of this key", param or f"{kind}_id")
        return found

    def remove(self, record: Record) -> None:
        """Raises StorageError for an unwritable folder."""
        try:
            for suffix in (".json", ".results", ""):
                self.path(f"{record.id}{suffix}").unlink(missing_ok=True)
        except OSError as error:
            raise unwritable(error) from error
        del self._records[record.id]
        self._used[record.owner] -= record.num_bytes

    def all_of(self, kind: Kind, owner: str | None = None) -> Iterator[Record]:
        """Records, oldest first.  owner: None is all owners."""
        for record in list(self._records.values()):
            if record.kind == kind and owner in (None, record.owner):
                yield record

    def check_room(self, owner: str, kind: Kind) -> None:
        """Raises ApiError for too many records; removes the oldest ended batch."""
        held = list(self.all_of(kind, owner))
        if len(held) < MAX_RECORDS:
            return
        ended = next((one for one in held if kind == "batch" and one.has_ended), None)
        if ended is None:
            way = "delete some" if kind == "file" else "wait until some end"
            raise ApiError(413, f"this key has {len(held)} of {MAX_RECORDS} {kind} objects; {way}")
        self.remove(ended)

    def receive(self, owner: str, num_bytes: int) -> None:
        """Count received bytes; negative at the end.  Raises FullError."""
        self._receiving[owner] += num_bytes
        if num_bytes > 0 and self._used[owner] + self._receiving[owner] > self._most_bytes:
            raise FullError(self._most_bytes)


def unwritable(error: OSError) -> StorageError:
    """The error of an unwritable folder."""
    return StorageError(f"the server's folder for files can't be written ({error.strerror}); try again later")


_BOUNDARY = re.compile(r'multipart/form-data\s*;.*?boundary="?([^";,]{1,70})"?', re.IGNORECASE)
_MAX_HEAD_BYTES = 8192
_MAX_PARTS = 17
_MAX_FIELD_BYTES = 1024
_WINDOW_BYTES = 1 << 20


class Form(NamedTuple):
    """start, end: of the file's content."""

    fields: dict[str, str]
    filename: str
    start: int
    end: int


def boundary_of(content_type: str) -> bytes:
    """The form's boundary.  Raises ApiError."""
    found = _BOUNDARY.match(content_type.strip())
    if found is None:
        raise bad_request("the body must be a form, sent with Content-Type: multipart/form-data")
    return found[1].strip().encode("latin-1")


def read_form(path: Path, boundary: bytes) -> Form:
    """The form in a file.  Raises ApiError."""
    if not path.stat().st_size:
        raise _broken("is empty")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as body:
        return _parts(body, b"--" + boundary)


def _parts(body: mmap.mmap, mark: bytes) -> Form:
    fields: dict[str, str] = {}
    found: tuple[str, int, int] | None = None
    place = body.find(mark, 0, _MAX_HEAD_BYTES)
    if place < 0:
        raise _broken("has no boundary")
    place += len(mark)
    num_parts = 0
    while body[place : place + 2] != b"--":
        num_parts += 1
        if num_parts > _MAX_PARTS:
            raise _broken(f"has more than {_MAX_PARTS} parts")
        start = body.find(b"\r\n\r\n", place, place + _MAX_HEAD_BYTES)
        end = _find(body, b"\r\n" + mark, start + 4) if start >= 0 else -1
        if end < 0:
            raise _broken("is cut short")
        head = HeaderParser().parsestr(body[place:start].decode("utf-8", "replace").lstrip())
        name = str(head.get_param("name", "", "content-disposition"))
        filename = head.get_param("filename", None, "content-disposition")
        if name == "file" and filename is not None:
            found = head.get_filename("") or "", start + 4, end
        elif end - start - 4 > _MAX_FIELD_BYTES:
            raise _broken(f"has a field {name[:64]!r} of more than {_MAX_FIELD_BYTES} bytes")
        else:
            fields[name] = body[start + 4 : end].decode("utf-8", "replace")
        place = end + 2 + len(mark)
    if found is None:
        raise bad_request("the form has no file; send one as the part `file`", "file")
    return Form(fields, *found)


def _find(body: mmap.mmap, text: bytes, start: int) -> int:
    """As body.find, in windows: other threads run in between."""
    for place in range(start, len(body), _WINDOW_BYTES):
        found = body.find(text, place, place + _WINDOW_BYTES + len(text) - 1)
        if found >= 0:
            return found
    return -1


def _broken(what: str) -> ApiError:
    return bad_request(f"the form {what}; send purpose and file as multipart/form-data")


def copy_part(source: Path, form: Form, target: Path) -> int:
    """Write the file's content; returns its bytes."""
    left = form.end - form.start
    with source.open("rb") as file, target.open("wb") as out:
        file.seek(form.start)
        while left and (piece := file.read(min(left, 1 << 20))):
            out.write(piece)
            left -= len(piece)
    return form.end - form.start
