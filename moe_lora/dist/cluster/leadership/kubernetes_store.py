# SPDX-License-Identifier: Apache-2.0
"""A lease in Kubernetes: a Lease of `coordination.k8s.io/v1`, from a pod."""

from __future__ import annotations

import json
import math
import os
import re
import ssl
import time
from datetime import datetime, timezone
from http.client import HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any

from moe_lora.core.errors import ConfigError

from . import LostLeaseError, StoreError

EPOCH = "moe-lora/epoch"
"""Annotation of the holder's epoch."""
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_NUMBER = re.compile("[0-9]{1,18}")
_LEASES = "/apis/coordination.k8s.io/v1/namespaces/{}/leases"

Lease = dict[str, Any]


class KubernetesStore:
    """A `LeaseStore`.

    The epoch is the resource version before the holder's first write.  Kubernetes numbers the versions of
    Leases in one rising order, also past a deletion.  A renewal makes a deleted Lease again.  The lease ends
    after a time without a change, by the clock of the waiting process.  folder: token and authority of the
    service account.  Raises ConfigError outside of pods.
    """

    def __init__(self, namespace: str, name: str, ttl_s: float, folder: Path = _ACCOUNT) -> None:
        self._path, self._name, self._ttl_s, self._folder = _LEASES.format(namespace), name, ttl_s, folder
        self._metadata = {"namespace": namespace, "name": name}
        try:
            self._server = os.environ["KUBERNETES_SERVICE_HOST"], int(os.environ["KUBERNETES_SERVICE_PORT"])
            self._context()
        except (KeyError, OSError, ValueError) as error:
            raise ConfigError(
                f"leadership.store=kubernetes://{namespace}/{name} needs a pod with a service account "
                f"({error!r}); set automountServiceAccountToken there, or give etcd://HOST:PORT"
            ) from error
        self._holder = ""
        self._lease: Lease | None = None
        self._epoch = 0
        self._seen: Any = None
        self._seen_s = 0.0

    def acquire(self, holder: str) -> tuple[str, int]:
        self._holder = holder
        lease = self._read() or self._create()
        if lease is not None and self._is_free(lease):
            lease = self._write_holder(lease) or self._read()
        if lease is None or not (found := _holder(lease)):
            raise StoreError(f"other processes change or delete Lease {self._name}")
        self._lease = lease
        return found, _epoch(lease)

    def renew(self) -> None:
        lease, epoch = self._lease, _epoch(self._lease)
        while lease is not None and (_holder(lease), _epoch(lease)) == (self._holder, epoch):
            if (written := self._write(lease, renewTime=_now())) is not None:
                self._lease = written
                return
            lease = self._read() or self._create(lease["spec"], annotations={EPOCH: str(epoch)})
        raise LostLeaseError(f"another controller has Lease {self._name}, or deletes the Lease")

    def release(self) -> None:
        if self._holder and (lease := self._read()) is not None and _holder(lease) == self._holder:
            self._write(lease, holderIdentity="")

    def _is_free(self, lease: Lease) -> bool:
        spec = lease.get("spec", {})
        self._epoch = max(self._epoch, _epoch(lease))
        if spec != self._seen:
            self._seen, self._seen_s = spec, time.monotonic()
        ends_s = self._seen_s + (spec.get("leaseDurationSeconds") or self._ttl_s)
        return not _holder(lease) or (_holder(lease) != self._holder and time.monotonic() >= ends_s)

    def _write_holder(self, lease: Lease) -> Lease | None:
        # A Lease from a backup may have an epoch above the version.
        epoch = max(int(lease["metadata"]["resourceVersion"]), self._epoch + 1)
        annotations = {**lease["metadata"].get("annotations", {}), EPOCH: str(epoch)}
        lease = {**lease, "metadata": {**lease["metadata"], "annotations": annotations}}
        now = _now()
        return self._write(
            lease,
            holderIdentity=self._holder,
            leaseDurationSeconds=math.ceil(self._ttl_s),
            leaseTransitions=lease.get("spec", {}).get("leaseTransitions", 0) + 1,
            acquireTime=now,
            renewTime=now,
        )

    def _create(self, spec: Lease | None = None, **metadata: Any) -> Lease | None:
        """The new Lease, or the Lease that another process made first."""
        new = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "spec": spec or {}}
        new["metadata"] = {**self._metadata, **metadata}
        return self._call("POST", self._path, new) or self._read()

    def _read(self) -> Lease | None:
        return self._call("GET", f"{self._path}/{self._name}")

    def _write(self, lease: Lease, **changes: Any) -> Lease | None:
        """The written Lease; None if another process changed or deleted the Lease."""
        changed = {**lease, "spec": {**lease.get("spec", {}), **changes}}
        return self._call("PUT", f"{self._path}/{self._name}", changed)

    def _call(self, method: str, path: str, body: Lease | None = None) -> Lease | None:
        """The Lease; None if absent, or after a conflict."""
        status, answer = self._send(method, path, body)
        if status == 409 or (status == 404 and method != "POST"):
            return None
        if status not in (200, 201):
            access = "; the service account needs get, create and update of leases"
            raise StoreError(
                f"the API server refuses {method} of Lease {self._name} ({status}: {answer.get('message')})"
                + (access if status in (401, 403) else "")
            )
        return answer

    def _send(self, method: str, path: str, body: Lease | None) -> tuple[int, Lease]:
        host, port = self._server
        try:
            # Kubernetes replaces both files: the token every hour.
            token, context = (self._folder / "token").read_text(encoding="ascii").strip(), self._context()
        except (OSError, ValueError) as error:
            problem = f"the service account's token or authority in {self._folder} can't be read ({error})"
            raise StoreError(problem) from error
        connection = HTTPSConnection(host, port, timeout=self._ttl_s / 5, context=context)
        try:
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            status, text = response.status, response.read()
        except (OSError, HTTPException, ValueError) as error:
            problem = f"{host}:{port}: {error or type(error).__name__}"
            if isinstance(error, ssl.SSLError):
                raise StoreError(
                    f"no TLS with the API server ({problem}); its certificate must be of the authority in "
                    f"{self._folder}/ca.crt"
                ) from error
            raise StoreError(f"the API server does not answer ({problem}); start the API server") from error
        finally:
            connection.close()
        return status, _object(status, text)

    def _context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(self._folder / "ca.crt")
        return context


def _object(status: int, text: bytes) -> Lease:
    """The object in an answer, or an error's plain text as the object's message."""
    try:
        answer = json.loads(text)
    except ValueError:
        answer = None
    if isinstance(answer, dict):
        return answer
    message = text[:200].decode(errors="replace").strip()
    if status in (200, 201):
        raise StoreError(f"the API server answers {status} without an object ({message!r})")
    return {"message": message}


def _holder(lease: Lease) -> str:
    return str(lease.get("spec", {}).get("holderIdentity") or "")


def _epoch(lease: Lease | None) -> int:
    text = str((lease or {}).get("metadata", {}).get("annotations", {}).get(EPOCH, ""))
    return int(text) if _NUMBER.fullmatch(text) else 0


def _now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
