# SPDX-License-Identifier: Apache-2.0
"""The role of an LLM instance, and any role's life."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import hashlib
import logging
import os
import secrets
import shutil
import signal
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from moe_lora.config import EngineConfig
from moe_lora.config.cluster import ClusterConfig, read_cluster
from moe_lora.config.devices import DeviceShare
from moe_lora.core.address import Address
from moe_lora.core.clock import WallClock
from moe_lora.core.errors import ConfigError, MoeLoraError
from moe_lora.core.host import state_folder
from moe_lora.core.processes import has_terminal, set_log_level
from moe_lora.dist.net.keys import Keys, keys_of

from .cluster_file import thread_share
from .host_roles import STOPPED_DEATHS, say_started

if TYPE_CHECKING:
    from moe_lora.engine.client.messages import Pulse

logger = logging.getLogger(__name__)

_PARENT_S = 0.5
RESTART_CODE = os.EX_TEMPFAIL
"""Exit code for a restart: torchrun takes 0 for done."""
RESTART_S = 20.0
"""Limit for this process to end by itself."""
LOOK_S, LOOKS = 1.0, 20


@dataclass(frozen=True)
class JobPlace:
    """This process in its torchrun job; without torchrun, a job of 1 process.

    local_rank None: equal to dist_rank.
    """

    dist_rank: int = 0
    num_ranks: int = 1
    under_torchrun: bool = False
    local_rank: int | None = None

    @staticmethod
    def here() -> JobPlace:
        local_rank = os.environ.get("LOCAL_RANK")
        return JobPlace(
            int(os.environ.get("RANK", "0")),
            int(os.environ.get("WORLD_SIZE", "1")),
            "TORCHELASTIC_RUN_ID" in os.environ,
            None if local_rank is None else int(local_rank),
        )

    @property
    def on_host(self) -> int:
        """Number of this process on its host."""
        return self.dist_rank if self.local_rank is None else self.local_rank

    def device_shares(self, config: EngineConfig) -> tuple[DeviceShare, ...]:
        """Devices from LOCAL_RANK on; (): from the first on."""
        first = self.on_host - self.dist_rank
        if first <= 0 or config.device == "cpu":
            return ()
        return tuple(DeviceShare(first + one) for one in range(config.num_ranks))


def serve_instance(
    cluster: ClusterConfig, place: JobPlace, name: str, status: int | None = None, starts: int | None = None
) -> int:
    """Run one LLM instance, connected to every front end; its first rank is the engine.

    starts: earlier starts by a keeper; None: no keeper.
    """
    from moe_lora.core.address import own_host

    config = cluster.instance(name)
    addresses, keys = cluster.dialled_addresses(), keys_of(cluster)
    if place.num_ranks not in (1, config.num_ranks):
        name = "expert_parallel" if config.expert_parallel > 1 else "tensor_parallel"
        raise ConfigError(
            f"this job has {place.num_ranks} processes, but engine.{name}={config.num_ranks}; "
            f"start it with torchrun --nproc-per-node {config.num_ranks}"
        )
    if config.pool is not None and config.pool.host is None:
        config = replace(
            config, pool=replace(config.pool, host=own_host(str(next(iter(addresses.values())))))
        )
    threads = set_environment(config, starts)
    contents = config.contents_dir or str(
        state_folder(config.state_dir) / f"contents-{_digest(keys, addresses)}"
    )
    config = replace(
        config,
        device_shares=config.device_shares or place.device_shares(config),
        num_threads=threads,
        seed=seed_of(config.seed, name, starts),
        contents_dir=contents,
        # A bad folder stops no instance: the controller sends the adapter or marks it bad.  A server with its
        # own instances reports named adapters at start.
        leave_out_bad=bool(cluster.controllers_at) or starts != 0 or cluster.serves_whole_registry,
    )
    if config.device_shares:
        from .cluster_file import use_devices

        use_devices(config.device_shares)
    if place.dist_rank:
        from moe_lora.engine.ranks.follower import follow_rank_0

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        follow_rank_0()
        return 0
    stuck_s = STOPPED_DEATHS * cluster.front_end.heartbeat_dead_s
    return _serve_engine(config, place, addresses, keys, status, stuck_s)


def set_environment(config: EngineConfig, starts: int | None) -> int:
    """Set the threads' environment, before torch is imported; returns their number."""
    from moe_lora.core.processes import usable_cores, worker_environment

    threads = thread_share(config.num_threads, config.num_instances, usable_cores())
    os.environ.update(worker_environment(replace(config, num_threads=threads).threads_per_process))
    if starts:
        # The first start left its code; compile processes would import torch again.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    return threads


def seed_of(seed: int, name: str, starts: int | None) -> int:
    """The seed of a start: equal seeds would repeat unseeded answers."""
    return seed + zlib.crc32(f"{name} {time.time_ns() if starts is None else starts}".encode())


