"""What is served under each adapter's name, and which of two accounts of that is the later one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class ServedAdapter:
    """What every instance serves under a name.

    content_hash: `AdapterInfo.content_hash`; None: what the first instance finds in the directory.
    """

    path: str
    version: int
    pinned: bool = False
    content_hash: str | None = None

    def is_same(self, other: ServedAdapter | None) -> bool:
        """Whether both are one version, and as far as it is known one content."""
        if other is None or (self.path, self.version) != (other.path, other.version):
            return False
        return None in (self.content_hash, other.content_hash) or self.content_hash == other.content_hash


@dataclass(frozen=True)
class Holding:
    """That an instance holds all that is served but `missing`.  incarnation: see `wire.Hello`."""

    incarnation: str | None
    missing: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Served:
    """An account of what is served.

    adapters: by name.  versions: of each name ever known, the latest: one that is not among `adapters` was
    unloaded at that version.
    """

    adapters: Mapping[str, ServedAdapter] = field(default_factory=dict)
    versions: Mapping[str, int] = field(default_factory=dict)

    def lacking(self, have: Mapping[str, ServedAdapter]) -> set[str]:
        """The adapters of which an engine that has `have` lacks what is served."""
        return {name for name, adapter in self.adapters.items() if not adapter.is_same(have.get(name))}

    @staticmethod
    def of(adapters: Mapping[str, ServedAdapter]) -> Served:
        """An account that knows of nothing that was unloaded."""
        return Served(adapters, {name: one.version for name, one in adapters.items()})

    def joined(self, other: Served) -> Served:
        """Both accounts in one: of each name the higher version.

        Of equal ones an unloading goes before what was unloaded, and what is known here before the other's;
        an adapter is pinned if one of both says so.
        """
        adapters = dict(self.adapters)
        for name, version in other.versions.items():
            mine, theirs = adapters.get(name), other.adapters.get(name)
            known = self.versions.get(name, 0)
            if version < known:
                continue
            if theirs is None:
                adapters.pop(name, None)
            elif version > known:
                adapters[name] = theirs
            elif mine is not None and mine.is_same(theirs):
                adapters[name] = replace(
                    mine,
                    pinned=mine.pinned or theirs.pinned,
                    content_hash=mine.content_hash or theirs.content_hash,
                )
        versions = {
            name: max(self.versions.get(name, 0), other.versions.get(name, 0))
            for name in {**self.versions, **other.versions}
        }
        return Served(adapters, versions)
