# SPDX-License-Identifier: Apache-2.0
"""One of several controllers leads, by a lease in a store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from moe_lora.config.front_end import split_store
from moe_lora.core.errors import MoeLoraError

if TYPE_CHECKING:
    from moe_lora.config.cluster import ClusterConfig


class StoreError(MoeLoraError):
    """The store does not answer; a later call may pass."""


class LostLeaseError(MoeLoraError):
    """The lease has ended."""


class LeaseStore(Protocol):
    """A lease of one holder at a time.  Calls raise StoreError before the lease ends."""

    def acquire(self, holder: str) -> tuple[str, int]:
        """Take a free lease; returns the holder and a rising epoch."""

    def renew(self) -> None:
        """Raises LostLeaseError."""

    def release(self) -> None:
        """Free the acquired lease."""


def open_store(cluster: ClusterConfig) -> LeaseStore:
    """The store of the settings.  Raises ConfigError for unreadable certificates, and outside of pods."""
    assert cluster.leadership is not None
    store, ttl_s = cluster.leadership.store, cluster.leadership.ttl_s
    scheme, members, place = split_store("leadership.store", store)
    if scheme == "sqlite":
        from .sqlite_store import SqliteStore

        return SqliteStore(place, ttl_s)
    if scheme == "kubernetes":
        from .kubernetes_store import KubernetesStore

        return KubernetesStore(members[0], place, ttl_s)
    from .etcd_store import EtcdStore

    context = None
    if scheme == "etcds":
        from moe_lora.core.errors import ConfigError
        from moe_lora.dist.net.keys import keys_in

        keys = keys_in(cluster.certificates)
        if keys is None:
            raise ConfigError(f"leadership.store={store} needs certificates; name their folder")
        context = keys.context(server=False)
    return EtcdStore(members, place, ttl_s, context)
