# SPDX-License-Identifier: Apache-2.0
"""A replay over a cluster whose parts are killed: each request is answered rightly or with 503."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from .chaos_cluster import ChaosCluster
from .chaos_faults import BREAKING, OF_HOST, RECOVERY_S, SERVER_KILLED, Strike, Striker
from .chaos_host import ChaosHost
from .chaos_migrator import Migrator
from .chaos_model import ChaosModel, Question
from .chaos_publisher import Publisher
from .chaos_replay import Replay

START_S = 240.0
FEW_FAULTS = ("holder killed", "controller killed")
FAULTS = (
    "instance killed twice",
    "controller killed twice",
    "instance silent",
    "front end killed",
    "controller and instance killed",
    "instance silent for long",
    "controller silent",
    "controller and front end killed",
    "all instances killed",
)
PAUSED_FAULTS = ("front end stopped for a while",)
OPERATOR_FAULTS = ("instances restarted one by one", "instance drained and undrained", "limits read again")
HOLDER_FAULTS = ("holder killed", "holder killed")
"""Where there is a pool, beside those."""
TOLD_FAULTS = ("instance told to end", "front end told to end", "controller told to end", SERVER_KILLED)
SERVER_FAULTS = (
    "LoRA Server rank killed",
    "LoRA Server rank told to end",
    "LoRA Server rank stopped for a while",
    "LoRA Server restarted rank by rank",
)
"""Where there is a LoRA Server."""
HOST_FAULTS = tuple(OF_HOST)
"""In a mount namespace (`ChaosHost`)."""


@dataclass(frozen=True, kw_only=True)
class ChaosPlan:
    """num_requests: at least; more are asked until all faults are over.  pool_replicas: None = no pool.
    lora_server: the layout of a LoRA Server; None: there is none.  recovery_s: after each fault all parts are
    there again within this time.
    """

    num_requests: int
    faults: tuple[str, ...]
    seed: int = 0
    pool_replicas: int | None = None
    lora_server: str | None = None
    recovery_s: float = RECOVERY_S


@dataclass
class ChaosReport:
    """began_s: on the monotonic clock.  num_asked: requests; counts: of them, see `Outcomes`; num_resent: of
    them, those that went on at another instance.  num_published, num_refused: publications of versions of one
    adapter that were confirmed, and that were not.  num_tables, num_moves: of the placement.
    num_migrations: requests that the front ends of the end moved.  ordered: those moved by POST /v1/migrate,
    by kind, over all front ends.  fetches: of the pool, by source.
    complaints: what must not be; none if all is well.  log_end: the last that the processes wrote, if there
    are complaints.
    """

    strikes: list[Strike] = field(default_factory=list)
    began_s: float = 0.0
    num_asked: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    num_resent: int = 0
    num_published: int = 0
    num_refused: int = 0
    num_tables: int = 0
    num_moves: int = 0
    num_migrations: int = 0
    ordered: Counter[str] = field(default_factory=Counter)
    fetches: dict[str, int] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)
    log_end: str = ""


def run_chaos(
    model: ChaosModel, questions: dict[str | None, list[Question]], folder: Path, plan: ChaosPlan
) -> ChaosReport:
    """Serve the model, ask the questions, do the faults, end everything.

    folder: for the log and temporary files.
    """
    host = ChaosHost(folder) if set(plan.faults) & set(HOST_FAULTS) else None
    cluster = ChaosCluster(
        model, folder, pool_replicas=plan.pool_replicas, lora_server=plan.lora_server, host=host
    )
    report = ChaosReport()
    try:
        url = cluster.wait_for_url(START_S)
        cluster.until(cluster.is_whole, "all parts have started", START_S)
        publisher = Publisher(url, model, questions, (model.adapters[0], model.adapters[-1]))
        replay = Replay(url, questions, publisher, plan.num_requests, plan.seed)
        striker = Striker(cluster, replay, plan.faults, random.Random(plan.seed), host)
        migrator = Migrator(url, cluster.num_instances, random.Random(plan.seed))
        report.began_s = time.monotonic()
        report.complaints += asyncio.run(_drive(replay, publisher, striker, migrator))
        _fill_in(report, cluster, replay, striker)
        report.num_published, report.num_refused = publisher.num_done, publisher.num_refused
        report.ordered = migrator.moved
        report.complaints += publisher.complaints + migrator.complaints
        report.complaints += [
            f"all parts were there only {one.whole_s - one.over_s:.0f} s after {one.fault}"
            for one in report.strikes
            if one.whole_s - one.over_s > plan.recovery_s
        ]
    except AssertionError as error:
        report.complaints.append(str(error))
    finally:
        report.complaints += cluster.stop()
        if host is not None:
            host.close()
    if report.complaints:
        report.log_end = cluster.text()[-8000:]
    return report


async def _drive(replay: Replay, publisher: Publisher, striker: Striker, migrator: Migrator) -> list[str]:
    """All until they are over; what went wrong with the strikes."""
    await publisher.publish_first(START_S)
    beside = [asyncio.create_task(part.run()) for part in (publisher, migrator)]
    striking = asyncio.create_task(asyncio.to_thread(striker.run))
    await replay.run()
    publisher.stop()
    migrator.stop()
    await asyncio.gather(*beside)
    [error] = await asyncio.gather(striking, return_exceptions=True)
    if error is not None and not isinstance(error, AssertionError):
        raise error
    return [] if error is None else [str(error)]


def _fill_in(report: ChaosReport, cluster: ChaosCluster, replay: Replay, striker: Striker) -> None:
    figures = striker.count_resent()
    outcomes = replay.outcomes
    breaking = [(one.at_s, one.whole_s) for one in striker.strikes if one.fault in BREAKING]
    for began_s, ended_s in outcomes.wrong_cuts(breaking):
        before = [one for one in striker.strikes if one.at_s <= ended_s]
        last = (
            f"{ended_s - before[-1].at_s:.1f} s after the beginning of {before[-1].fault}" if before else ""
        )
        report.complaints.append(
            f"a connection of {ended_s - began_s:.2f} s broke while no front end was killed, {last}"
        )
    if outcomes.num_ended != replay.num_asked:
        outcomes.complaints.append(f"{replay.num_asked} requests were asked, {outcomes.num_ended} ended")
    report.strikes, report.num_asked, report.counts = striker.strikes, replay.num_asked, outcomes.counts
    report.num_resent = striker.resent.total()
    report.num_tables, report.num_moves = cluster.table_version(), cluster.num_moves()
    report.num_tables += cluster.num_tables_before
    report.num_migrations = sum(
        int(one.get(("migrations_total", kind), 0.0)) for one in figures.values() for kind in ("tokens", "kv")
    )
    report.fetches = {
        source: int(
            max((one.get(("pool_fetches_total", source), 0.0) for one in figures.values()), default=0)
        )
        for source in ("peer", "disk")
    }
    report.complaints += outcomes.complaints
