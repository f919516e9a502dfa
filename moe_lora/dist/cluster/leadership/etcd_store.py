# SPDX-License-Identifier: Apache-2.0
"""A lease in etcd, by the JSON gateway of its version 3 interface."""

from __future__ import annotations

import json
import math
import ssl
from base64 import b64decode, b64encode
from collections.abc import Sequence
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any

from . import LostLeaseError, StoreError


class EtcdStore:
    """A `LeaseStore`: the holder's key has the lease, and the epoch is the revision that created the key."""

    def __init__(
        self, members: Sequence[str], key: str, ttl_s: float, context: ssl.SSLContext | None = None
    ) -> None:
        self._members, self._ttl_s, self._context = list(members), ttl_s, context
        self._key = _text(f"{key}/leader")
        self._lease = self._holder = ""
        self._epoch = 0

    def acquire(self, holder: str) -> tuple[str, int]:
        found = self._find()
        if found is None:
            self._lease = self._call("/v3/lease/grant", {"TTL": str(math.ceil(self._ttl_s))})["ID"]
            put = {"key": self._key, "value": _text(holder), "lease": self._lease}
            absent = {"key": self._key, "target": "CREATE", "result": "EQUAL", "create_revision": "0"}
            self._call("/v3/kv/txn", {"compare": [absent], "success": [{"request_put": put}]})
            found = self._find()
        if found is None:
            raise StoreError("the lease ended at once")
        if found[0] == holder:
            self._holder, self._epoch = found
        return found

    def renew(self) -> None:
        answer = self._call("/v3/lease/keepalive", {"ID": self._lease}).get("result", {})
        if int(answer.get("TTL", 0)) <= 0:
            raise LostLeaseError("etcd let the lease expire")
        # By a majority: one member may renew alone.
        if self._find() != (self._holder, self._epoch):
            raise LostLeaseError("another controller has the leader's key, or the key was deleted")

    def release(self) -> None:
        if self._lease:
            self._call("/v3/lease/revoke", {"ID": self._lease})

    def _find(self) -> tuple[str, int] | None:
        """The holder and the epoch."""
        found = self._call("/v3/kv/range", {"key": self._key}).get("kvs")
        return found and (b64decode(found[0]["value"]).decode(), int(found[0]["create_revision"]))

    def _call(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The first answer of a member."""
        problem = ""
        for _ in self._members:
            try:
                return self._post(self._members[0], path, body)
            except (OSError, HTTPException, ValueError) as error:
                problem = f"{self._members[0]}: {error or type(error).__name__}"
                self._members.append(self._members.pop(0))
        raise StoreError(
            f"etcd does not answer ({problem}); start a majority of its members, or correct leadership.store"
        )

    def _post(self, member: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        timeout_s = self._ttl_s / 5
        if self._context is None:
            connection = HTTPConnection(member, timeout=timeout_s)
        else:
            connection = HTTPSConnection(member, timeout=timeout_s, context=self._context)
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            # A keepalive's answer is the first line of a stream.
            answer: dict[str, Any] = json.loads(response.readline() or b"{}")
        finally:
            connection.close()
        if response.status != 200 or "error" in answer:
            raise HTTPException(f"status {response.status}, {answer.get('error', answer)}")
        return answer


def _text(value: str) -> str:
    return b64encode(value.encode()).decode()
