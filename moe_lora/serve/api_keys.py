# SPDX-License-Identifier: Apache-2.0
"""API keys: a file of their digests and rights.

A key has 256 random bits: a plain SHA-256 resists guesses.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import logging
import os
import secrets
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec

from moe_lora.core.errors import ConfigError
from moe_lora.core.request import name_matches
from moe_lora.core.wrong_files import without_twins

logger = logging.getLogger(__name__)

PREFIX = "moelora"
_NOBODYS_DIGEST = hashlib.sha256(b"").hexdigest()
_LOOK_AGAIN_S = 1.0
_MAX_FILE_BYTES = 16 << 20

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern=r"^[\w.@:-]+$")]
_Rate = Annotated[float, msgspec.Meta(gt=0, le=1e12)]


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A key's entry in the file.

    id: the public part of the key.  digest: SHA-256 of the whole key, in hex.  adapters: permitted names, or
    shell patterns; the base model is always permitted.  admin: all rights.  share: the tenant's weight under
    contention.
    """

    id: _Name
    digest: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    tenant: _Name
    adapters: tuple[str, ...] = ()
    admin: bool = False
    requests_per_minute: _Rate | None = None
    tokens_per_minute: _Rate | None = None
    share: Annotated[float, msgspec.Meta(ge=1e-3, le=1e3)] = 1.0
    created_s: int = 0

    def may_use(self, adapter: str) -> bool:
        return self.admin or name_matches(adapter, self.adapters)


ADMIN = ApiKey(id="api-key", digest="", tenant="(api-key)", admin=True)
"""Rights of a key without a file.  No tenant of a file can have this name."""


class _File(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[ApiKey] = []


def read_keys(path: Path) -> list[ApiKey]:
    """The keys of a file.  Raises ConfigError."""
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_FILE_BYTES + 1)
        if len(text) > _MAX_FILE_BYTES:
            raise ValueError(f"it has more than {_MAX_FILE_BYTES} bytes")
        keys = msgspec.json.decode(text, type=_File).keys
        json.loads(text, object_pairs_hook=without_twins)
        if len({key.id for key in keys}) < len(keys):
            raise ValueError("two keys have one id")
        shares: dict[str, float] = {}
        for key in keys:
            if shares.setdefault(key.tenant, key.share) != key.share:
                raise ValueError(f"keys of the tenant {key.tenant} have different shares")
    except OSError as error:
        raise ConfigError(f"the keys in {path} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(
            f"the keys in {path} can't be read: {error}; restore the file, or remove it and add keys anew"
        ) from error
    return keys


def add_key(path: Path, key: ApiKey) -> str:
    """Add a key with these rights to the file; returns the new key, shown only now.  Raises ConfigError."""
    identity = secrets.token_hex(4)
    text = f"{PREFIX}-{identity}-{secrets.token_urlsafe(32)}"
    new = msgspec.structs.replace(key, id=identity, digest=digest_of(text), created_s=int(time.time()))
    try:
        new = msgspec.convert(msgspec.to_builtins(new), ApiKey)
    except msgspec.ValidationError as error:
        raise ConfigError(f"such a key can't be: {error}") from error
    with _locked(path):
        keys = read_keys(path) if path.exists() and path.stat().st_size else []
        for other in keys:
            if other.tenant == new.tenant and other.share != new.share:
                raise ConfigError(
                    f"the tenant {new.tenant} has share {other.share:g}; give its keys one share, not "
                    f"{new.share:g} too"
                )
        _write(path, [*keys, new])
    return text


def remove_key(path: Path, identity: str) -> ApiKey:
    """Remove the key with this id.  Raises ConfigError."""
    with _locked(path):
        keys = read_keys(path)
        for key in keys:
            if key.id == identity:
                _write(path, [other for other in keys if other is not key])
                return key
    raise ConfigError(f"{path} has no key {identity!r}; see moe-lora keys list")


def digest_of(text: str) -> str:
    """SHA-256 of a key, in hex."""
    return hashlib.sha256(text.encode()).hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        with open(f"{path}.lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
    except OSError as error:
        way = "; the folder must be writable" * isinstance(error, PermissionError)
        raise ConfigError(f"the keys in {path} can't be written: {error.strerror}{way}") from error


def _write(path: Path, keys: Sequence[ApiKey]) -> None:
    """Replace the whole file.  A new file is private; an old file keeps its mode and owner."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            if path.exists():
                made, before = os.fstat(handle), path.stat()
                if (made.st_uid, made.st_gid) != (before.st_uid, before.st_gid):
                    try:
                        os.fchown(handle, before.st_uid, before.st_gid)
                    except PermissionError as error:
                        way = f"{error.strerror}; run this as root, or as owner and group of the file"
                        raise ConfigError(f"the owner of {path} can't be kept: {way}") from error
                os.fchmod(handle, before.st_mode & 0o777)
            file.write(msgspec.json.format(msgspec.json.encode(_File(list(keys))), indent=1))
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


class AdminKeys:
    """Administrators' keys, by their SHA-256, without a file."""

    opens_status = True
    """Status paths need no key."""

    def __init__(self, digests: Sequence[str]) -> None:
        self._digests = [digest.encode() for digest in digests]

    def find(self, text: str) -> ApiKey | None:
        """`ADMIN` for a key, else None, in constant time."""
        digest = digest_of(text).encode()
        matches = [hmac.compare_digest(digest, one) for one in self._digests]
        return ADMIN if any(matches) else None

    def by_id(self, identity: str) -> ApiKey | None:
        return ADMIN if identity == ADMIN.id else None


class KeyRing:
    """The current keys of a file.

    admins: keys beside the file.  An unreadable file is logged, and the keys stay; at the start it raises
    ConfigError.
    """

    opens_status = False

    def __init__(self, path: str, admins: AdminKeys | None = None) -> None:
        self._path = Path(path)
        self._admins = admins
        self._stamp = self._stamp_now()
        self._failed_stamp: tuple[int, ...] | None = ()  # None: no file
        self._keys = {key.id: key for key in read_keys(self._path)}
        self._looked_s = time.monotonic()

    def find(self, text: str) -> ApiKey | None:
        """The entry of a key, or None; unknown keys take constant time."""
        self._look()
        parts = text.split("-", 2)
        key = self._keys.get(parts[1]) if len(parts) == 3 else None
        digest = _NOBODYS_DIGEST if key is None else key.digest
        if hmac.compare_digest(digest_of(text), digest):
            return key
        return None if self._admins is None else self._admins.find(text)

    def by_id(self, identity: str) -> ApiKey | None:
        self._look()
        found = self._keys.get(identity)
        return self._admins.by_id(identity) if found is None and self._admins is not None else found

    def _look(self) -> None:
        now_s = time.monotonic()
        if now_s - self._looked_s < _LOOK_AGAIN_S:
            return
        self._looked_s, stamp = now_s, self._stamp_now()
        if stamp == self._stamp:
            return
        try:
            self._keys = {key.id: key for key in read_keys(self._path)}
        except ConfigError as error:
            if stamp != self._failed_stamp:
                logger.error("%s; the keys that were read before hold until it can", error)
            self._failed_stamp = stamp
        else:
            self._stamp, self._failed_stamp = stamp, ()
            logger.info("%d API keys are read", len(self._keys))

    def _stamp_now(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns
