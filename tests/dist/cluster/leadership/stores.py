# SPDX-License-Identifier: Apache-2.0
"""The three stores over one moved clock: a file, an etcd and an API server in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from moe_lora.dist.cluster.leadership import LeaseStore, StoreError, kubernetes_store, sqlite_store
from moe_lora.dist.cluster.leadership.etcd_store import EtcdStore
from moe_lora.dist.cluster.leadership.kubernetes_store import KubernetesStore
from moe_lora.dist.cluster.leadership.sqlite_store import SqliteStore
from tests.dist.api_server import ApiServer

TTL_S = 5.0
LOST, UNHEARD = "lost", "unheard"
"""A call without an effect, and a call without an answer."""


class Store:
    """A store.

    epochs: of the first leaders.  sees: a lease ends its time after a standby has seen the last renewal.
    faults: of the next calls: LOST, UNHEARD or none.
    """

    epochs: tuple[int, int, int]
    sees = False

    def __init__(self, folder: Path) -> None:
        self.now_s = 1000.0
        self.faults: Iterator[str] = iter(())

    def open(self, name: str) -> LeaseStore:
        raise NotImplementedError

    def delete(self) -> None:
        """Delete the lease's record, if epochs rise all the same."""
        raise NotImplementedError

    def send(self, error: type[Exception], call: Callable[[], Any]) -> Any:
        fault = next(self.faults, "")
        if fault == LOST:
            raise error("lost")
        answer = call()
        if fault == UNHEARD:
            raise error("unheard")
        return answer


class File(Store):
    epochs = (1, 2, 3)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._path = str(folder / "lease")

    def open(self, name: str) -> LeaseStore:
        return SqliteStore(self._path, TTL_S)


class Etcd(Store):
    """One member, which grants leases by the moved clock."""

    epochs = (41, 42, 43)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._revision, self._num_leases = 40, 0
        self._until_s: dict[str, float] = {}
        self._key: dict[str, str] = {}

    def open(self, name: str) -> LeaseStore:
        store = EtcdStore(["member:1"], "k", TTL_S)
        store._post = lambda member, path, body: self.send(OSError, lambda: self._answer(path, body))
        return store

    def delete(self) -> None:
        self._key = {}

    def _answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self._until_s = {lease: until_s for lease, until_s in self._until_s.items() if until_s > self.now_s}
        if self._key and self._key["lease"] not in self._until_s:
            self._key = {}
        if path == "/v3/kv/range":
            return {"kvs": [self._key]} if self._key else {}
        if path == "/v3/lease/grant":
            self._num_leases += 1
            lease = str(self._num_leases)
            self._until_s[lease] = self.now_s + int(body["TTL"])
            return {"ID": lease}
        if path == "/v3/kv/txn":
            [put] = (one["request_put"] for one in body["success"])
            if put["lease"] not in self._until_s:
                raise OSError("etcdserver: requested lease not found")
            if not self._key:
                self._revision += 1
                self._key = {**put, "create_revision": str(self._revision)}
            return {}
        if body["ID"] not in self._until_s:
            if path == "/v3/lease/keepalive":
                return {"result": {"ID": body["ID"]}}
            raise OSError("etcdserver: requested lease not found")
        if path == "/v3/lease/revoke":
            del self._until_s[body["ID"]]
            return {}
        assert path == "/v3/lease/keepalive"
        self._until_s[body["ID"]] = self.now_s + TTL_S
        return {"result": {"ID": body["ID"], "TTL": str(int(TTL_S))}}


class Kubernetes(Store):
    epochs = (1001, 1004, 1007)
    sees = True

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.api = ApiServer(folder)

    def open(self, name: str) -> KubernetesStore:
        with mock.patch.dict("os.environ", self.api.environment):
            store = KubernetesStore("default", "leader", TTL_S, self.api.account(name))
        store._send = lambda *call: self.send(StoreError, lambda: self.api.answer(name, *call))
        return store

    def delete(self) -> None:
        self.api.delete("leader")


@contextmanager
def moved_clock(store: Store) -> Iterator[None]:
    """Meanwhile the stores have the clock of `store`."""
    time = SimpleNamespace(monotonic=lambda: store.now_s)
    with mock.patch.object(sqlite_store, "time", time), mock.patch.object(kubernetes_store, "time", time):
        yield
