"""Parts of a cluster are killed while it serves and adapters move: each request is right, or told 503."""

from __future__ import annotations

from pathlib import Path

import pytest

from .chaos import FAULTS, FEW_FAULTS, HOLDER_FAULTS, ChaosPlan, ChaosReport, run_chaos
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
    return report


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
    assert report.num_published >= 1
    assert (report.fetches["peer"] >= 1) == (pool_replicas is not None)
