"""Where a process is reached by the others around a LoRA Server."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from moe_lora.config import LoraServerConfig
from moe_lora.core.address import parse_address
from moe_lora.core.errors import LoraServerError
from moe_lora.dist.transport.contract import Transport, Window, make_transport


def own_host(address: str) -> str:
    """The IP address from which this host reaches a control address, and is reached by those around it.

    Raises LoraServerError if there is no way there.
    """
    place = parse_address("lora_server.address", address)
    if place.path:
        return "127.0.0.1"
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect((place.host, place.port))  # sends nothing: the system only chooses the way
            return str(sock.getsockname()[0])
    except OSError as error:
        raise LoraServerError(
            f"there is no way to the address {address} from this host ({error}); correct it"
        ) from error


def server_transport(server: LoraServerConfig, name: str, put_timeout_s: float | None = None) -> Transport:
    """This process's end of the transport that the settings name.

    put_timeout_s: how long one peer that takes nothing may hold up a put, where the medium waits for it.
    """
    if server.transport == "gloo":
        host = own_host(server.address)
        return make_transport("gloo", name=name, host=host, put_timeout_s=put_timeout_s)
    return make_transport(server.transport, name=name)


# A process that lets a peer reach its windows while it waits for something else.


_SLICE_S = 0.05
_NEVER = 2**64 - 1


@contextmanager
def attended(transport: Transport, window: Window) -> Iterator[None]:
    """Wait for signals meanwhile, in a thread: over NIXL a peer can attach only while its target waits."""
    done = threading.Event()

    def attend() -> None:
        while not done.is_set():
            transport.wait_any([(window, 0, _NEVER)], _SLICE_S)

    thread = threading.Thread(target=attend, name="attend", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
