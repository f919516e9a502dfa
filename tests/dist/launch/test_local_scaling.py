# SPDX-License-Identifier: Apache-2.0
"""The number of a host's instances changes while they serve."""

from __future__ import annotations

import asyncio
import os
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest

from moe_lora.config import EngineConfig, FrontEndConfig
from moe_lora.config.cluster import ClusterConfig
from moe_lora.config.optional_parts import PoolConfig, ScalingConfig
from moe_lora.core.errors import ConfigError, EngineDeadError
from moe_lora.core.request import FleetStats, GenerateRequest, InstanceStats, SamplingParams
from moe_lora.dist.cluster.controller import instance_control
from moe_lora.dist.cluster.controller.cluster_state import Figures
from moe_lora.dist.cluster.instances import InstanceRegistry
from moe_lora.dist.launch import cluster_file, host_roles, local_scaling
from moe_lora.dist.launch.host_roles import Role
from moe_lora.dist.launch.local import local_instances
from moe_lora.dist.launch.local_scaling import LocalScaling, by_load, check_scaling
from moe_lora.dist.launch.scaling import Fleet, FleetLoad
from moe_lora.serve.metrics import Metrics
from tests.dist.cluster.controller.parts import until
from tests.dist.cluster.test_migration import ADAPTERS, CONFIG
from tests.patience import PATIENCE_S

ENGINE = EngineConfig(
    **{"model_dir": CONFIG.model_dir, "adapters": ADAPTERS, "dtype": "float32", "eager": True},
    max_num_seqs=4,
    num_threads=1,
)
CLUSTER = ClusterConfig(
    engine=ENGINE, served_model_name="demo", scaling=ScalingConfig(min_instances=1, max_instances=2)
)


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch):
    """A share of a core each, on any machine."""
    monkeypatch.setattr("moe_lora.dist.launch.local.usable_cores", lambda: 2)


def ask(number: int, max_tokens: int = 100) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
    return GenerateRequest(
        request_id=f"r{number}",
        prompt_token_ids=tuple(range(20 + number, 40 + number)),
        sampling=sampling,
        adapter=[None, "upper"][number % 2],
    )


async def tokens_of(fleet, request: GenerateRequest) -> list[int]:
    return [token async for output in fleet.generate(request) for token in output.token_ids]


def test_an_instance_joins_warm_and_leaves_by_draining_and_no_request_fails(caplog, tmp_path):
    """Requests run all the time, and have the tokens of one undisturbed instance."""
    caplog.set_level("INFO", logger="moe_lora")
    gone = tmp_path / "gone"
    shutil.copytree(ADAPTERS[0][1], gone)
    cluster = replace(CLUSTER, engine=replace(ENGINE, adapters=(*ADAPTERS, ("gone", str(gone)))))

    async def run() -> None:
        async with local_instances(cluster) as controlled:
            fleet, call = controlled.fleet, controlled.controller.call
            expected = [await tokens_of(fleet, ask(number)) for number in range(4)]
            changing = True

            async def client(number: int) -> int:
                count = 0
                while changing:
                    request = replace(ask(number), request_id=f"{number} {count}")
                    assert await tokens_of(fleet, request) == expected[number]
                    count += 1
                return count

            clients = [asyncio.create_task(client(number)) for number in range(4)]
            await call("load_adapter", "later", ADAPTERS[0][1], replace=True)
            await call("unload_adapter", "gone")
            shutil.rmtree(gone)
            await call("scale_instances", 2, PATIENCE_S)
            stats = await fleet.stats()
            assert [(one.name, one.live) for one in stats.instances] == [
                ("instance-0", True),
                ("instance-1", True),
            ]
            assert not any(one.missing for one in controlled.instance_registry.instances)
            await until(lambda: all(one.outstanding_tokens for one in controlled.instance_registry.live))
            await call("scale_instances", 1, PATIENCE_S)
            after = await fleet.stats()
            assert [one.name for one in after.instances] == ["instance-0"]
            assert after.generation_tokens >= stats.generation_tokens
            await call("scale_instances", 2, PATIENCE_S)
            assert len((await fleet.stats()).instances) == 2
            changing = False
            assert min(await asyncio.gather(*clients)) > 0

    asyncio.run(run())
    assert "ended after" not in caplog.text


def test_a_failed_start_leaves_the_former_number(monkeypatch):
    async def run() -> None:
        alone = replace(CLUSTER, engine=replace(ENGINE, spare_process=False))
        async with local_instances(alone) as controlled:
            with monkeypatch.context() as patch:
                patch.setattr(
                    local_scaling,
                    "instance_roles",
                    lambda number, file: [
                        replace(role, words=("-c", "raise SystemExit(3)"))
                        for role in host_roles.instance_roles(number, file)
                    ],
                )
                with pytest.raises(EngineDeadError, match="exit code 3"):
                    await controlled.controller.call("scale_instances", 2, PATIENCE_S)
            with pytest.raises(EngineDeadError, match=r"did not start within limit_s=0\.01; there are 1"):
                await controlled.controller.call("scale_instances", 2, 0.01)
            with pytest.raises(ConfigError, match="3 instances are outside of"):
                await controlled.controller.call("scale_instances", 3, PATIENCE_S)
            assert [one.name for one in (await controlled.fleet.stats()).instances] == ["instance-0"]

    asyncio.run(run())


