# SPDX-License-Identifier: Apache-2.0
"""Commands of a cluster on this host: `moe-lora serve`, detached from the terminal."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from moe_lora.config import FrontEndConfig
from moe_lora.config.cluster import read_cluster
from moe_lora.core.address import Address
from moe_lora.core.errors import ConfigError
from moe_lora.core.host import CLUSTER_MARK, cluster_headers, folder_locked, host_name, state_folder

from .host_roles import FRONT_END, INSTANCE, STOP_S
from .progress import LOOK_S, READY, RUNNING, STARTING, RoleFacts, check_name, ready_urls

_SERVE = ("-m", "moe_lora.cli.main", "serve")
_STATE, _LOG = "state.json", "server.log"
_LINES, _TEXT = 20, 300
_STATUS_S, _SCALE_S, _MOVES_S = 30.0, 300.0, 3600.0
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_DRAINED, _SILENT = "drained", "silent"


@dataclass(frozen=True, kw_only=True)
class _Server:
    """A started server.

    token: in `CLUSTER_MARK` of all processes.  admin: of the administrators, a path or a URL.
    stop_s: longest end.  told: processes after SIGTERM by any command.
    """

    folder: str
    token: str
    url: str
    admin: str
    stop_s: float
    told: list[int] = field(default_factory=list)

    @property
    def log(self) -> Path:
        return Path(self.folder) / _LOG

    def processes(self) -> dict[int, list[str]]:
        """Words of the command by process, with RANK and its value, the server's first."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # ended, or of another user
                variables = dict(one.partition("=")[::2] for one in _words(folder / "environ"))
                if variables.get(CLUSTER_MARK) == self.token:
                    found[int(folder.name)] = [*_words(folder / "cmdline"), "RANK", variables.get("RANK", "")]
        return dict(sorted(found.items(), key=lambda one: (not _is_server(one[1]), one[0])))

    def living(self) -> dict[int, list[str]]:
        """As `processes`.  Raises ConfigError after the server's end."""
        processes = self.processes()
        if not any(map(_is_server, processes.values())):
            raise ConfigError(_last_errors(self.log))
        return processes

    def call(self, method: str, path: str, limit_s: float) -> httpx.Response:
        """The administrators' answer, with the key in OPENAI_API_KEY.  Raises httpx.HTTPError."""
        key, uds = os.environ.get("OPENAI_API_KEY"), self.admin if self.admin.startswith("/") else None
        base = self.admin if uds is None else f"{self.url.partition(':')[0]}://localhost"
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # No certificate is checked: the address is this host's.
        transport = httpx.HTTPTransport(verify=False, uds=uds)
        with httpx.Client(transport=transport, timeout=limit_s, headers=headers, trust_env=False) as http:
            return http.request(method, f"{base}{path}")

    def is_ready(self) -> bool:
        """False for another server."""
        with suppress(httpx.HTTPError):
            ready = httpx.get(f"{self.url}/ready", verify=False, trust_env=False, timeout=_STATUS_S)
            return ready.is_success and cluster_headers(self.token).items() <= ready.headers.items()
        return False

    def instances(self) -> dict[str, dict[str, Any]]:
        """Cards of the instances by name; empty without a key."""
        with suppress(httpx.HTTPError):
            answer = self.call("GET", "/v1/instances", _STATUS_S)
            if answer.is_success:
                return {card["id"]: card for card in answer.json()["data"]}
        return {}

    def status(self) -> list[RoleFacts]:
        """Every role's state.  Raises ConfigError after the server's end."""
        processes = self.living()
        log = self.log.read_text(errors="replace")
        logged = {int(pid): name for name, pid in re.findall(r"(\S+) started \(process (\d+)\)", log)}
        ends = dict(re.findall(r"(\S+) ended after [\d.]+ s: (.*)", log))
        is_ready = self.is_ready()
        cards = self.instances() if is_ready else {}
        whole = not any(_option(words, "--role") == FRONT_END for words in processes.values())
        rows = []
        for pid, words in processes.items():
            if _is_server(words):
                name = f"{FRONT_END}-0" if whole else "keeper"
            elif (role := _option(words, "--role")) is not None:
                rank = _option(words, "RANK")
                other = "spare" if "--spare" in words else f"{role}-{rank}" if rank else role
                name = logged.get(pid) or _option(words, "--name") or other
            else:
                continue
            is_front_end = name.startswith(FRONT_END)
            state = RUNNING if is_ready or not name.startswith((FRONT_END, INSTANCE)) else STARTING
            card = cards.pop(name, {"restarts": int(_option(words, "--starts") or 0)})
            state = READY if is_front_end and is_ready else _state(card, state)
            rows.append(
                RoleFacts(
                    name=name,
                    state=state,
                    process=str(pid),
                    url=self.url if is_front_end else "",
                    num_restarts=card["restarts"],
                    problem=ends.get(name, "") if state == STARTING else "",
                )
            )
        for name, card in cards.items():  # between two processes, or once the spare one
            problem = "" if card["live"] else ends.get(name, "")
            rows.append(
                RoleFacts(
                    name=name, state=_state(card, STARTING), num_restarts=card["restarts"], problem=problem
                )
            )
        return rows

    def stop(self) -> None:
        """End all processes by SIGTERM, the server's children by the server if possible; forget the server.

        Raises ConfigError.
        """
        deadline_s, told = time.monotonic() + self.stop_s, set[int]()
        while processes := self._tell():
            told.update(processes)
            if time.monotonic() > deadline_s:
                rest = ", ".join(
                    f"{_option(words, '--name') or _option(words, '--role') or 'process'} ({pid})"
                    for pid, words in processes.items()
                )
                raise ConfigError(
                    f"{rest} did not end within {self.stop_s:g} s; call moe-lora cluster down again, or end "
                    "the processes by kill -9"
                )
            time.sleep(LOOK_S)
        # A process loses its environment before its sockets.
        while any(map(_is_ending, told)) and time.monotonic() < deadline_s:
            time.sleep(LOOK_S)

    def _tell(self) -> dict[int, list[str]]:
        """Remaining processes, each told once: a second SIGTERM cuts requests.  Without any, no state."""
        folder = Path(self.folder)
        with folder_locked(folder):
            processes, kept = self.processes(), _kept(folder)
            is_own = kept is not None and kept.token == self.token  # else of a later start
            if kept is not None and is_own:
                self.told[:] = kept.told
            servers = [pid for pid, words in processes.items() if _is_server(words)]
            new = set(servers or processes) - set(self.told)
            for pid in new:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            self.told.extend(new)
            if is_own and new:
                self.write()
            elif is_own and not processes:
                (folder / _STATE).unlink()
        return processes

    def write(self) -> None:
        """Keep the state, whole at any time."""
        new = Path(self.folder) / f"{_STATE}.new"
        new.write_text(json.dumps(asdict(self)))
        new.replace(new.with_name(_STATE))


