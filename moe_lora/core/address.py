# SPDX-License-Identifier: Apache-2.0
"""Addresses of listeners in a cluster."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import IPv6Address
from pathlib import Path

from .errors import ConfigError, LoraServerError

logger = logging.getLogger(__name__)

MAKE_KEYS = "moe-lora cluster init"


@dataclass(frozen=True)
class Address:
    """Host and port, or the path of a Unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        return self.path or (f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}")


def parse_address(setting: str, address: str) -> Address:
    """Parse "host:port", "[IPv6]:port" or "/path".  Raises ConfigError."""
    if address.startswith("/"):
        return Address(path=address)
    found = re.fullmatch(r"(?:\[([^][]*:[^][]*)\]|([^][:]*)):(\d+)", address)
    host = "" if found is None else found[1] or found[2]
    if found is None or not _is_host(host) or not 0 < int(found[3]) <= 65535:
        raise ConfigError(
            f"{setting}={address!r} is not host:port, such as 10.0.0.1:7600 or [fd00::1]:7600, nor the "
            "absolute path of a socket on this host"
        )
    return Address(host, int(found[3]))


def is_any_host(host: str) -> bool:
    """True for all addresses of a host, in any spelling."""
    if ":" in host:
        found = IPv6Address(host)
        return (found.ipv4_mapped or found).is_unspecified
    with suppress(OSError, ValueError):  # a name
        return not any(socket.inet_aton(host))
    return False


def parse_dialled(setting: str, address: str) -> Address:
    """`parse_address` for an address that other roles dial.  Raises ConfigError for all of a host."""
    place = parse_address(setting, address)
    if is_any_host(place.host):
        raise ConfigError(
            f"{setting}={address} is dialled by other roles, and names no host; give a name or an IP address "
            "of the listener's host"
        )
    return place


ADDRESSES = "MOE_LORA_ADDRESSES"
"""Variable with the path of an address book: JSON, name:port -> ip:port, replaced as roles move."""


def located(address: Address) -> Address:
    """The address's entry in the address book, read anew; unchanged without book or entry.

    Raises ConfigError for an unreadable book.
    """
    path = os.environ.get(ADDRESSES)
    if path is None or address.path:
        return address
    try:
        found = json.loads(Path(path).read_text()).get(str(address))
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{ADDRESSES}={path} is no address book ({error}); unset the variable") from error
    return address if found is None else parse_address(ADDRESSES, found)


def _is_host(host: str) -> bool:
    """False for a name that the socket module can't encode, and for a wrong IPv6 address."""
    try:
        return bool(IPv6Address(host) if ":" in host else host.encode("idna"))
    except ValueError:
        return False


def needs_keys(setting: str, address: object) -> ConfigError:
    """Error for a network address without certificates."""
    return ConfigError(
        f"{setting}={address} is reached over a network, where the roles of a cluster know each other by "
        f"certificates; make them by `{MAKE_KEYS}` and name their folder as certificates"
    )


@contextmanager
def unix_socket(path: str) -> Iterator[socket.socket]:
    """A listening socket for this user only, removed with the context.

    Replaces a killed process's socket.  Raises OSError, also for a path in use.
    """
    _remove_dead(path)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(path)
        try:
            os.chmod(path, 0o600)
            sock.listen()
            yield sock
        finally:
            sock.close()
            with suppress(OSError):  # the path may be another process's by now
                _remove_dead(path)


def _remove_dead(path: str) -> None:
    """Remove a socket without a listener.  Raises OSError if a process listens."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except FileNotFoundError:
            return
        except ConnectionRefusedError:
            if stat.S_ISSOCK(os.stat(path).st_mode):  # listen() refuses for other files
                os.unlink(path)
            return
        except BlockingIOError:  # its queue of connections is full
            pass
    raise OSError(errno.EADDRINUSE, f"{path} is in use")


_NAME_S = 60
"""Time for the name of a starting host to become known."""


def own_host(address: str) -> str:
    """This host's IP address on the route to an address.  Raises LoraServerError."""
    name = parse_address("lora_server.address", address)
    if name.path:
        return "127.0.0.1"
    for left_s in reversed(range(_NAME_S)):
        place = located(name)
        try:
            found = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_DGRAM)
            family, *_, address_there = min(found, key=lambda one: one[0] != socket.AF_INET)
            with socket.socket(family, socket.SOCK_DGRAM) as sock:
                sock.connect(address_there)
                return str(sock.getsockname()[0])
        except OSError as error:
            if not (left_s and isinstance(error, socket.gaierror)):
                raise LoraServerError(
                    f"there is no way to the address {address} from this host ({error}); correct it"
                ) from error
            if left_s == _NAME_S - 1:
                logger.warning("the name of %s is not known yet: waiting up to %d s", address, _NAME_S)
        time.sleep(1)
    raise AssertionError