def _digest(keys: Keys | None, addresses: Mapping[str, Address]) -> str:
    cluster = str(sorted(map(str, addresses.values()))).encode() if keys is None else keys.authority()
    return hashlib.sha256(b"contents " + cluster).hexdigest()[:16]


def _serve_engine(
    config: EngineConfig,
    place: JobPlace,
    addresses: Mapping[str, Address],
    keys: Keys | None,
    status: int | None,
    stuck_s: float,
) -> int:
    """Build an engine and serve until stopped; returns the exit code."""
    gc.disable()
    from moe_lora.dist.cluster.instance_links import FrontEndLinks
    from moe_lora.engine.build import build_engine
    from moe_lora.engine.client.messages import Inbox, InstanceFacts
    from moe_lora.engine.client.step_notes import StepNotes
    from moe_lora.engine.loop import EngineLoop

    followers = None
    if place.num_ranks > 1:
        from moe_lora.engine.ranks.follower import gather_followers

        followers = gather_followers(config)
    core = build_engine(config, followers)
    notes = StepNotes()
    core.attach_notes(notes)
    collect_rarely()

    async def serve() -> int:
        inbox = Inbox()
        links = FrontEndLinks(addresses, keys, inbox, core.info.max_model_len)
        loop = EngineLoop(core, links.emit, inbox)
        stop_on_signals(links.stop, place)
        loop.start()
        say_started(status)
        watching = asyncio.create_task(end_stuck(loop.pulse, stuck_s))
        facts = InstanceFacts(core.info, notes.place)
        await links.run(config.instance, secrets.token_hex(8), facts, loop.pulse)
        if links.restarts:
            end_for_restart()
        await asyncio.to_thread(loop.join)
        watching.cancel()
        return RESTART_CODE if links.restarts else 1 if links.failed else 0

    return asyncio.run(serve())


def stop_on_signals(stop: Callable[[], None], place: JobPlace) -> None:
    """Call `stop` on SIGTERM, SIGINT, and the parent torchrun's end."""

    def stop_aside(*_: object) -> None:
        # Not in the handler: the interrupted code may hold a lock of `stop`.
        threading.Thread(target=stop, name="stop", daemon=True).start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop_aside)
    if place.under_torchrun:
        threading.Thread(
            target=_stop_with_parent, args=(os.getppid(), stop), name="parent-watch", daemon=True
        ).start()


def reread_on_hang_up(config: str, place: JobPlace) -> None:
    """On each SIGHUP, read the log level from the cluster's file.

    With a terminal or torchrun, SIGHUP ends the process.
    """

    def reread() -> None:
        try:
            level = read_cluster(config).front_end.log_level
        except (MoeLoraError, OSError, ValueError) as error:
            logger.error("log_level can't be read again and stays as it is: %s", error)
            return
        set_log_level(level)
        logger.warning("log_level is %s", level)

    if not has_terminal() and not place.under_torchrun:
        signal.signal(signal.SIGHUP, lambda *_: threading.Thread(target=reread, daemon=True).start())


def end_for_restart() -> None:
    """End this process within RESTART_S, even if stuck."""

    def end() -> None:
        logger.error("it was told to end, to be started again, and hangs: ended after %g s", RESTART_S)
        os._exit(RESTART_CODE)

    timer = threading.Timer(RESTART_S, end)
    timer.daemon = True
    timer.start()


async def end_stuck(pulse: Pulse, limit_s: float) -> None:
    """End this process if its engine stays at one piece of work for limit_s.

    Peers have given up by then.  Time of a stopped process does not count.
    """
    clock, stuck_s, look_s = WallClock(), 0.0, max(LOOK_S, limit_s / LOOKS)
    looked_s = clock.now_s()
    while stuck_s < limit_s:
        await asyncio.sleep(look_s)
        passed_s, looked_s = clock.now_s() - looked_s, clock.now_s()
        stuck_s = stuck_s + min(passed_s, 2 * look_s) if pulse.stuck_s() >= passed_s else 0.0
    logger.error("the engine does not get on for %.0f s: the process ends, at what its threads do:", stuck_s)
    faulthandler.dump_traceback()
    os._exit(1)


def end_with(parent: int, directory: str | None = None) -> None:
    """End this process after its parent's end; delete the parent's `directory`."""

    def stop() -> None:
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=_stop_with_parent, args=(parent, stop), name="parent-watch", daemon=True).start()


def _stop_with_parent(parent: int, stop: Callable[[], None]) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_S)
    stop()


FULL_COLLECTION_EVERY = 1000
"""Middle collections between two full ones."""


def collect_rarely() -> None:
    """Exempt current objects (modules, the model) from garbage collection, and collect rarely.

    A full collection stops the engine's thread, and reads every cached node.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, FULL_COLLECTION_EVERY)