def _words(path: Path) -> list[str]:
    return os.fsdecode(path.read_bytes()).split("\0")


def _is_ending(pid: int) -> bool:
    with suppress(OSError):
        text = Path(f"/proc/{pid}/status").read_text()
        return "State:\tZ" not in text or not re.search(r"Threads:\t[01]\n", text)
    return False


def _is_server(words: list[str]) -> bool:
    return "serve" in words and "--config" in words


def _option(words: list[str], option: str) -> str | None:
    return words[words.index(option) + 1] if option in words else None


def _state(card: dict[str, Any], other: str) -> str:
    """The state of an instance; `other` without a card."""
    if "live" not in card:
        return other
    if card["drained"]:
        return _DRAINED
    return STARTING if not card["live"] else _SILENT if card["silent"] else RUNNING


def _last_errors(log: Path) -> str:
    """The server's last error, from the log."""
    lines = log.read_text(errors="replace").splitlines()
    first = next((n for n in range(len(lines) - 1, -1, -1) if lines[n].startswith("Error: ")), None)
    errors = lines[first:] if first is not None else [one for one in lines if " ERROR " in one] or lines[-3:]
    return "\n".join(["the server has ended:", *errors[-_LINES:], f"see {log}"])


def _folder(name: str, state_dir: str | None) -> Path:
    check_name(name)
    return state_folder(state_dir) / "clusters" / host_name() / name  # hosts may share the first


def is_known(name: str, state_dir: str | None) -> bool:
    """True from a start until `down`, also after a crash."""
    return (_folder(name, state_dir) / _STATE).exists()


def _server(name: str, state_dir: str | None) -> _Server:
    """Raises ConfigError without a start."""
    return _read(_folder(name, state_dir))


