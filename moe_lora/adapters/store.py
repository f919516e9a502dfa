"""Adapters in host memory, by name and version."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from ..core.errors import AdapterNotFoundError
from .packed import PackedAdapter


@dataclass(frozen=True, kw_only=True)
class StoredAdapter:
    """What a listing tells of one stored version."""

    name: str
    version: int
    max_lora_rank: int
    targets: tuple[str, ...]
    nbytes: int
    content_hash: str


class HostStore:
    """name → versions of a PackedAdapter; safe to use from several threads.

    Versions of a name count up from 1 and are never given again, even after removal, so that
    (name, version) identifies content for good: caches may use it as a key.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._versions: dict[str, dict[int, PackedAdapter]] = {}
        self._last_version: dict[str, int] = {}

    def put(self, name: str, packed: PackedAdapter) -> int:
        """Add a version under this name, beside the ones there, and return its number."""
        with self._lock:
            version = self._last_version.get(name, 0) + 1
            self._last_version[name] = version
            self._versions.setdefault(name, {})[version] = packed
            return version

    def get(self, name: str, version: int | None = None) -> PackedAdapter:
        """This version, by default the newest. Raises AdapterNotFoundError."""
        with self._lock:
            return self._versions[name][self._find(name, version)]

    def newest_version(self, name: str) -> int:
        """Number of the newest version of this name. Raises AdapterNotFoundError."""
        with self._lock:
            return self._find(name, None)

    def remove(self, name: str, version: int | None = None) -> None:
        """Forget one version, or by default all of the name. Raises AdapterNotFoundError."""
        with self._lock:
            found = self._find(name, version)
            if version is not None:
                del self._versions[name][found]
            if version is None or not self._versions[name]:
                del self._versions[name]

    def __contains__(self, name: str) -> bool:
        with self._lock:
            return name in self._versions

    def __len__(self) -> int:
        """Number of names."""
        with self._lock:
            return len(self._versions)

    @property
    def bytes(self) -> int:
        """Bytes of all versions' matrices."""
        with self._lock:
            return sum(packed.nbytes for versions in self._versions.values() for packed in versions.values())

    def list(self) -> list[StoredAdapter]:
        """All versions, by name and then version."""
        with self._lock:
            return [
                StoredAdapter(
                    name=name,
                    version=version,
                    max_lora_rank=packed.max_lora_rank,
                    targets=packed.targets,
                    nbytes=packed.nbytes,
                    content_hash=packed.content_hash,
                )
                for name, versions in sorted(self._versions.items())
                for version, packed in sorted(versions.items())
            ]

    def _find(self, name: str, version: int | None) -> int:
        versions = self._versions.get(name)
        if not versions:
            known = ", ".join(sorted(self._versions)) or "none"
            raise AdapterNotFoundError(f"no adapter named {name!r}; loaded adapters: {known}")
        if version is None:
            return max(versions)
        if version not in versions:
            raise AdapterNotFoundError(
                f"adapter {name!r} has no version {version}; it has {', '.join(map(str, sorted(versions)))}"
            )
        return version
