# SPDX-License-Identifier: Apache-2.0
"""Leases of a Kubernetes API server, over HTTPS with tokens of service accounts.

Objects follow the schemas of the API.  Versions, conflicts and errors follow the sources of Kubernetes.
"""

from __future__ import annotations

import copy
import json
import ssl
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import RLock, Thread
from typing import Any

import kubernetes_validate

VERSION = "1.37"
VERBS = {"GET": "get", "POST": "create", "PUT": "update"}
EVERY_LEASE = (
    {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": list(VERBS.values())},
)
_CHECKED: set[str] = set()
"""Forms of objects that follow the schema: a check takes a tenth of a second."""
_LEASES = "/apis/coordination.k8s.io/v1/namespaces/"
_REASONS = {
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    409: "Conflict",
    422: "Invalid",
    500: "InternalError",
}


class ApiServer:
    """An API server.

    rules: of the Role of all accounts.  before: is called with the account and the method of each call.
    cut: accounts without a way to the server.  unheard: accounts whose calls count, without an answer.
    status: of all answers, if set.  text: of all answers, in place of objects, if set.
    """

    def __init__(
        self, folder: Path, host: str = "127.0.0.1", rules: Sequence[Mapping[str, Any]] = EVERY_LEASE
    ):
        self._folder, self.host, self.port, self.rules = folder, host, 0, rules
        self.leases: dict[str, dict[str, Any]] = {}
        self.before: Callable[[str, str], None] = lambda account, method: None
        self.cut: set[str] = set()
        self.unheard: set[str] = set()
        self.status: int | None = None
        self.text: bytes | None = None
        self._tokens: dict[str, str] = {}
        self._version = 1000
        self._lock = RLock()
        self._server: ThreadingHTTPServer | None = None
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in _certificate(host).items():
            (folder / name).write_bytes(content)

    def account(self, name: str) -> Path:
        """Folder of a service account, as in its pods."""
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        token = uuid.uuid4().hex
        self._tokens = {old: other for old, other in self._tokens.items() if other != name} | {token: name}
        (folder / "token").write_text(token)
        (folder / "ca.crt").write_bytes((self._folder / "ca.crt").read_bytes())
        return folder

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a pod."""
        return {"KUBERNETES_SERVICE_HOST": self.host, "KUBERNETES_SERVICE_PORT": str(self.port)}

    def start(self) -> None:
        """Listen, at the former port if there was one."""
        self._server = ThreadingHTTPServer((self.host, self.port), self._handler())
        self._server.daemon_threads = True
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._folder / "ca.crt", self._folder / "server.key")
        self._server.socket = context.wrap_socket(
            self._server.socket, server_side=True, do_handshake_on_connect=False
        )
        self.port = self._server.server_port
        Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def change_authority(self) -> None:
        """Have a new certificate, from the next `start` on."""
        for name, content in _certificate.__wrapped__(self.host).items():
            (self._folder / name).write_bytes(content)

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def answer(
        self, account: str | None, method: str, path: str, body: dict[str, Any] | None
    ) -> tuple[int, dict[str, Any]]:
        """Status and object."""
        if account is None:
            return self._failed(401, "Unauthorized")
        self.before(account, method)
        if self.status is not None:
            return self._failed(self.status, "as the test says")
        kind, _, name = path.removeprefix(_LEASES).partition("/")[2].partition("/")
        if not path.startswith(_LEASES) or kind != "leases" or bool(name) == (method == "POST"):
            return self._failed(404, f"the server could not find {path}")
        if not self._may(VERBS[method], name):
            return self._failed(403, f"{account} cannot {VERBS[method]} resource leases")
        if body is not None and (problem := self._invalid(body, path)):
            return self._failed(422, problem)
        with self._lock:
            return getattr(self, f"_{VERBS[method]}")(name, body)

    def edit(self, name: str, **spec: Any) -> None:
        """Change a Lease, as by `kubectl edit`."""
        with self._lock:
            self.leases[name]["spec"] |= spec
            self._count(self.leases[name])

    def delete(self, name: str) -> None:
        with self._lock:
            del self.leases[name]
            self._version += 1

    def _get(self, name: str, _: None) -> tuple[int, dict[str, Any]]:
        if name not in self.leases:
            return self._failed(404, f'leases.coordination.k8s.io "{name}" not found')
        return 200, copy.deepcopy(self.leases[name])

    def _create(self, _: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        name = body["metadata"]["name"]
        if name in self.leases:
            return self._failed(409, f'leases.coordination.k8s.io "{name}" already exists')
        metadata = {**body["metadata"], "uid": str(uuid.uuid4())}
        self.leases[name] = self._count({"spec": {}, **copy.deepcopy(body), "metadata": metadata})
        return 201, copy.deepcopy(self.leases[name])

    def _update(self, name: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if (now := self.leases.get(name)) is None:
            return self._failed(404, f'leases.coordination.k8s.io "{name}" not found')
        given = body["metadata"]
        if not given.get("resourceVersion"):
            return self._failed(422, "metadata.resourceVersion: must be specified for an update")
        for key in ("uid", "resourceVersion"):
            if given.get(key, now["metadata"][key]) != now["metadata"][key]:
                return self._failed(409, "the object has been modified")
        if body != now:
            self.leases[name] = self._count(copy.deepcopy(body))
        return 200, copy.deepcopy(self.leases[name])

    def _count(self, lease: dict[str, Any]) -> dict[str, Any]:
        self._version += 1
        lease["metadata"]["resourceVersion"] = str(self._version)
        return lease

    def _may(self, verb: str, name: str) -> bool:
        return any(
            "coordination.k8s.io" in rule["apiGroups"]
            and "leases" in rule["resources"]
            and verb in rule["verbs"]
            and name in rule.get("resourceNames", [name])
            for rule in self.rules
        )

    def _invalid(self, body: dict[str, Any], path: str) -> str:
        spec = body.get("spec", {})
        if spec.get("leaseDurationSeconds", 1) <= 0 or not 0 <= spec.get("leaseTransitions", 0) < 1 << 31:
            return "spec: a number is out of its range"
        if body["metadata"].get("namespace") != path.removeprefix(_LEASES).partition("/")[0]:
            return "the namespace of the object does not match the request"
        for key in ("acquireTime", "renewTime"):
            if key in spec:
                datetime.strptime(spec[key], "%Y-%m-%dT%H:%M:%S.%fZ")
        if (form := _form(body)) not in _CHECKED:
            try:
                kubernetes_validate.validate(body, VERSION, strict=True)
            except kubernetes_validate.ValidationError as error:
                return str(error.message)
            _CHECKED.add(form)
        return ""

    def _failed(self, code: int, message: str) -> tuple[int, dict[str, Any]]:
        reason = _REASONS.get(code, "Unknown")
        failed = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code}
        return code, {**failed, "message": message}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        api = self

        class Handler(BaseHTTPRequestHandler):
            def handle(self) -> None:
                try:
                    super().handle()
                except OSError:
                    self.close_connection = True  # the client gave up

            def do_GET(self) -> None:
                token = self.headers.get("Authorization", "").removeprefix("Bearer ")
                account = api._tokens.get(token)
                length = int(self.headers.get("Content-Length", 0))
                body = json.loads(self.rfile.read(length)) if length else None
                if account in api.cut:
                    while account in api.cut:
                        time.sleep(0.01)
                    return
                status, content = api.answer(account, self.command, self.path, body)
                if account not in api.unheard:
                    said = json.dumps(content).encode() + b"\n" if api.text is None else api.text
                    self.send_response(status)
                    self.send_header("Content-Type", "application/json")
                    self.send_header("Content-Length", str(len(said)))
                    self.end_headers()
                    self.wfile.write(said)

            do_POST = do_PUT = do_GET

            def log_message(self, *_: object) -> None:
                pass

        return Handler


def _form(value: Any) -> str:
    """The keys and types of an object."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_form(one)}" for key, one in sorted(value.items())) + "}"
    return type(value).__name__


@cache
def _certificate(host: str) -> dict[str, bytes]:
    """Files of a server's certificate, signed by its own key."""
    words = ["openssl", "req", "-x509", "-nodes", "-days", "2", "-subj", "/CN=kubernetes"]
    words += ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    words += ["-addext", f"subjectAltName=IP:{host}", "-keyout", "server.key", "-out", "ca.crt"]
    with TemporaryDirectory() as folder:
        subprocess.run(words, cwd=folder, check=True, capture_output=True)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}
