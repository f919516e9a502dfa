# SPDX-License-Identifier: Apache-2.0
"""The keeper changes the layout of a host's LoRA Server: ranks and instances on paper."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
from anyio import CancelScope

from moe_lora.config import EngineConfig, FrontEndConfig, LoraServerConfig
from moe_lora.config.cluster import ClusterConfig, read_cluster
from moe_lora.config.devices import LORA_SERVER
from moe_lora.config.optional_parts import ScalingConfig
from moe_lora.core.errors import CapacityError, ConfigError, EngineDeadError, LoraServerError, MoeLoraError
from moe_lora.dist.cluster.controller.keeper_link import KeeperLink
from moe_lora.dist.cluster.instances import InstanceRegistry
from moe_lora.dist.launch import cluster_file as host_settings
from moe_lora.dist.launch import local_layout
from moe_lora.dist.launch.cluster_file import cluster_file, on_sockets, write_cluster
from moe_lora.dist.launch.host_roles import Role, server_roles
from moe_lora.dist.launch.local import Generation, OwnServer, local_lora_server
from moe_lora.dist.launch.local_layout import ControlledInstances, LayoutChange, LayoutKeeper
from tests.patience import PATIENCE_S
from tests.serve.demo_server import DEMO

from .test_devices import Kept, kept


@pytest.fixture(autouse=True)
def _quick_looks(monkeypatch):
    monkeypatch.setattr(local_layout, "_LOOK_S", 0.001)


@dataclass
class Ranks:
    """Of two generations, as `HostRoles`.  error: of a start; None: ready at once; hangs: never ready."""

    kept: list[str]
    events: list[str]
    error: Exception | None = None
    hangs: bool = False
    starts: list[asyncio.Future[None]] = field(default_factory=list)

    def add(self, role: Role) -> asyncio.Future[None]:
        self.kept.append(role.name)
        ready = asyncio.get_running_loop().create_future()
        self.starts.append(ready)
        if self.error is not None:
            ready.set_exception(self.error)
        elif not self.hangs:
            ready.set_result(None)
        return ready

    async def remove(self, name: str) -> None:
        self.kept.remove(name)
        self.events.append(f"ended {name}")


class Endless(list):
    """Of one error."""

    def __init__(self, error: Exception) -> None:
        super().__init__([error])

    def pop(self, index: int = -1) -> Exception:
        return self[index]


class Engine:
    """Of an instance.  A call may raise `errors` first."""

    def __init__(self, host: Host, name: str) -> None:
        self.host, self.name, self.errors = host, name, []
        self.on_error = lambda: None

    async def call(self, verb: str, address: str, layout: str, limit_s: float) -> None:
        if self.errors:
            self.on_error()
            raise self.errors.pop()
        assert verb == "join_lora_server"
        assert self.host.file_layout == layout, "a process that starts meanwhile would read the former one"
        self.host.events.append(f"moved {self.name}")
        self.host.on_move(self.name)


class Host:
    """A host with two instances and a LoRA Server of EP2-PP1."""

    def __init__(self, stack: ExitStack, **settings) -> None:
        num_ranks = settings.pop("expert_parallel", 1)
        server = LoraServerConfig(
            address="/f/lora-server", store_dir="/f/store", **{"layout": "EP2-PP1", **settings}
        )
        engine = EngineConfig(model_dir=str(DEMO / "model"), num_instances=2, expert_parallel=num_ranks)
        scaling = ScalingConfig(max_instances=3)
        self.cluster = ClusterConfig(
            engine=engine, served_model_name="m", lora_server=server, scaling=scaling
        )
        self.events: list[str] = []
        self.file = stack.enter_context(cluster_file(replace(self.cluster, scaling=None)))
        self.own = OwnServer()
        roles = server_roles(2, self.file)
        self.ranks = self.own.ranks = Ranks([role.name for role in roles], self.events)
        self.own.now = Generation(self.cluster, roles, ExitStack())
        self.registry = InstanceRegistry(())
        self.running = {"instance-0": 10, "instance-1": 11}
        self.engines = {name: Engine(self, name) for name in self.running}
        for name, one in self.engines.items():
            self.enter(name, one)
        self.killed: list[str] = []
        self.on_move = lambda name: None
        self.apart: tuple[str, ...] = ()

    @property
    def file_layout(self) -> str:
        return read_cluster(f"/dev/fd/{self.file}").lora_server.layout

    def enter(self, name: str, engine: Engine) -> None:
        self.registry.enter(name, engine).live = True

    def kill(self, name: str) -> None:
        """The next process serves at once."""
        self.killed.append(name)
        self.events.append(f"killed {name}")
        self.running[name] += 100

    def change(self, layout: str, limit_s: float = PATIENCE_S) -> str:
        async def run() -> str:
            instances = ControlledInstances(self, self.registry, self.apart)
            made = LayoutChange(self.own, self.file, instances)
            return await made.to(layout, 7, limit_s)

        return asyncio.run(run())

    def check_unchanged(self) -> None:
        assert self.ranks.kept == ["lora-server-0", "lora-server-1"]
        assert self.own.now.cluster == self.cluster
        assert self.file_layout == "EP2-PP1"
        assert not [one for one in self.events if one.startswith("moved")]


@pytest.fixture
def stack():
    with ExitStack() as found:
        yield found


def test_ranks_start_beside_the_former_ones_which_end_after_the_last_instance_has_moved(stack):
    host = Host(stack)
    address = host.change("EP4")
    assert host.events == [
        "moved instance-0",
        "moved instance-1",
        "ended lora-server-0",
        "ended lora-server-1",
    ]
    assert host.ranks.kept == [f"EP4-PP1 lora-server-{rank}" for rank in range(4)]
    server = read_cluster(f"/dev/fd/{host.file}").lora_server
    assert (server.address, server.layout, server.capacity) == (address, "EP4-PP1", 7)
    [file] = {role.fds for role in host.own.now.roles}
    assert read_cluster(f"/dev/fd/{file[0]}").lora_server == server
    assert host.change("EP4-PP1") == address, "nothing to change"
    host.change("EP2-PP1")
    assert host.ranks.kept == [f"EP2-PP1 lora-server-{rank}" for rank in range(2)]


def test_instances_of_several_ranks_move(stack):
    host = Host(stack, expert_parallel=2)
    host.change("EP4")
    assert [one for one in host.events if one.startswith("moved")] == ["moved instance-0", "moved instance-1"]
    assert not host.killed


def test_instances_for_prompts_stay_as_they_are(stack):
    """They have no LoRA Server, and a change that is given up ends none of them."""
    host = Host(stack)
    host.apart = ("instance-0",)
    host.engines["instance-1"].errors = [CapacityError("too large")]
    with pytest.raises(CapacityError, match="too large"):
        host.change("EP4")
    host.check_unchanged()
    host.change("EP4")
    assert [one for one in host.events if one.startswith("moved")] == ["moved instance-1"]
    assert not host.killed


def test_processes_from_before_the_file_are_moved_and_later_ones_are_there(stack):
    """A start may have read the former file; a call to a dead process fails."""
    host = Host(stack)
    host.running["instance-2"] = 12

    def on_move(name: str) -> None:
        if name == "instance-1":
            host.running["instance-3"] = 13
            engine = host.engines["instance-2"] = Engine(host, "instance-2")
            engine.errors = [EngineDeadError("gone"), LoraServerError("away"), OSError("no memory")]
            host.enter("instance-2", engine)

    host.on_move = on_move
    host.engines["instance-0"].errors = [EngineDeadError("gone")] * 3
    host.engines["instance-0"].on_error = lambda: host.running.update({"instance-0": 20})
    host.change("EP4-PP1")
    moves = [one for one in host.events if one.startswith("moved")]
    assert moves == ["moved instance-1", "moved instance-2"]
    assert not host.killed


@pytest.fixture
def limits(monkeypatch) -> list[CancelScope]:
    """Of the moves; a test cancels them."""
    found: list[CancelScope] = []

    def limit(deadline: float) -> CancelScope:
        found.append(CancelScope())
        return found[-1]

    monkeypatch.setattr(local_layout, "CancelScope", limit)
    return found


def test_instances_that_can_not_move_start_again_in_turn_and_then_the_former_ranks_end(
    stack, monkeypatch, limits
):
    """One that hangs stops no other's move."""
    host = Host(stack)
    for name in ("instance-2", "instance-3"):
        host.running[name] = 12
        host.engines[name] = Engine(host, name)
        host.enter(name, host.engines[name])

    async def hangs(*args: str) -> None:
        await asyncio.Event().wait()

    def fails() -> None:
        if "moved instance-3" in host.events:
            limits[0].cancel()

    monkeypatch.setattr(host.engines["instance-0"], "call", hangs)
    host.engines["instance-2"].errors = Endless(RuntimeError("no memory"))
    host.engines["instance-2"].on_error = fails
    host.change("EP4-PP1")
    assert host.events == [
        "moved instance-1",
        "moved instance-3",
        "killed instance-0",
        "killed instance-2",
        "ended lora-server-0",
        "ended lora-server-1",
    ]
    assert len(host.ranks.kept) == 4


