"""Engine processes that end are started again, each by itself."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from moe_lora.core.clock import Clock
from moe_lora.core.errors import EngineDeadError

from .attendance import Attendance
from .catch_up import catch_up, held_by
from .process import ProcessClient
from .roster import Instance, Roster

logger = logging.getLogger(__name__)

Launch = Callable[[int, int, tuple[tuple[str, str], ...]], ProcessClient]
"""(instance, how often it was started before, adapters to begin with) -> a process that is starting."""


@dataclass(frozen=True, kw_only=True)
class RestartPolicy:
    """An instance that ends within `quick_s` of its start died quickly; one of several such deaths in a row
    is the engine's own fault, and restarting it in a loop would take the cores from those that work."""

    quick_s: float = 60.0
    max_quick_deaths: int = 5
    first_pause_s: float = 1.0
    longest_pause_s: float = 30.0

    def pause_s(self, num_deaths: int) -> float | None:
        """Seconds to wait after so many quick deaths in a row, 0 after the first; None: give up."""
        if num_deaths >= self.max_quick_deaths:
            return None
        if num_deaths <= 1:
            return 0.0
        return min(self.longest_pause_s, self.first_pause_s * 2 ** (num_deaths - 2))


class Supervisor:
    """One thread for each instance waits for its process to end, and starts it again.

    A process that comes back loads what has been loaded since the start before it gets requests.  Its
    threads end when the roster is closed.  clients: those of the roster's instances.  start_adapters: names
    of the adapters that processes begin with.
    """

    def __init__(
        self,
        roster: Roster,
        clients: Sequence[ProcessClient],
        launch: Launch,
        start_adapters: Sequence[str],
        clock: Clock,
        policy: RestartPolicy | None = None,
    ) -> None:
        self._roster = roster
        self._launch = launch
        self._start_adapters = start_adapters
        self._clock = clock
        self._policy = policy or RestartPolicy()
        for instance, client in zip(roster.instances, clients, strict=True):
            instance.incarnation = str(client.pid)
            threading.Thread(
                target=self._watch,
                args=(instance, client),
                name=f"supervisor-{instance.index}",
                daemon=True,
            ).start()

    def _watch(self, instance: Instance, client: ProcessClient | None) -> None:
        num_deaths = 0
        while client is not None:
            started_s = self._clock.now_s()
            come = partial(self._bring, instance, client)
            Attendance(self._roster, instance, client, come, client.kill).run()
            if self._roster.closed.is_set():
                return
            client.shut_down()
            lived_s = self._clock.now_s() - started_s
            num_deaths = num_deaths + 1 if lived_s < self._policy.quick_s else 1
            logger.warning(
                "instance %d (process %d) ended with exit code %s after %.1f s; its requests go on elsewhere",
                instance.index,
                client.pid,
                client.exit_code,
                lived_s,
            )
            client, num_deaths = self._replace(instance, num_deaths)

    def _replace(self, instance: Instance, num_deaths: int) -> tuple[ProcessClient | None, int]:
        """A new process, and the deaths counted up to it; None: given up, or closed."""
        while (pause_s := self._policy.pause_s(num_deaths)) is not None:
            if self._roster.closed.wait(pause_s):
                return None, num_deaths
            try:
                return self._start(instance), num_deaths
            except Exception as error:
                if self._roster.closed.is_set():
                    return None, num_deaths
                num_deaths += 1
                logger.error("instance %d could not be started again: %s", instance.index, error)
        instance.given_up = True
        logger.error(
            "instance %d ended %d times within %g s of its start and is not started again; "
            "find the cause above, then restart the server",
            instance.index,
            num_deaths,
            self._policy.quick_s,
        )
        return None, num_deaths

    def _start(self, instance: Instance) -> ProcessClient:
        served = self._roster.adapters
        adapters = tuple((name, served[name].path) for name in self._start_adapters if name in served)
        client = self._launch(instance.index, instance.num_restarts + 1, adapters)
        try:
            if not self._roster.start(instance, client):
                raise EngineDeadError("the instances were closed")
            client.await_start()
        except BaseException:
            client.shut_down()
            raise
        return client

    def _bring(self, instance: Instance, client: ProcessClient) -> None:
        """Put a process into routing, once it has what the others serve."""
        missing, pool = set[str](), self._roster.pool
        found = held_by(client, pool)
        while not self._roster.join(instance, client, found, missing, str(client.pid)):
            catch_up(client, self._roster.adapters, found, missing, pool)
        logger.info("instance %d is back (process %d)", instance.index, client.pid)