class Client:
    """Of an engine that has ended."""

    async def stats(self):
        raise EngineDeadError("it has ended")

    async def call(self, *args):
        pass


class Scaled:
    """A controller of the instance instance-0, and of those that `roles` adds."""

    def __init__(self, roles, engine=ENGINE) -> None:
        self.registry = InstanceRegistry(())
        self.control = instance_control.InstanceControl(self.registry, drain_s=1.0)
        self.enter("instance-0")
        controlled = SimpleNamespace(
            controller=SimpleNamespace(instances=self.control), instance_registry=self.registry
        )
        cluster = replace(CLUSTER, engine=engine, scaling=ScalingConfig(max_instances=3))
        LocalScaling(cluster, 0, roles, controlled)

    def enter(self, name: str, *, live: bool = True) -> None:
        self.registry.enter(name, Client()).live = live


RANKED = """
import subprocess, sys, time
from moe_lora.dist.launch.host_roles import say_started
rank = subprocess.Popen(["cat"], stdin=subprocess.PIPE, start_new_session=True)
print(rank.pid, file=open(sys.argv[1], "w"))
say_started(int(sys.argv[sys.argv.index("--status-fd") + 1]))
time.sleep(600)
"""


@pytest.mark.parametrize("settings", [{"tensor_parallel": 2}, {"expert_parallel": 2}, {"host_workers": 1}])
def test_further_processes_of_an_added_instance_have_the_priority_of_others(monkeypatch, tmp_path, settings):
    role = Role(name="instance-1", kind="instance", words=("-c", RANKED, str(tmp_path / "rank")))
    monkeypatch.setattr(local_scaling, "instance_roles", lambda number, file: [None, role])

    async def run() -> None:
        roles = host_roles.HostRoles([])
        scaled = Scaled(roles, replace(ENGINE, **settings))
        scaled.enter("instance-1")
        await scaled.control.scale_instances(2, PATIENCE_S)
        rank = int((tmp_path / "rank").read_text())
        assert os.getpriority(os.PRIO_PROCESS, rank) == os.getpriority(os.PRIO_PROCESS, 0)
        await roles.stop()

    asyncio.run(run())


class Roles:
    """Names of kept roles.  An added process does not dial in, and an ended one is away, but for a test."""

    def __init__(self) -> None:
        self.kept = ["instance-0"]
        self.on_add = self.on_remove = lambda name: None

    def add(self, role: Role) -> asyncio.Future[None]:
        self.kept.append(role.name)
        self.on_add(role.name)
        ready = asyncio.get_running_loop().create_future()
        ready.set_result(None)
        return ready

    async def remove(self, name: str) -> None:
        self.kept.remove(name)
        self.on_remove(name)


async def fail_to_add(scaled: Scaled) -> None:
    with pytest.raises(EngineDeadError, match=r"instance-1 did not start within limit_s=0\.01; there are 1"):
        await scaled.control.scale_instances(2, 0.01)


@pytest.fixture
def roles(monkeypatch) -> Roles:
    monkeypatch.setattr(instance_control, "SETTLE_S", 0.01)
    return Roles()


@pytest.mark.parametrize("live", [False, True])
def test_a_process_that_dials_in_at_its_end_is_forgotten(roles, monkeypatch, live):
    monkeypatch.setattr(instance_control, "LEAVE_S", 0.01)

    async def run() -> None:
        scaled = Scaled(roles)
        roles.on_remove = lambda name: scaled.enter(name, live=live)
        await fail_to_add(scaled)
        assert [one.name for one in scaled.registry.instances] == roles.kept == ["instance-0"]

    asyncio.run(run())


def test_a_failed_start_ends_all_its_processes_though_no_other_takes_requests(roles):
    async def run() -> None:
        scaled = Scaled(roles)
        [first] = scaled.registry.instances

        def add(name: str) -> None:
            scaled.enter(name, live=name == "instance-1")
            first.live = False

        roles.on_add = add
        with pytest.raises(EngineDeadError, match="instance-1, instance-2 did not start"):
            await scaled.control.scale_instances(3, 0.01)
        assert [one.name for one in scaled.registry.instances] == roles.kept == ["instance-0"]
        first.live = True
        roles.on_add = scaled.enter
        await scaled.control.scale_instances(2, PATIENCE_S)
        assert [one.name for one in scaled.registry.live] == roles.kept == ["instance-0", "instance-1"]
        first.live = False
        with pytest.raises(ConfigError, match="instance-1 can't leave: no other takes requests"):
            await scaled.control.scale_instances(1, PATIENCE_S)
        assert roles.kept == ["instance-0", "instance-1"]

    asyncio.run(run())


