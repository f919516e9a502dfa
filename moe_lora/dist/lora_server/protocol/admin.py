"""What the front end asks of the LoRA Server's leader: how it stands, and to hold more or fewer adapters."""

from __future__ import annotations

from typing import Protocol

from moe_lora.core.errors import CapacityError, ConfigError
from moe_lora.dist.net.keys import Keys

from .control import ControlConnection, dial
from .control_messages import ADMIN_VERSION, AdminHello, AdminWelcome, Refused, ServerState


class Managed(Protocol):
    """A leader, as its admin sees it."""

    def state(self) -> ServerState: ...

    def resize(self, capacity: int) -> None:
        """Raises ConfigError below 1, CapacityError beyond what the ranks' memory holds."""
        ...


def serve_admin(leader: Managed, connection: ControlConnection, hello: AdminHello) -> None:
    """One question of an admin, answered with the state after it."""
    if hello.protocol != ADMIN_VERSION:
        connection.send(Refused(f"protocol {hello.protocol} there and {ADMIN_VERSION} at the server"))
        return
    problem = None
    if hello.capacity is not None:
        try:
            leader.resize(hello.capacity)
        except (CapacityError, ConfigError) as error:
            problem = str(error)
    connection.send(AdminWelcome(problem, leader.state()))


class LoraServerAdmin:
    """Asks the leader at `address`, over a connection a question; may be used from any thread.

    timeout_s: how long a leader that is not there is looked for.
    """

    def __init__(self, address: str, keys: Keys | None, *, timeout_s: float = 1.0) -> None:
        self._address = address
        self._keys = keys
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
        hello = AdminHello(name="front-end", capacity=capacity)
        connection, answer = dial(self._address, self._keys, hello, self._timeout_s)
        connection.close()
        assert isinstance(answer, AdminWelcome)
        if answer.problem is not None:
            raise CapacityError(answer.problem)
        return answer.state
