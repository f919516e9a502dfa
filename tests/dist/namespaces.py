# SPDX-License-Identifier: Apache-2.0
"""Network namespaces that stand for hosts: joined by a switch in a namespace of its own, always removed."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from .cluster_jobs import Host

NETWORK = "10.213.77"
_CLONE_NEWNET = 0x40000000


class Unavailable(Exception):
    """This machine can't make namespaces."""


class Network:
    """One namespace for each name, with an address each.  Raises Unavailable; used as a context manager."""

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        self._names = list(names)
        self._tag = f"moelora{os.getpid()}"
        self._switch = f"{self._tag}-switch"
        self._made: list[str] = []
        self.hosts = {
            name: Host(
                name, f"{NETWORK}.{number}", folder / name, ("ip", "netns", "exec", f"{self._tag}-{name}")
            )
            for number, name in enumerate(names, start=1)
        }

    def __enter__(self) -> Network:
        if shutil.which("ip") is None:
            raise Unavailable("there is no command ip (iproute2)")
        try:
            self._add(self._switch)
            self._ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
            self._ip("-n", self._switch, "link", "set", "bridge", "up")
            for number, name in enumerate(self._names, start=1):
                self._plug_in(f"{self._tag}-{name}", f"port{number}", self.hosts[name].address)
        except subprocess.CalledProcessError as error:
            self.__exit__()
            raise Unavailable(f"{' '.join(error.cmd)}: {error.stderr.strip()}") from error
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        while self._made:
            self._ip("netns", "delete", self._made.pop())

    def cut(self, one: str, other: str, *, apart: bool = True) -> None:
        """Drop, silently, what these two send each other; apart=False: no longer."""
        for name in (one, other):
            state = "on" if apart else "off"
            self._ip(
                "-n", self._switch, "link", "set", self._port(name), "type", "bridge_slave", "isolated", state
            )

    def limit_rate(self, rate: str, delay: str) -> str:
        """Limit what the switch and each host send; returns the limit: no delay without netem in the kernel.

        Raises Unavailable.
        """
        if shutil.which("tc") is None:
            raise Unavailable("there is no command tc (iproute2)")
        kinds = [
            ("netem", "delay", delay, "rate", rate),
            ("tbf", "rate", rate, "burst", "64kb", "latency", "100ms"),
        ]
        links = [(self._switch, self._port(name)) for name in self._names]
        links += [(f"{self._tag}-{name}", "eth0") for name in self._names]
        for kind in kinds:
            try:
                for namespace, link in links:
                    self._run("tc", "-n", namespace, "qdisc", "replace", "dev", link, "root", *kind)
            except subprocess.CalledProcessError as error:
                problem = error.stderr.strip()
            else:
                return " ".join(kind)
        raise Unavailable(f"tc: {problem}")

    def pids(self, name: str) -> list[int]:
        """Processes of a host."""
        return [int(pid) for pid in self._ip("netns", "pids", f"{self._tag}-{name}").split()]

    def kill(self, name: str) -> None:
        """Kill a host's processes at once."""
        for pid in self.pids(name):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @contextmanager
    def entered(self, name: str) -> Iterator[None]:
        """Meanwhile this thread, with what it starts, is on a host."""
        libc = ctypes.CDLL(None, use_errno=True)
        with (
            open("/proc/thread-self/ns/net") as ours,
            open(f"/run/netns/{self._tag}-{name}") as theirs,
        ):
            if libc.setns(theirs.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
            try:
                yield
            finally:
                libc.setns(ours.fileno(), _CLONE_NEWNET)

    def move(self, name: str) -> str:
        """Give a host another address; returns it."""
        host = self.hosts[name]
        network, _, number = host.address.rpartition(".")
        moved = replace(host, address=f"{network}.{int(number) + 100}")
        namespace = f"{self._tag}-{name}"
        self._ip("-n", namespace, "address", "flush", "dev", "eth0")
        self._ip("-n", namespace, "address", "add", f"{moved.address}/24", "dev", "eth0")
        self.hosts[name] = moved
        return moved.address

    def num_bytes_to(self, name: str) -> int:
        """Bytes that the switch has sent to a host."""
        shown = self._ip("-n", self._switch, "-s", "-j", "link", "show", self._port(name))
        count: int = json.loads(shown)[0]["stats64"]["tx"]["bytes"]
        return count

    def _port(self, name: str) -> str:
        return f"port{self._names.index(name) + 1}"

    def _plug_in(self, namespace: str, port: str, address: str) -> None:
        self._add(namespace)
        self._ip("-n", self._switch, "link", "add", port, "type", "veth", "peer", "eth0", "netns", namespace)
        self._ip("-n", self._switch, "link", "set", port, "master", "bridge", "up")
        self._ip("-n", namespace, "address", "add", f"{address}/24", "dev", "eth0")
        for link in ("lo", "eth0"):
            self._ip("-n", namespace, "link", "set", link, "up")

    def _add(self, namespace: str) -> None:
        self._ip("netns", "add", namespace)
        self._made.append(namespace)

    def _ip(self, *words: str) -> str:
        return self._run("ip", *words)

    def _run(self, *words: str) -> str:
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout
