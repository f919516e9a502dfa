# SPDX-License-Identifier: Apache-2.0
"""The keeper of a cluster on Ray, with stand-ins for Ray and for the actors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_lora.core.errors import ConfigError
from moe_lora.dist.launch.progress import PLACED, READY, RUNNING, RoleFacts
from moe_lora.dist.launch.scaling import Snapshot
from tests.dist.launch.test_topology import CONTENT
from tests.patience import PATIENCE_S

ray_cluster = pytest.importorskip("moe_lora.dist.launch.ray_cluster", exc_type=ImportError)
ray_keeper = pytest.importorskip("moe_lora.dist.launch.ray_keeper", exc_type=ImportError)
HOSTS = ("10.0.0.1", "10.0.0.2", "10.0.0.3")


class Actor:
    """A role's actor.  host: None while Ray has no room.  calls: in turn.  live: as a front end sees."""

    live = ("instance-0", "instance-1", "instance-2")

    def __init__(self, name: str, host: str | None, *, is_started: bool) -> None:
        self.name, self.host, self.is_started = name, host, is_started
        self.calls: list[str] = []
        self.numbers: list[int] = []
        """Of address books."""

    def __getattr__(self, name: str) -> Any:
        async def call(*given: Any) -> Any:
            self.calls.append(name)
            if name in ("start", "set_book"):
                self.numbers.append(next(one for one in given if isinstance(one, int)))
            on = getattr(type(self), f"on_{name}", None)
            return None if on is None else await on(self)

        def remote(*values: Any) -> Any:
            return asyncio.ensure_future(call(*values))

        return SimpleNamespace(remote=remote)

    async def on_facts(self) -> RoleFacts:
        if self.host is None:
            await asyncio.Event().wait()
        role = self.name.partition("@")[0]
        serving = READY if role.startswith("front-end") else RUNNING
        state = serving if self.is_started else PLACED
        number = max(self.numbers, default=0)
        return RoleFacts(name=role, state=state, host=self.host or "", book_number=number)

    async def on_snapshot(self) -> Snapshot:
        return Snapshot(waiting=0, running=0, within={}, live=self.live)

    async def on_start(self) -> None:
        self.is_started = True

    async def on_failed(self) -> None:
        await asyncio.Event().wait()


class Ray:
    """Ray's calls of a keeper.  room: the host of the next actor."""

    def __init__(self) -> None:
        self.actors: dict[str, Actor] = {}
        self.killed: list[str] = []
        self.room: str | None = HOSTS[2]
        self.is_again = False
        self.util = SimpleNamespace(
            get_node_ip_address=lambda: HOSTS[0], list_named_actors=lambda: ["keeper", *self.actors]
        )

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(gcs_address="10.0.0.1:6379", was_current_actor_reconstructed=self.is_again)

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeManagerAddress": host, "NodeID": host, "Alive": True} for host in HOSTS]

    def get_actor(self, name: str) -> Actor:
        if name not in self.actors:
            raise ValueError(name)
        return self.actors[name]

    def kill(self, actor: Actor) -> None:
        self.killed.append(actor.name)
        del self.actors[actor.name]

    def remote(self, _: type) -> Any:
        def options(*, name: str, **_: Any) -> Any:
            def remote(*_: Any) -> Actor:
                self.actors[name] = Actor(name, self.room, is_started=False)
                return self.actors[name]

            return SimpleNamespace(remote=remote)

        return SimpleNamespace(options=options)

    def of(self, role: str) -> Actor:
        """The role's last actor."""
        return [actor for name, actor in self.actors.items() if name.startswith(f"{role}@")][-1]


class Certificates:
    """A stand-in for the enrolment."""

    authority = ""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)

    async def start(self, _: str) -> str:
        return "10.0.0.1:1"

    def add_token(self, _: str) -> str:
        return ""

    def stop(self) -> None:
        return None


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ray:
    found = Ray()
    monkeypatch.setattr(ray_keeper, "ray", found)
    monkeypatch.setattr(ray_keeper, "Enrolment", Certificates)
    monkeypatch.setattr(ray_keeper, "make_keys", lambda folder: None)
    monkeypatch.setattr(ray_keeper, "state_folder", lambda _: tmp_path)
    monkeypatch.setattr(ray_keeper, "_LOOK_S", 0.0)
    monkeypatch.setattr(ray_keeper, "_ROOM_S", PATIENCE_S)
    return found


async def until(condition: Callable[[], object]) -> None:
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("no event leads there")


async def keeper_of(ray: Ray, num_front_ends: int = 1) -> Any:
    """A keeper of a whole cluster, on the first host but for the instances."""
    keeper = ray_keeper.Keeper("demo", CONTENT, num_front_ends)
    await keeper.status()
    await until(lambda: ray.actors and all(actor.is_started for actor in ray.actors.values()))
    await until(lambda: all(kept.facts is not None for kept in keeper._kept.values()))
    for name, actor in ray.actors.items():
        actor.host = HOSTS[0] if "instance" not in name else HOSTS[1]
    await keeper.status()
    return keeper


def end(keeper: Any) -> None:
    """The end of a keeper's process."""
    for kept in keeper._kept.values():
        kept.task.cancel()


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


@pytest.mark.parametrize("verb", ["drain", "undrain"])
def test_a_new_keeper_ends_no_role_that_it_finds(ray: Ray, verb: str) -> None:
    async def test() -> None:
        keeper = await keeper_of(ray)
        await keeper.drain(HOSTS[2])
        before = dict(ray.actors)
        end(keeper)
        ray.is_again = True
        await getattr(ray_keeper.Keeper("demo", CONTENT, 1), verb)(HOSTS[2])
        assert (ray.actors, ray.killed) == (before, [])

    run(test)


