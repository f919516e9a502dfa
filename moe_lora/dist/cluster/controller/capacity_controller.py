# SPDX-License-Identifier: Apache-2.0
"""Compares adapter slots with the load, and resizes the LoRA Server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

from anyio import current_time, fail_after

from moe_lora.config import ProvisionConfig
from moe_lora.config.cluster import ClusterConfig
from moe_lora.config.devices import LORA_SERVER
from moe_lora.core.clock import Clock, WallClock
from moe_lora.core.errors import CapacityError, ConfigError, EngineDeadError, LastProblem, LoraServerError
from moe_lora.core.partition import Layout
from moe_lora.core.records import Outlook, ServerState
from moe_lora.core.request import FleetStats
from moe_lora.dist.lora_server.control import LoraServerAdmin
from moe_lora.dist.net.codec import verb
from moe_lora.dist.net.keys import keys_in
from moe_lora.engine.client.client import EngineClient
from moe_lora.provision.online import DemandWindow, outlook, resized

logger = logging.getLogger(__name__)

LOOK_S = 0.2


class CapacityController:
    """Evaluates the provisioning model on a window's requests, every `interval_s` of `run`.

    Belongs to one event loop.  server None: instances hold adapters, max_loras each.  latest: None before the
    first evaluation, or after a failure.
    """

    def __init__(
        self,
        config: ProvisionConfig,
        client: EngineClient,
        server: LoraServerAdmin | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.config = config
        self.window = DemandWindow(clock or WallClock(), config.window_s)
        self.latest: Outlook | None = None
        self._client = client
        self._server = server
        self._suffices = True
        self._problem = LastProblem()
        self._changing = asyncio.Lock()
        """Held by a restart, a resize, and a change of the layout."""
        self._is_changing = False
        """The keeper changes the layout for a former controller."""
        self.num_known: Callable[[], int] = lambda: 0
        """Entries of the registry: a scale-down removes entries, a crash does not."""
        self.relayout: Callable[[str, int, float], Awaitable[str]] | None = None
        """Starts a server of this layout, capacity and limit_s; returns the address.  None: fixed."""

    async def run(self) -> None:
        """Evaluate until cancelled."""
        while True:
            await asyncio.sleep(self.config.interval_s)
            try:
                await self.evaluate()
            except Exception as error:  # requests continue, and the next evaluation may succeed
                self.latest = None
                if self._problem.is_new(repr(error)):
                    logger.exception("the load on adapters can't be evaluated")

    async def evaluate(self) -> None:
        """Evaluate the window; with `auto_resize`, resize."""
        demand = self.window.demand()
        try:
            state = await self.server_state()
            capacity, num_pools = (state.capacity, 1) if state is not None else await self._places()
        except (EngineDeadError, LoraServerError) as error:
            self.latest = None
            if self._problem.is_new(str(error)):
                logger.warning("the capacity for adapters is not known: %s", error)
            return
        self._problem.over()
        self.latest = await asyncio.to_thread(outlook, demand, capacity, self.config.target_iar, num_pools)
        self._tell(self.latest)
        if self.config.auto_resize and state is not None:
            await self._follow(self.latest, state)

    @verb
    async def server_state(self) -> ServerState | None:
        """The LoRA Server's state, if any.  Raises LoraServerError."""
        return None if self._server is None else await asyncio.to_thread(self._server.state)

    @verb
    async def resize(self, capacity: int) -> ServerState:
        """See `LoraServerAdmin.resize`."""
        async with self._change():  # a next server starts with the capacity before
            state = await asyncio.to_thread(self._admin.resize, capacity)
        logger.info("the LoRA Server's capacity is now %d adapters", state.capacity)
        return state

    @verb
    async def restart_server(self, limit_s: float) -> ServerState:
        """Restart the LoRA Server's ranks in turn, the leader last; returns the state then.

        Instances compute an absent rank's part, so each restart waits for the rank before.  Raises
        LoraServerError if a rank, link or instance is missing after limit_s.
        """
        async with self._change():  # a second restart would end the leader while a rank loads
            before = state = await self._until_whole(limit_s)
            expected = self._expected(before)
            for server_rank in (*range(1, len(before.ranks)), 0):
                if state.incarnation != before.incarnation:
                    break  # a launcher such as torchrun restarts all ranks
                logger.info("rank %d of the LoRA Server is told to end, to be started again", server_rank)
                await asyncio.to_thread(self._admin.restart, server_rank)
                state = await self._until_back(state, server_rank, limit_s, expected)
            return state

    @verb
    async def change_layout(self, layout: str, limit_s: float) -> ServerState:
        """Replace the LoRA Server by one of this layout and the same capacity; returns the state then.

        Raises ConfigError for an impossible or fixed layout, CapacityError for an adapter that the next
        server refuses, the error of a failed start, LoraServerError if no instance moved; then the former
        server serves on.  LoraServerError too if a link of the next server is missing after limit_s.
        """
        if self.relayout is None:
            raise ConfigError(
                "the LoRA Server's layout is fixed: only moe-lora serve with --lora-server changes the "
                f"layout while it serves; else set lora_server.layout={layout}, start the ranks "
                f"again on their host (torchrun --nproc-per-node {Layout.parse(layout).num_ranks} -m "
                "moe_lora.dist.launch.run_role --config FILE --role lora-server), then the instances"
            )
        async with self._change():
            end_s = current_time() + limit_s
            before = await asyncio.to_thread(self._admin.state)
            expected = self._expected(before)
            address = await self.relayout(layout, before.capacity, limit_s)
            self.use_lora_server(address)
            rest_s = max(LOOK_S, end_s - current_time())
            return await self._until_whole(rest_s, f"the LoRA Server is {layout}, but", expected)

    def use_lora_server(self, address: str, is_changing: bool = False) -> None:
        """Read state from the server at this socket.  is_changing: refuse changes until the next call."""
        self._server, self._is_changing = LoraServerAdmin(address, None), is_changing

    @asynccontextmanager
    async def _change(self) -> AsyncIterator[None]:
        async with self._changing:
            if self._is_changing:
                raise LoraServerError("the LoRA Server's layout is changing; send the request again later")
            yield

    async def _until_whole(
        self,
        limit_s: float,
        what: str = "no rank of the LoRA Server was ended:",
        expected: Callable[[], int] = lambda: 0,
    ) -> ServerState:
        problem = (
            f"{what} after limit_s={limit_s:g} not all of them are there with "
            "their links to the instances (GET /v1/lora_server: ranks, unlinked); their logs say why"
        )
        return await self._until(lambda one: one.is_whole, limit_s, problem, expected)

    async def _until_back(
        self, before: ServerState, server_rank: int, limit_s: float, expected: Callable[[], int]
    ) -> ServerState:
        problem = (
            f"rank {server_rank} of the LoRA Server was ended and is not back, with the instances, after "
            f"limit_s={limit_s:g}; its log says why, and instances compute its part meanwhile"
        )
        is_back = partial(_is_back, before, server_rank)
        return await self._until(is_back, limit_s, problem, expected)

    def _expected(self, before: ServerState) -> Callable[[], int]:
        """Number of instances to wait for: those of `before`, except removed ones."""
        num_unknown = max(0, before.num_instances - self.num_known())
        return lambda: min(before.num_instances, self.num_known() + num_unknown)

    async def _until(
        self,
        condition: Callable[[ServerState], bool],
        limit_s: float,
        problem: str,
        expected: Callable[[], int],
    ) -> ServerState:
        """The first state that fulfils the condition, with the expected number of instances.

        Raises LoraServerError(problem) after limit_s.
        """
        try:
            with fail_after(limit_s):
                while True:
                    with suppress(LoraServerError):
                        state = await asyncio.to_thread(self._admin.state)
                        if condition(state) and state.num_instances >= expected():
                            return state
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            raise LoraServerError(problem) from None

    @property
    def _admin(self) -> LoraServerAdmin:
        assert self._server is not None
        return self._server

    async def _places(self) -> tuple[int, int]:
        info, stats = await asyncio.gather(self._client.model_info(), self._client.stats())
        live = sum(one.live for one in stats.instances) if isinstance(stats, FleetStats) else 1
        return info.max_loras, max(1, live)

    def _tell(self, found: Outlook) -> None:
        if found.suffices == self._suffices:
            return
        self._suffices = found.suffices
        logger.log(
            logging.INFO if found.suffices else logging.WARNING,
            "room for %d adapters %s: %.1f %% of requests are predicted to start at once (target %.1f %%); "
            "%d needed, %.1f adapters active, %.1f requests in service",
            found.capacity,
            "is enough again" if found.suffices else "is too little",
            100 * found.predicted_iar,
            100 * found.target_iar,
            found.needed_capacity,
            found.expected_active,
            found.global_batch,
        )

    async def _follow(self, found: Outlook, state: ServerState) -> None:
        limit = state.capacity if state.max_capacity is None else max(state.max_capacity, state.capacity)
        wanted = resized(found, min_capacity=min(self.config.min_capacity, limit), max_capacity=limit)
        if wanted == state.capacity:
            return
        try:
            await self.resize(wanted)
        except (CapacityError, LoraServerError) as error:
            logger.warning("the LoRA Server's capacity stays %d: %s", state.capacity, error)


def _is_back(before: ServerState, server_rank: int, state: ServerState) -> bool:
    is_new = state.incarnation != before.incarnation or state.ranks[server_rank] > before.ranks[server_rank]
    return is_new and all(state.ranks) and not state.unlinked[server_rank]


def make_capacity_controller(cluster: ClusterConfig, client: EngineClient) -> CapacityController:
    assert cluster.provisioning is not None
    server = cluster.instance(LORA_SERVER).lora_server
    admin = None if server is None else LoraServerAdmin(server.address, keys_in(server.certificates))
    return CapacityController(cluster.provisioning, client, admin)
