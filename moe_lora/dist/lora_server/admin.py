"""What the front end asks of the LoRA Server's leader: how it stands, and to hold more or fewer adapters."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Protocol

from moe_lora.core.errors import CapacityError, ConfigError, LoraServerError

from .control import ControlConnection, Message, dial
from .leases import LeaseStats

PROTOCOL_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class ServerState(LeaseStats):
    """capacity: adapters resident at once.  max_capacity: the most that the ranks' memory holds, as far as
    the registered adapters tell; None if there is none.
    """

    capacity: int
    max_capacity: int | None


class Managed(Protocol):
    """A leader, as its admin sees it."""

    def state(self) -> ServerState: ...

    def resize(self, capacity: int) -> None:
        """Raises ConfigError below 1, CapacityError beyond what the ranks' memory holds."""
        ...


def serve_admin(leader: Managed, connection: ControlConnection, hello: Message) -> None:
    """One question of an admin, answered with the state after it."""
    if hello.get("protocol") != PROTOCOL_VERSION:
        connection.send(
            "refused", error=f"protocol {hello.get('protocol')!r} there and {PROTOCOL_VERSION} at the server"
        )
        return
    problem = None
    if hello.get("capacity") is not None:
        try:
            leader.resize(hello["capacity"])
        except (CapacityError, ConfigError) as error:
            problem = str(error)
    connection.send("welcome", problem=problem, state=asdict(leader.state()))


class LoraServerAdmin:
    """Asks the leader at `address`, over a connection a question; may be used from any thread.

    timeout_s: how long a leader that is not there is looked for.
    """

    def __init__(self, address: str, key: str, *, timeout_s: float = 1.0) -> None:
        self._address = address
        self._key = key.encode()
        self._timeout_s = timeout_s

    def state(self) -> ServerState:
        """Raises LoraServerError if the leader does not answer."""
        return self._ask(None)

    def resize(self, capacity: int) -> ServerState:
        """Change the number of adapters resident at once, as `LeaseTable.resize` does, on all ranks.

        Raises CapacityError for a capacity that can't be, LoraServerError if the leader does not answer.
        """
        return self._ask(capacity)

    def _ask(self, capacity: int | None) -> ServerState:
        hello = {"role": "admin", "name": "front-end", "protocol": PROTOCOL_VERSION, "capacity": capacity}
        connection, answer = dial(self._address, self._key, hello, self._timeout_s)
        connection.close()
        if answer["problem"] is not None:
            raise CapacityError(answer["problem"])
        try:
            return ServerState(**answer["state"])
        except TypeError as error:
            raise LoraServerError(f"the LoRA Server at {self._address} is of another version") from error