@pytest.mark.parametrize("error", [LoraServerError("away"), OSError("no memory"), CapacityError("too large")])
def test_if_no_instance_moves_the_next_ranks_end_and_all_is_as_before(stack, error, limits):
    """A process that started by the next file starts again by the former one."""
    host = Host(stack)

    def fails() -> None:
        host.running.setdefault("instance-2", 12)
        if not isinstance(error, CapacityError):
            limits[0].cancel()

    for engine in host.engines.values():
        engine.errors, engine.on_error = Endless(error), fails
    refused = isinstance(error, CapacityError)
    with pytest.raises(MoeLoraError, match="too large" if refused else "no instance moved to EP4-PP1"):
        host.change("EP4-PP1")
    host.check_unchanged()
    assert host.killed == ["instance-2"]
    del host.running["instance-2"]
    for engine in host.engines.values():
        engine.errors = []
    host.change("EP4-PP1")


@pytest.mark.parametrize("answers", [True, False])
def test_a_change_that_is_given_up_returns_instances_whose_move_had_no_answer(
    stack, monkeypatch, limits, answers
):
    """An instance without a second answer starts again; an instance that refused is let alone."""
    host, calls = Host(stack), []

    async def silent(verb: str, address: str, layout: str, limit_s: float) -> None:
        calls.append((layout, host.file_layout, len(host.ranks.kept)))
        if layout == "EP4-PP1" or not answers:
            limits[-1].cancel()
            await asyncio.Event().wait()

    monkeypatch.setattr(host.engines["instance-1"], "call", silent)
    host.engines["instance-0"].errors = Endless(LoraServerError("away"))
    with pytest.raises(LoraServerError, match="no instance moved to EP4-PP1"):
        host.change("EP4-PP1")
    host.check_unchanged()
    assert calls == [("EP4-PP1", "EP4-PP1", 6), ("EP2-PP1", "EP2-PP1", 6)]
    assert host.killed == ([] if answers else ["instance-1"])


