# SPDX-License-Identifier: Apache-2.0
"""`moe-lora serve` with keys of several tenants, over TLS, administrators at a socket of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import ssl
import subprocess
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from click.testing import CliRunner

from moe_lora.cli.main import main
from moe_lora.serve.limits import LEAST_QUEUED_TOKENS
from tests.patience import PATIENCE_S
from tests.stopped_processes import stop

from .demo_server import DEMO, DemoServer, demo_server, few_adapters

SECRET = "reverse"
"""An adapter that globex alone may use."""
TENANTS = {
    "acme": ("--adapters", "upper", "--adapters", "cold-*"),
    "globex": ("--adapters", "upper", "--adapters", "rev*"),
    "metered": ("--tokens-per-minute", "60"),
    "ops": ("--admin",),
}
MAX_LORAS = 6
MOST_CONNECTIONS = 120
MOST_QUEUED, MOST_OF_ONE = 66, 60
"""Requests that may wait for their first token in all, and of one tenant."""


def make_certificate(folder: Path) -> tuple[Path, Path]:
    cert, key = folder / "cert.pem", folder / "key.pem"
    words = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=127.0.0.1 -days 2"
    command = ["openssl", "req", "-x509", *words.split(), "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


@dataclass
class ServedTenants:
    """The running server.  keys: by tenant, of the file.  admins: the administrators' socket."""

    server: DemoServer
    context: ssl.SSLContext
    file: Path
    keys: dict[str, str]
    admins: Path
    at_first: tuple[Any, ...] = ()
    _number: int = field(default=0)

    def __post_init__(self) -> None:
        common = {"verify": self.context}
        self.url = self.server.url
        self.http = httpx.Client(base_url=self.url, trust_env=False, **common)
        transport = httpx.HTTPTransport(uds=str(self.admins), verify=self.context)
        self.to_admins = httpx.Client(transport=transport, base_url="https://127.0.0.1", **common)
        self.at_first = self.of_globex()

    @property
    def prompt(self) -> list[int]:
        """Another one each time, of some blocks."""
        return [3 + self._number % 90, *range(20, 80)]

    def ask(
        self,
        who: str | None,
        method: str,
        path: str,
        body: object = None,
        *,
        headers: Mapping[str, str] | None = None,
        admin: bool = False,
    ) -> httpx.Response:
        """Ask with that tenant's key; admin: at the administrators' socket."""
        key = {} if who is None else {"Authorization": f"Bearer {self.keys[who]}"}
        http = self.to_admins if admin else self.http
        return http.request(method, path, json=body, headers={**key, **(headers or {})})

    def of_globex(self) -> tuple[Any, ...]:
        """What globex sees and is answered; then another prompt is next."""
        self._number += 1
        body = {"model": SECRET, "prompt": "hello=", "max_tokens": 6, "temperature": 0}
        answer = self.ask("globex", "POST", "/v1/completions", body).json()
        cards = self.ask("globex", "GET", "/v1/models").json()["data"]
        versions = [(card["id"], card.get("version")) for card in cards]
        return answer["choices"][0]["text"], versions

    def has_room(self, who: str) -> bool:
        """Whether a request of its may wait: then one for an adapter that nobody has is a 404."""
        body = {"model": "nobodys", "prompt": [7], "max_tokens": 2}
        found = self.ask(who, "POST", "/v1/completions", body)
        assert found.status_code in (404, 429, 503), found.text
        return found.status_code == 404

    @contextlib.contextmanager
    def stopped_engine(self) -> Iterator[None]:
        engine = self.server.engine_pid()
        stop(engine)
        try:
            yield
        finally:
            os.kill(engine, signal.SIGCONT)

    def wait_until_full(self, who: str) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while self.has_room(who):
            assert time.monotonic() < deadline_s, "the front end did not take all requests in"
            time.sleep(0.01)

    def order_of_starts(self, counts: Mapping[str, int], **priorities: int) -> list[str]:
        """Whose requests start in which order, where the engine finds all of them at once, those of the first
        tenant first.

        counts: what the queue has room for.  The engine stands still until the front end has them all; the
        order is what it says of how long each waited.
        """

        def ask(who: str, number: int) -> tuple[float, str]:
            body = {"prompt": [3 + number] * 8, "max_tokens": 10, "ignore_eos": True}
            body["priority"] = priorities.get(who, 0)
            found = self.ask(who, "POST", "/v1/completions", body)
            assert found.status_code == 200, found.text
            return found.json()["usage"]["timing"]["queue_ms"], who

        asked = []
        with ThreadPoolExecutor(MOST_QUEUED) as pool:
            with self.stopped_engine():
                for who, count in counts.items():
                    asked += [pool.submit(ask, who, number) for number in range(count)]
                    self.wait_until_full(who)
            return [who for _, who in sorted(one.result() for one in asked)]


def new_key(file: Path, tenant: str, *words: str) -> str:
    made = CliRunner().invoke(main, ["keys", "add", str(file), "--tenant", tenant, *words])
    assert made.exit_code == 0, made.output
    return made.output.strip()


@contextlib.contextmanager
def serving_tenants(folder: Path, cert: Path, key: Path) -> Iterator[ServedTenants]:
    file, admins = folder / "keys.json", folder / "admin"
    keys = {tenant: new_key(file, tenant, *words) for tenant, words in TENANTS.items()}
    options = ["--api-keys", file, "--tls-cert", cert, "--tls-key", key]
    options += ["--max-num-seqs", 4, "--max-loras", MAX_LORAS]
    settings = {
        "admin_address": admins,
        "max_queued_tokens": MOST_QUEUED * LEAST_QUEUED_TOKENS,
        "max_queued_tokens_per_client": MOST_OF_ONE * LEAST_QUEUED_TOKENS,
        "max_connections_per_client": MOST_CONNECTIONS,
        "heartbeat_timeout_s": 2 * PATIENCE_S,  # longer than it is stopped
        "heartbeat_dead_s": 3 * PATIENCE_S,
    }
    for name, value in settings.items():
        options += ["--set", f"front_end.{name}={value}"]
    options += [
        "--adapter-root",
        DEMO / "adapters",
        *few_adapters("upper", "reverse", "reverse-r16"),
        "--eager",
    ]
    with demo_server(folder / "log", *map(str, options)) as server:
        context = ssl.create_default_context(cafile=str(cert))
        tenants = ServedTenants(server, context, file, keys, admins)
        with contextlib.closing(tenants.http), contextlib.closing(tenants.to_admins):
            yield tenants
        assert server.stop() == 0
    assert not admins.exists()