def test_a_silent_role_refuses_a_drain(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        keeper = await keeper_of(ray)
        before = dict(ray.actors)
        end(keeper)
        ray.is_again = True
        monkeypatch.setattr(ray_keeper, "_FACTS_S", 0.0)
        for actor in ray.actors.values():
            actor.host = None
        keeper = ray_keeper.Keeper("demo", CONTENT, 1)
        with pytest.raises(ConfigError, match="does not answer; call drain again"):
            await keeper.drain(HOSTS[1])
        assert {row.state for row in await keeper.status()} == {"silent"}
        assert (ray.actors, ray.killed) == (before, [])

    run(test)


async def waiting_for_room(ray: Ray, keeper: Any) -> tuple[asyncio.Task[None], Actor, Actor]:
    """A drain that waits for room, the moving role's actor, and the actor without a host."""
    ray.room, before = None, set(ray.actors)
    draining = asyncio.create_task(keeper.drain(HOSTS[1]))
    await until(lambda: set(ray.actors) - before)
    [name] = set(ray.actors) - before
    return draining, next(one for one in ray.actors.values() if one.host == HOSTS[1]), ray.actors[name]


def test_a_new_keeper_lets_a_moving_role_run(ray: Ray) -> None:
    async def test() -> None:
        keeper = await keeper_of(ray)
        before = dict(ray.actors)
        _, _, pending = await waiting_for_room(ray, keeper)
        end(keeper)
        ray.is_again = True
        await ray_keeper.Keeper("demo", CONTENT, 1).status()
        assert (ray.actors, ray.killed) == (before, [pending.name])

    run(test)


def test_a_moved_role_is_found_again(ray: Ray) -> None:
    async def test() -> None:
        keeper = await keeper_of(ray)
        await keeper.drain(HOSTS[1])
        assert {actor.host for actor in ray.actors.values()} == {HOSTS[0], HOSTS[2]}
        before, killed = dict(ray.actors), list(ray.killed)
        end(keeper)
        ray.is_again = True
        await ray_keeper.Keeper("demo", CONTENT, 1).status()
        assert (ray.actors, ray.killed) == (before, killed)

    run(test)


def test_the_next_instance_moves_once_all_front_ends_see_the_former(ray: Ray) -> None:
    async def test() -> None:
        keeper = await keeper_of(ray, num_front_ends=2)
        late = ray.of("front-end-1")
        late.live = ("instance-1", "instance-2")
        draining = asyncio.create_task(keeper.drain(HOSTS[1]))
        await until(lambda: late.calls.count("snapshot") == 3)
        assert [ray.of(f"instance-{number}").host for number in range(3)] == [HOSTS[2], HOSTS[1], HOSTS[1]]
        late.live = Actor.live
        await draining
        assert [ray.of(f"instance-{number}").host for number in range(3)] == [HOSTS[2]] * 3

    run(test)


def test_the_end_of_a_cluster_ends_a_drain(ray: Ray) -> None:
    async def test() -> None:
        keeper = await keeper_of(ray)
        before = dict(ray.actors)
        draining, _, _ = await waiting_for_room(ray, keeper)
        await keeper.stop()
        with pytest.raises(ConfigError, match="no other host has room for instance-"):
            await draining
        assert not ray.actors
        assert all("stop" in actor.calls for actor in before.values())

    run(test)


def test_down_without_a_keeper_stops_a_moving_role(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def actor(name: str) -> Any:
        calls = {
            verb: SimpleNamespace(remote=lambda verb=verb: f"{verb} {name}") for verb in ("facts", "stop")
        }
        return SimpleNamespace(name=name, **calls)

    actors = {name: actor(name) for name in ("instance-0@1", "instance-0@2", "front-end-0@1")}

    def get(call: str, timeout: float) -> None:
        if call == "facts instance-0@2":
            raise ray_cluster.GetTimeoutError
        done.append(call)

    def kill(actor: Any) -> None:
        done.append(f"kill {actor.name}")
        del actors[actor.name]

    def get_actor(name: str) -> Any:
        if name not in actors:
            raise ValueError(name)
        return actors[name]

    util = SimpleNamespace(list_named_actors=lambda: list(actors))
    fake = SimpleNamespace(util=util, get=get, kill=kill, get_actor=get_actor)
    monkeypatch.setattr(ray_keeper, "ray", fake)
    monkeypatch.setattr(ray_cluster, "ray", fake)
    ray_cluster._end_all()
    assert [word for word in done if "facts" not in word] == [
        *("stop front-end-0@1", "kill front-end-0@1"),
        *("stop instance-0@1", "kill instance-0@1"),
        "kill instance-0@2",
    ]


def test_a_keeper_after_a_clock_was_set_back_numbers_books_on(
    ray: Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        keeper = await keeper_of(ray)
        keeper._send_book()
        front_end = ray.of("front-end-0")
        await until(lambda: len(front_end.numbers) > 1)
        before = max(number for actor in ray.actors.values() for number in actor.numbers)
        end(keeper)
        ray.is_again = True
        monkeypatch.setattr(ray_keeper.time, "time_ns", lambda: 1)
        keeper = await keeper_of(ray)
        for actor in ray.actors.values():
            await until(lambda actor=actor: actor.numbers[-1] > before)

    run(test)


def test_a_clock_that_is_set_back_numbers_books_on(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        keeper = await keeper_of(ray)
        before = max(number for actor in ray.actors.values() for number in actor.numbers)
        monkeypatch.setattr(ray_keeper.time, "time_ns", lambda: 1)
        keeper._send_book()
        front_end = ray.of("front-end-0")
        await until(lambda: front_end.numbers[-1] > before)
        assert keeper._place(keeper._kept["front-end-0"])[0] > before

    asyncio.run(run())