def test_an_unwritable_file_ends_the_next_ranks(stack, monkeypatch):
    host = Host(stack)

    def fails(file: int, cluster: ClusterConfig) -> None:
        raise OSError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(local_layout, "write_cluster", fails)
        with pytest.raises(OSError, match="no room"):
            host.change("EP4-PP1")
    host.check_unchanged()
    host.change("EP4-PP1")


@pytest.mark.parametrize(
    ("layout", "settings", "why"),
    [
        ("EP3-PP1", {}, "3 does not divide num_experts"),
        ("PP99", {}, "99 stages are more than num_layers"),
        ("four", {}, "is no layout"),
        ("EP4-PP1", {"device_puts": "ibgda"}, "device_puts joins devices that start together"),
    ],
)
def test_an_impossible_layout_changes_nothing(stack, layout, settings, why):
    host = Host(stack, **settings)
    with pytest.raises(ConfigError, match=why):
        host.change(layout)
    host.check_unchanged()


def test_devices_are_those_beside_the_instances_or_too_few(stack, monkeypatch):
    host = Host(stack)
    monkeypatch.setattr(host_settings, "count_devices", lambda: 6)
    own = {**{f"instance-{number}": (number,) for number in range(3)}, LORA_SERVER: (3, 4)}
    host.own.now.cluster = host.cluster = replace(host.cluster, devices=own)
    with pytest.raises(ConfigError, match="4 LoRA Server ranks = 4 devices"):
        host.change("EP4-PP1")
    host.check_unchanged()
    host.change("EP1-PP2")
    assert read_cluster(f"/dev/fd/{host.file}").devices[LORA_SERVER] == (3, 4)
    host.change("PP3")
    assert read_cluster(f"/dev/fd/{host.file}").devices[LORA_SERVER] == (3, 4, 5)


