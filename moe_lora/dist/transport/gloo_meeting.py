"""How the two ends of a gloo link tell each other their addresses: over a socket of their own.

torch's TCPStore would look up the name of each end that connects, and wait seconds for a resolver that does
not answer.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import Store

_LENGTHS = struct.Struct("<II")


class MeetingStore(Store):
    """A store of two processes: what one end sets is sent to the other, which reads it when it asks.

    Raises OSError, also when the other end has hung up or says nothing for the socket's timeout.
    """

    def __init__(self, sock: socket.socket) -> None:
        super().__init__()
        self._sock = sock
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        name, data = key.encode(), value.encode() if isinstance(value, str) else bytes(value)
        self._values[key] = data
        self._sock.sendall(_LENGTHS.pack(len(name), len(data)) + name + data)

    def get(self, key: str) -> bytes:
        while key not in self._values:
            name_bytes, num_bytes = _LENGTHS.unpack(receive(self._sock, _LENGTHS.size))
            name = receive(self._sock, name_bytes).decode()
            self._values[name] = receive(self._sock, num_bytes)
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """timeout: not looked at, the socket has one."""
        for key in keys:
            self.get(key)


def receive(sock: socket.socket, num_bytes: int) -> bytes:
    """Exactly that many bytes.  Raises OSError."""
    data = b""
    while len(data) < num_bytes:
        part = sock.recv(num_bytes - len(data))
        if not part:
            raise ConnectionError("the other end hung up")
        data += part
    return data
