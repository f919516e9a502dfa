"""The controller's event loop: calls of front ends in, states out."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import signal
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moe_lora.core.address import Address
from moe_lora.core.errors import ConfigError, MoeLoraError
from moe_lora.dist.cluster.listener import RECOVERY_S, Recovery
from moe_lora.dist.cluster.routing_client import FleetClient
from moe_lora.dist.net.codec import Message
from moe_lora.dist.net.keys import Keys
from moe_lora.dist.net.peer import Asked
from moe_lora.policies.routing import TokenMeter

from .capacity_controller import CapacityController
from .cluster_state import ClusterStateLog, ControllerMethods, Figures, FrontEndHello, FrontEndReport, Taken
from .front_end_listener import Session, front_end_listener
from .placement_controller import PlacementController
from .served_registry import ServedRegistry

if TYPE_CHECKING:
    pass

logger = logging.getLogger(__name__)

POLL_S = 0.2
SHOW_S = 1.0
TAKEN_S = 5.0
"""A call is answered without a front end that does not take the new state for so long."""
SETTLE_S = 1.0
"""Instances that start together are placed on together."""
LONGEST_RECOVERY_S = 10.0
"""A front end of the file that does not dial in is not waited for any longer, in seconds."""


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """What decides: adapters (fleet), placement, provisioning, and the registry where names are found.

    It is there in every system: beside the requests of an only front end, or in a process of its own.
    """

    fleet: FleetClient
    meter: TokenMeter
    placement: PlacementController | None = None
    provision: CapacityController | None = None
    registry: ServedRegistry | None = None

    def methods(self) -> dict[str, Callable[..., Awaitable[Any]]]:
        """What front ends may call."""
        fleet, provision, registry = self.fleet, self.provision, self.registry
        found: dict[str, Callable[..., Awaitable[Any]]] = {
            "load_adapter": lambda name, path, replace: fleet.load_adapter(name, path, replace=replace),
            "unload_adapter": fleet.unload_adapter,
            "pin_adapter": lambda name, pinned: fleet.pin_adapter(name, pinned=pinned),
        }
        if provision is not None:
            found |= {"server_state": provision.server_state, "resize": provision.resize}
        if registry is not None:
            found |= {"registry_base": registry.base, "registry_resolve": registry.resolve}
            for method in REGISTRY_CALLS:
                found[f"registry_{method}"] = _by_names(registry, method)
        return found


REGISTRY_CALLS = ("adapters", "add", "check", "versions", "remove")


def _by_names(registry: ServedRegistry, method: str) -> Callable[..., Awaitable[Any]]:
    """Calls a method of the registry with the arguments that `ControllerMethods` names."""
    names = list(inspect.signature(getattr(ControllerMethods, f"registry_{method}")).parameters)[1:]
    return lambda *args: registry.call(method, **dict(zip(names, args, strict=True)))


class ClusterController:
    """Answers the calls of front ends, and has each of them do as was decided.

    front_ends: names of those that the file has.  recovery: of this start; the first states are given out
    when it is over.
    """

    def __init__(
        self,
        decisions: Decisions,
        state_log: ClusterStateLog,
        recovery: Recovery,
        front_ends: Collection[str],
    ) -> None:
        self._decisions = decisions
        self._state_log = state_log
        self._recovery = recovery
        self._awaited = set(front_ends)
        self._sessions: list[Session] = []
        self._taken = asyncio.Condition()
        self._ready = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._methods = decisions.methods()

    async def run(self) -> None:
        """Recover, then decide and give out, until cancelled."""
        tasks = [asyncio.create_task(self._show())]
        try:
            await self._recover()
            work = (self._place(), self._provision(), self._keep_pool())
            tasks += [asyncio.create_task(task) for task in work]
            while True:
                await self._learn_ranks()
                self._give_out()
                await asyncio.sleep(POLL_S)
        finally:
            for task in (*tasks, *self._tasks):
                task.cancel()
            for session in self._sessions:
                session.peer.end("the controller was stopped")

    async def _recover(self) -> None:
        """Hear what front ends and instances know; none comes into routing before."""
        waited_s = 0.0
        while waited_s < RECOVERY_S or (self._awaited and waited_s < LONGEST_RECOVERY_S):
            await asyncio.sleep(POLL_S)
            waited_s += POLL_S
        self._recovery.end()
        self._ready.set()
        self._give_out()
        state = self._state_log.state
        logger.info(
            "the controller begins: state %d, table %d, %d front ends",
            state.number,
            0 if self._decisions.placement is None else self._decisions.placement.version,
            len(self._sessions),
        )

    async def _place(self) -> None:
        placement = self._decisions.placement
        if placement is None:
            return
        while not await self._decisions.fleet.is_alive():
            await asyncio.sleep(POLL_S)
        # A table to go on with stays until a whole time step was seen.
        await asyncio.sleep(placement.interval_s if placement.version else SETTLE_S)
        await placement.run()

    async def _provision(self) -> None:
        if self._decisions.provision is not None:
            await self._decisions.provision.run()

    async def _keep_pool(self) -> None:
        if self._decisions.fleet.pool is not None:
            await self._decisions.fleet.pool.run()

    async def _show(self) -> None:
        """Tell front ends what their metrics are to say of the controller."""
        placement, provision = self._decisions.placement, self._decisions.provision
        while True:
            figures = Figures(
                num_copies=0 if placement is None else placement.num_copies,
                num_problems=0 if placement is None else placement.num_problems,
                quality=None if placement is None else placement.latest,
                outlook=None if provision is None else provision.latest,
            )
            for session in self._sessions:
                session.peer.send(figures)
            await asyncio.sleep(SHOW_S)

    async def _learn_ranks(self) -> None:
        """As soon as an instance is there; of later ones the loading tells."""
        try:
            if await self._decisions.fleet.is_alive():
                await self._decisions.fleet.model_info()
        except Exception as error:  # whatever an instance answers, the controller goes on without
            logger.debug("no instance says which ranks adapters have: %r", error)

    def _give_out(self) -> None:
        """Send the state to all if it is another than before."""
        if self._ready.is_set() and self._state_log.write():
            for session in self._sessions:
                session.peer.send(self._state_log.state)

    def joined(self, session: Session, hello: FrontEndHello) -> None:
        logger.info("front end %s dialled in", session.name)
        self._sessions.append(session)
        self._awaited.discard(session.name)
        if not self._ready.is_set():
            if hello.state is not None:
                self._state_log.recover(hello.state)
            return
        before, now = hello.state, self._state_log.state
        if before is not None and before.number >= now.number and before != now:
            logger.warning(
                "front end %s had state %d of an earlier controller, which is given up: it came too late",
                session.name,
                before.number,
            )
            self._state_log.count_above(before)
            # Those that had the state by its lower number would count as late until the next one.
            for other in self._sessions:
                other.peer.send(self._state_log.state)
        else:
            session.peer.send(self._state_log.state)

    def left(self, session: Session) -> None:
        self._sessions.remove(session)
        for visit in session.visits.values():
            visit.end(None)
        self._spawn(self._notify())

    def received(self, session: Session, message: Message | Asked) -> None:
        if isinstance(message, Asked):
            self._spawn(self._answer(message))
        elif isinstance(message, Taken):
            session.taken = message.number
            self._spawn(self._notify())
        elif isinstance(message, FrontEndReport):
            for adapter, num_tokens in message.tokens.items():
                self._decisions.meter.add(adapter, num_tokens)
            if self._decisions.provision is not None:
                for event in message.visits:
                    session.see(self._decisions.provision.window, event)

    async def _answer(self, call: Asked) -> None:
        """Carry out a call; answer it when all front ends have what it changed."""
        await self._ready.wait()
        try:
            method = self._methods.get(call.method)
            if method is None:
                raise ConfigError(f"this controller has no {call.method}: its file is not the front end's")
            value = await method(*call.args)
            self._give_out()
            await self._all_taken(self._state_log.state.number)
            call.answer(value)
        except Exception as error:
            if not isinstance(error, MoeLoraError | OSError | ValueError | KeyError):
                logger.exception("%s failed", call.method)
            call.fail(error)

    async def _all_taken(self, number: int) -> None:
        def taken() -> bool:
            return all(session.taken >= number for session in self._sessions)

        async with self._taken:
            try:
                await asyncio.wait_for(self._taken.wait_for(taken), TAKEN_S)
            except asyncio.TimeoutError:
                late = [session.name for session in self._sessions if session.taken < number]
                logger.warning("front ends %s do not take state %d; going on", ", ".join(late), number)

    async def _notify(self) -> None:
        async with self._taken:
            self._taken.notify_all()

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


# Running the controller until a signal ends it.


async def run_controller(cluster_controller: ClusterController, address: Address, keys: Keys | None) -> None:
    """Direct the front ends that dial in until SIGINT or SIGTERM.  Raises ConfigError if the address can't be
    had.
    """
    loop = asyncio.get_running_loop()
    async with front_end_listener("controller.address", address, keys, cluster_controller) as place:
        task = asyncio.create_task(cluster_controller.run())
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        logger.info("the controller listens at %s", place)
        with contextlib.suppress(asyncio.CancelledError):
            await task