def test_ranks_that_do_not_start_end_and_the_former_ones_stay(stack):
    host = Host(stack)
    host.ranks.error = ConfigError("no memory")
    with pytest.raises(ConfigError, match="no memory"):
        host.change("EP4-PP1")
    host.check_unchanged()
    host.ranks.error, host.ranks.hangs = None, True
    with pytest.raises(LoraServerError, match=r"EP4-PP1 did not start within limit_s=0\.01"):
        host.change("EP4-PP1", limit_s=0.01)
    host.check_unchanged()
    host.ranks.hangs = False
    host.change("EP4-PP1")


def test_the_next_ranks_have_the_log_level_of_the_former_ones(stack):
    host = Host(stack)
    write_cluster(host.file, replace(host.cluster, scaling=None, front_end=FrontEndConfig(log_level="debug")))
    host.change("EP4-PP1")
    [file] = {role.fds for role in host.own.now.roles}
    assert read_cluster(f"/dev/fd/{file[0]}").front_end.log_level == "debug"


def test_ranks_beside_scaling_instances_read_their_file(stack, monkeypatch):
    kept(monkeypatch, local_lora_server(Host(stack).cluster))
    assert Kept.cluster.lora_server.layout == "EP2-PP1"


class Controller:
    """A separate controller of the host's instances.  address: of the server whose state it reads."""

    def __init__(self, host: Host) -> None:
        self.host, self.provision, self.address = host, self, None
        cluster = read_cluster(f"/dev/fd/{host.file}")
        controlled = SimpleNamespace(controller=self, instance_registry=host.registry)
        self.relayout = None
        self.running = asyncio.create_task(KeeperLink(cluster, controlled).run())

    def use_lora_server(self, address: str, is_changing: bool) -> None:
        self.address, self.is_changing = address, is_changing

    async def connected(self) -> None:
        while self.address is None:
            await asyncio.sleep(0.001)

    async def started_change(self) -> asyncio.Future[str]:
        """A change to EP4-PP1, once all its ranks start."""
        asking = asyncio.ensure_future(self.relayout("EP4-PP1", 7, PATIENCE_S))
        while len(self.host.ranks.kept) < 6:
            await asyncio.sleep(0.001)
        return asking

    async def end(self) -> None:
        self.running.cancel()
        await asyncio.wait([self.running])