def _read(folder: Path) -> _Server:
    try:
        return _Server(**json.loads((folder / _STATE).read_text()))
    except FileNotFoundError:
        raise ConfigError(
            f"no cluster named {folder.name} is on this host; start the cluster by up --on local"
        ) from None
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{folder / _STATE} is damaged ({error}); up --on local starts the cluster and a new file"
        ) from error


def _kept(folder: Path) -> _Server | None:
    """None without a readable state."""
    with suppress(ConfigError):
        return _read(folder)
    return None


def up(
    file: str,
    name: str,
    *,
    num_front_ends: int,
    state_dir: str | None,
    limit_s: float,
    say: Callable[[str], None],
) -> list[str]:
    """Start a cluster; returns the URL once ready.

    say: gets lines of progress.  An error, Ctrl-C or the limit ends the processes.  Raises ConfigError.
    """
    front_end = read_cluster(file, scales=True).front_end
    folder = _folder(name, state_dir)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    taken = ConfigError(
        f"a cluster named {name} is on this host; see moe-lora cluster status, call moe-lora cluster down, "
        "or give another --name"
    )
    try:
        with folder_locked(folder, wait=False):
            if (former := _kept(folder)) is not None and former.processes():
                raise taken
            server = _new_server(folder, front_end)
            server.write()
            words = ["--config", os.path.abspath(file)]
            if num_front_ends > 1:
                words += ["--front-ends", str(num_front_ends)]
            process = _started(server, words)
    except BlockingIOError:
        raise taken from None

    def status(limit_s: float) -> list[RoleFacts]:
        process.poll()
        return server.status()

    try:
        return ready_urls(status, limit_s, say)
    except BaseException:
        try:
            say("ending all roles")
        finally:
            server.stop()
        raise


def _new_server(folder: Path, front_end: FrontEndConfig) -> _Server:
    """Raises ConfigError for an unknown or occupied port."""
    if front_end.port == 0:
        raise ConfigError("front_end.port=0 has an unknown URL; give another port")
    scheme = "http" if front_end.tls_cert is None else "https"
    host = _ANY.get(front_end.host, front_end.host)
    url = f"{scheme}://{Address(host, front_end.port)}"
    admin = front_end.admin_address
    with suppress(OSError), socket.create_connection((host, front_end.port), _STATUS_S):
        raise ConfigError(f"another server answers at {url}; give another front_end.port")
    return _Server(
        folder=str(folder),
        token=secrets.token_hex(16),
        url=url,
        admin=url if admin is None else admin if admin.startswith("/") else f"{scheme}://{admin}",
        stop_s=front_end.drain_s + 3 * STOP_S,
    )


def _started(server: _Server, words: list[str]) -> subprocess.Popen[bytes]:
    server.log.unlink(missing_ok=True)
    with server.log.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, *_SERVE, *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, CLUSTER_MARK: server.token},
        )
    while process.pid not in server.processes() and process.poll() is None:
        time.sleep(LOOK_S)  # the kernel shows a new process's environment a little later
    return process


def status(name: str, state_dir: str | None) -> list[RoleFacts]:
    """The state of every role.  Raises ConfigError."""
    return _server(name, state_dir).status()


def scale(name: str, state_dir: str | None, num_instances: int) -> None:
    """Change the number of instances.  Raises ConfigError."""
    server = _server(name, state_dir)
    server.living()
    if not server.is_ready():  # the key is for no other server
        raise ConfigError(f"{name} is not ready at {server.url}; see moe-lora cluster status")
    path = f"/v1/instances/scale?number={num_instances}&limit_s={_SCALE_S:g}"
    try:
        answer = server.call("POST", path, _SCALE_S + _MOVES_S)
    except httpx.HTTPError as error:
        raise ConfigError(f"{name} does not answer at {server.admin}: {error}") from error
    if answer.is_error:
        try:
            message = answer.json()["error"]["message"]
        except (ValueError, TypeError, LookupError):
            message = f"{server.admin} answers {answer.status_code}: {answer.text[:_TEXT]}"
        raise ConfigError(message)


def drain(name: str, state_dir: str | None, host: str) -> None:
    """Raises ConfigError."""
    url = _server(name, state_dir).admin
    raise ConfigError(f"{name} is on this host alone; call moe-lora drain INSTANCE --url {url}")


undrain = drain


def down(name: str, state_dir: str | None) -> None:
    """End a cluster, after open requests.  Raises ConfigError without a cluster."""
    _server(name, state_dir).stop()