def test_an_instance_that_was_drained_and_left_takes_requests_when_it_is_added_again(roles):
    async def run() -> None:
        scaled = Scaled(roles)
        roles.on_add = scaled.enter
        await scaled.control.scale_instances(2, PATIENCE_S)
        await scaled.control.drain_instance("instance-1")
        roles.on_remove = lambda name: scaled.enter(name, live=False)
        await scaled.control.scale_instances(1, PATIENCE_S)
        await scaled.control.scale_instances(2, PATIENCE_S)
        assert [one.name for one in scaled.registry.undrained] == ["instance-0", "instance-1"]

    asyncio.run(run())


def test_one_instance_stays_if_the_other_is_drained_and_the_number_falls(roles):
    async def run() -> None:
        scaled = Scaled(roles)
        roles.on_add = scaled.enter
        await scaled.control.scale_instances(2, PATIENCE_S)
        roles.on_remove = lambda name: scaled.enter(name, live=False)
        leave = scaled.control.scale_instances(1, PATIENCE_S), scaled.control.drain_instance("instance-0")
        problems = await asyncio.gather(*leave, return_exceptions=True)
        assert [type(one) for one in problems].count(ConfigError) == 1
        assert scaled.registry.undrained

    asyncio.run(run())


@pytest.mark.parametrize(("verb", "what"), [("scale_instances", 2), ("restart_instance", "instance-0")])
def test_a_change_waits_for_another_no_longer_than_its_limit(roles, verb, what):
    async def run() -> None:
        scaled = Scaled(roles)
        async with scaled.control.changing:
            with pytest.raises(EngineDeadError, match=r"another change .* under way after limit_s=0\.01"):
                await getattr(scaled.control, verb)(what, 0.01)
        assert not scaled.control.changing.locked()

    asyncio.run(run())


class Decided:
    """A rule that wants the most instances."""

    def __init__(self, config: ScalingConfig, max_num_seqs: int) -> None:
        self.config, self.reason = replace(config, interval_s=1), "a test"

    def decide(self, now_s: float, load: FleetLoad | None, fleet: Fleet) -> int:
        assert load == FleetLoad(waiting=0, running=3)
        assert fleet == Fleet(number=1, starting=["gone"])
        return self.config.max_instances


def test_the_number_follows_the_rule_by_the_metrics(monkeypatch):
    monkeypatch.setattr(local_scaling, "ScalingRule", Decided)
    metrics = Metrics(CLUSTER, SimpleNamespace(link=None, figures=Figures()))
    control = instance_control.InstanceControl(InstanceRegistry(()), drain_s=1.0)
    gone = InstanceStats(
        **{"index": 0, "name": "gone", "live": False, "kv_usage": 0.0},
        **dict.fromkeys(
            ("num_running", "num_waiting", "outstanding_tokens", "num_restarts", "num_resent"), 0
        ),
    )

    async def stats() -> FleetStats:
        return FleetStats(instances=(gone,), num_running=3)

    async def run() -> None:
        numbers: asyncio.Queue[int] = asyncio.Queue()

        async def scale(number: int, limit_s: float) -> None:
            assert control.changing.locked()
            numbers.put_nowait(number)

        control.scale = scale
        served = SimpleNamespace(
            fleet=SimpleNamespace(stats=stats), controller=SimpleNamespace(instances=control)
        )
        async with by_load(CLUSTER, served, lambda stats: metrics.show(None, stats, None, None).decode()):
            assert await numbers.get() == 2

    asyncio.run(run())


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"front_end": FrontEndConfig(prefill_instances=("instance-0",))}, "front_end.prefill_instances"),
        ({"engine": replace(ENGINE, host_workers=2, host_cores=(0, 1))}, "engine.host_cores"),
        (
            {"front_end": FrontEndConfig(placement="loraserve")},
            "a placement is over several instances; give scaling.min_instances 2 or more",
        ),
        (
            {"engine": replace(ENGINE, pool=PoolConfig(replicas=1))},
            "an adapter pool is over several instances; give scaling.min_instances",
        ),
    ],
)
def test_settings_of_a_fixed_number_are_refused(changed, problem):
    with pytest.raises(ConfigError, match=problem):
        check_scaling(replace(CLUSTER, **changed))


def test_shares_are_of_the_most_instances(monkeypatch):
    monkeypatch.setattr(cluster_file, "count_devices", lambda: 2)
    monkeypatch.delenv(cluster_file.VISIBLE, raising=False)
    on_gpu = replace(CLUSTER, engine=replace(ENGINE, device="cuda"))
    assert cluster_file.placed(on_gpu).devices == {"instance-0": (0,), "instance-1": (1,)}
    with pytest.raises(ConfigError, match="3 instances x 1 rank = 3 devices, this host has 2"):
        cluster_file.placed(replace(on_gpu, scaling=ScalingConfig(max_instances=3)))


def test_a_server_without_scaling_keeps_the_number():
    control = instance_control.InstanceControl(InstanceRegistry(()), drain_s=1.0)
    with pytest.raises(ConfigError, match=r"is fixed: .*scaling: {max_instances: N} in the file"):
        asyncio.run(control.scale_instances(2, 1.0))
