# SPDX-License-Identifier: Apache-2.0
"""Parts of a cluster are killed while it serves and adapters move: each request is right, or told 503."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moe_lora.report.results import read_results
from tests.shared_memory import names_in_shm

from .chaos import (
    FAULTS,
    FEW_FAULTS,
    HOLDER_FAULTS,
    HOST_FAULTS,
    OPERATOR_FAULTS,
    PAUSED_FAULTS,
    SERVER_FAULTS,
    TOLD_FAULTS,
    ChaosPlan,
    ChaosReport,
    run_chaos,
)
from .chaos_cluster import orphans
from .chaos_host import has_namespaces, in_own_namespace
from .chaos_model import ChaosModel, Question, ask_undisturbed, make_chaos_model

Asked = tuple[ChaosModel, dict[str | None, list[Question]]]


@pytest.fixture(scope="module")
def asked(tmp_path_factory) -> Asked:
    model = make_chaos_model(tmp_path_factory.mktemp("model"))
    return model, ask_undisturbed(model, seed=0)


def check(asked: Asked, folder: Path, plan: ChaosPlan) -> ChaosReport:
    report = run_chaos(*asked, folder, plan)
    assert not report.complaints, "\n".join([*report.complaints, report.log_end])
    assert [one.fault for one in report.strikes] == list(plan.faults)
    assert report.counts.total() == report.num_asked >= plan.num_requests
    assert report.counts["answered"] > report.num_asked / 2
    assert report.num_tables >= len(plan.faults)
    assert report.num_moves >= 1
    assert report.num_migrations >= 1
    assert report.ordered.total() >= 1  # of which kind they are is up to what runs when they are ordered
    return report


def test_names_of_other_programs_are_not_left_behind():
    before, (own, other) = names_in_shm(), (1 << 22, (1 << 22) + 1)  # beyond the numbers of Linux
    left = [Path(f"/dev/shm/torch_{pid}_{os.getpid()}_0") for pid in (own, other)]
    try:
        for path in left:
            path.touch()
        assert orphans(before, {own}) == [left[0].name]
    finally:
        for path in left:
            path.unlink()


@pytest.mark.slow
def test_the_only_holder_of_adapters_and_the_controller_are_killed(asked, tmp_path):
    report = check(asked, tmp_path, ChaosPlan(num_requests=150, faults=FEW_FAULTS, pool_replicas=1))
    assert report.counts["cut"] == 0
    assert report.fetches["peer"] >= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pool_replicas", "faults"), [(None, FAULTS), (1, HOLDER_FAULTS + FAULTS), (2, HOLDER_FAULTS + FAULTS)]
)
def test_every_part_is_killed_or_stopped(pool_replicas, faults, asked, tmp_path):
    plan = ChaosPlan(num_requests=500, faults=faults, seed=1, pool_replicas=pool_replicas)
    report = check(asked, tmp_path, plan)
    assert report.counts["refused"] >= 1, "for a while no instance was there"
    assert report.num_resent >= 1
    assert min(report.ordered["tokens"], report.ordered["kv"]) >= 1
    assert report.num_published >= 1
    assert (report.fetches["peer"] >= 1) == (pool_replicas is not None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "faults"), [("none", TOLD_FAULTS + PAUSED_FAULTS + OPERATOR_FAULTS), ("EP2-PP1", SERVER_FAULTS)]
)
def test_parts_end_and_stop(part, faults, asked, tmp_path):
    lora_server = None if part == "none" else part
    plan = ChaosPlan(num_requests=200, faults=faults, seed=2, lora_server=lora_server)
    report = run_chaos(*asked, tmp_path, plan)
    assert not report.complaints, "\n".join([*report.complaints, report.log_end])
    assert [one.fault for one in report.strikes] == list(faults)
    assert report.counts["answered"] >= 100


@pytest.mark.slow
@pytest.mark.skipif(not has_namespaces(), reason="needs mount namespaces (unshare --user --mount)")
def test_what_a_host_lacks_for_a_while_touches_only_those_who_need_it(tmp_path, monkeypatch):
    monkeypatch.setenv("MOE_LORA_BENCH_ALLOW_DIRTY", "1")
    out = tmp_path / "chaos.jsonl"
    words = ["--out", str(out), "--rounds", "1", "--requests", "100", "--parts", "none"]
    words += ["--in-namespace", "--faults", *HOST_FAULTS]
    assert in_own_namespace("bench.cluster.check_chaos", words) == 0
    [record] = read_results(out)
    assert [one["fault"] for one in record["result"]["strikes"]] == list(HOST_FAULTS)
    assert record["result"]["answered"] >= 100
