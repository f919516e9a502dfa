# SPDX-License-Identifier: Apache-2.0
"""Where processes of a cluster listen: a port of a host, or a socket of this host."""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from .errors import ConfigError

MAKE_KEYS = "moe-lora cluster init"


@dataclass(frozen=True)
class Address:
    """Where something listens: host and port, or the path of a Unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"


def parse_address(setting: str, address: str) -> Address:
    """The address that "host:port" or "/path" says.  Raises ConfigError for anything else."""
    if address.startswith("/"):
        return Address(path=address)
    host, separator, port = address.rpartition(":")
    if not (separator and _is_host(host) and port.isdecimal() and 0 < int(port) <= 65535):
        raise ConfigError(
            f"{setting}={address!r} is not host:port, such as 10.0.0.1:7600, nor the absolute path of a "
            "socket on this host"
        )
    return Address(host, int(port))


def _is_host(host: str) -> bool:
    """Whether it can be looked up: sockets refuse others with an error that is no OSError."""
    try:
        return bool(host.encode("idna"))
    except UnicodeError:
        return False


def needs_keys(setting: str, address: object) -> ConfigError:
    """What is wrong with an address of a network where there are no certificates."""
    return ConfigError(
        f"{setting}={address} is reached over a network, where the roles of a cluster know each other by "
        f"certificates; make them by `{MAKE_KEYS}` and name their folder as certificates"
    )


# Sockets of this host.


@contextmanager
def unix_socket(path: str) -> Iterator[socket.socket]:
    """A socket that listens there, for its user only; closed at the end, and its path removed.

    What a process that was killed left there is removed before.  Raises OSError, also if someone listens
    there.
    """
    _remove_dead(path)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(path)
        try:
            os.chmod(path, 0o600)
            sock.listen()  # at once: one that does not is taken for dead
            yield sock
        finally:
            sock.close()
            with suppress(OSError):  # by now it is another's
                _remove_dead(path)


def _remove_dead(path: str) -> None:
    """Remove a socket at which nobody listens.  Raises OSError if someone does."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except FileNotFoundError:
            return
        except ConnectionRefusedError:
            if stat.S_ISSOCK(os.stat(path).st_mode):  # other files refuse too
                os.unlink(path)
            return
        except BlockingIOError:  # it has more to accept than may wait
            pass
    raise OSError(errno.EADDRINUSE, f"{path} is in use")