@contextlib.asynccontextmanager
async def kept_by(host: Host, folder) -> AsyncIterator[None]:
    """Its keeper has several front ends."""
    cluster = on_sockets(replace(host.cluster, scaling=None), 2, str(folder))
    write_cluster(
        host.file, replace(cluster, front_end=replace(cluster.front_end, prefill_instances=host.apart))
    )
    host.running["controller"] = 1
    host.started = {"controller", *host.engines}
    keeper = LayoutKeeper(host.own, host.file)
    keeper.roles = host
    async with keeper.open():
        yield


@pytest.mark.parametrize("apart", [(), ("instance-0",)], ids=["all at the server", "one for prompts"])
def test_a_separate_controller_has_the_keeper_change_the_layout(stack, tmp_path, apart):
    host = Host(stack)
    host.apart = apart

    async def play() -> None:
        async with kept_by(host, tmp_path):
            controller = Controller(host)
            await controller.connected()
            assert controller.address == "/f/lora-server"
            with pytest.raises(ConfigError, match="3 does not divide num_experts"):
                await controller.relayout("EP3-PP1", 7, PATIENCE_S)
            host.check_unchanged()
            address = await controller.relayout("EP4-PP1", 7, PATIENCE_S)
            assert host.file_layout == "EP4-PP1"
            assert controller.address == address
            await controller.end()

    asyncio.run(play())
    moved = [f"moved {name}" for name in ("instance-0", "instance-1") if name not in apart]
    assert [one for one in host.events if one.startswith("moved")] == moved
    assert len(host.ranks.kept) == 4
    assert not host.killed


def test_a_change_outlives_its_controller(stack, tmp_path):
    """The next controller moves the other instance, and reads the state of the next server."""
    host = Host(stack)
    ending: list[asyncio.Task[None]] = []

    async def play() -> None:
        async with kept_by(host, tmp_path):
            first = Controller(host)
            await first.connected()
            host.engines["instance-1"].errors = Endless(EngineDeadError("not yet"))

            def on_move(name: str) -> None:
                if name == "instance-0":
                    ending.append(asyncio.create_task(first.end()))

            host.on_move = on_move
            with pytest.raises(ConnectionError):
                await first.relayout("EP4-PP1", 7, PATIENCE_S)
            await asyncio.wait(ending)
            second = Controller(host)
            await second.connected()
            assert (second.address, second.is_changing) == ("/f/lora-server", True)
            host.engines["instance-1"].errors = []
            while second.address == "/f/lora-server":
                await asyncio.sleep(0.001)
            assert second.address == host.own.now.cluster.lora_server.address
            assert not second.is_changing
            await second.end()

    asyncio.run(play())
    assert "moved instance-1" in host.events
    assert host.ranks.kept == [f"EP4-PP1 lora-server-{rank}" for rank in range(4)]
    assert host.file_layout == "EP4-PP1"
    assert not host.killed


def test_the_next_controller_hears_that_a_change_is_given_up(stack, tmp_path):
    host = Host(stack)
    host.ranks.hangs = True

    async def play() -> None:
        async with kept_by(host, tmp_path):
            first = Controller(host)
            await first.connected()
            assert not first.is_changing
            asking = await first.started_change()
            await first.end()
            with pytest.raises(ConnectionError):
                await asking
            second = Controller(host)
            await second.connected()
            assert second.is_changing
            host.ranks.starts[-1].set_exception(ConfigError("no memory"))
            while second.is_changing:
                await asyncio.sleep(0.001)
            assert second.address == "/f/lora-server"
            await second.end()

    asyncio.run(play())
    host.check_unchanged()


def test_an_end_of_the_keeper_ends_a_change(stack, tmp_path):
    host = Host(stack)
    host.ranks.hangs = True

    async def play() -> None:
        async with kept_by(host, tmp_path):
            controller = Controller(host)
            await controller.connected()
            asking = await controller.started_change()
        with pytest.raises(ConnectionError):
            await asking
        await controller.end()

    asyncio.run(play())
    host.check_unchanged()
