# SPDX-License-Identifier: Apache-2.0
"""An error on a rank other than 0 ends the requests of its adapter only, as an error on rank 0 does."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest

from bench.house.house_trace import CAPTURED
from moe_lora.core.errors import EngineDeadError
from moe_lora.engine.build import build_engine
from moe_lora.engine.ranks import followers
from tests.engine.test_failed_adapters import CONFIG, NAMES, drive, four, infos, request
from tests.grids import diagonal
from tests.models.generated_code import captured_graphs

from .faulty_follower import BAD_TOKEN, use_faulty_followers
from .test_expert_parallel import met_soon

EP, TP = {"expert_parallel": 2}, {"tensor_parallel": 2}
ALWAYS = 1 << 20


def both_faults(*slow: tuple[str, str]) -> pytest.MarkDecorator:
    """Each division with a fault before and after the step; slow: pairs of the slow run."""
    cells = [(ranks, when) for ranks in (EP, TP) for when in ("before_step", "after_step")]
    return pytest.mark.parametrize(
        ("ranks", "when"),
        [
            pytest.param(
                ranks,
                when,
                marks=pytest.mark.slow if (*ranks, when) in slow else (),
                id=f"{next(iter(ranks))}-{when}",
            )
            for ranks, when in cells
        ],
    )


@pytest.fixture
def faulty(monkeypatch):
    """Builds an engine with followers of these faults."""
    cores = []

    def build(faults, **settings):
        use_faulty_followers(monkeypatch, faults)
        cores.append(build_engine(replace(CONFIG, **settings)))
        return cores[-1]

    yield build
    for core in cores:
        core.close()


def bad_among_others():
    """A request per adapter and of the base model; one adapter's prompt has the token of the fault."""
    others = [one for one in four() if one.request_id != "upper"]
    return [request("upper", "upper", (5, 6, BAD_TOKEN)), *others]


@pytest.fixture(scope="module")
def right():
    core = build_engine(CONFIG)
    found = {name: tokens for name, (tokens, _) in drive(core, *bad_among_others()).items()}
    core.close()
    return found


def tokens_of(found, *names):
    return {name: found[name][0] for name in names}


def expected(right, *names):
    return {name: right[name] for name in names}


OTHERS = ("reverse", "double", "base")


@both_faults(("expert_parallel", "before_step"), ("tensor_parallel", "after_step"))
def test_step_that_raises_on_a_follower_ends_only_its_adapter(faulty, right, ranks, when):
    core = faulty({when: ALWAYS}, **ranks)
    found = drive(core, *bad_among_others())
    assert tokens_of(found, *OTHERS) == expected(right, *OTHERS)
    if when == "before_step":
        assert found["upper"][1].finish_reason == "error"
        assert "a kernel of this follower refused its operands" in (found["upper"][1].error or "")
        assert {one.name: one.residency for one in infos(core)}["upper"] == "unavailable"
    again = drive(core, request("later", "reverse"), request("last", None))
    assert again["later"][0] == right["reverse"]
    assert again["last"][0] == right["base"]


@pytest.mark.parametrize(
    "generates", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["captured", "generated"]
)
@both_faults(
    ("expert_parallel", "after_step"), ("tensor_parallel", "before_step"), ("tensor_parallel", "after_step")
)
def test_compiled_step_that_raises_on_a_follower_ends_only_its_adapter(
    faulty, right, ranks, when, generates, tmp_path, monkeypatch
):
    """generates: code from the captured graphs; else the graphs run."""
    if not generates:
        (tmp_path / "sitecustomize.py").write_text(CAPTURED)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with nullcontext() if generates else captured_graphs():
        core = faulty({when: ALWAYS}, eager=False, decode_buckets=(4,), **ranks)
        found = drive(core, *bad_among_others())
        assert tokens_of(found, *OTHERS) == expected(right, *OTHERS)
        if when == "before_step":
            assert "a kernel of this follower refused its operands" in (found["upper"][1].error or "")
        assert drive(core, request("later", "reverse"))["later"][0] == right["reverse"]


@pytest.mark.parametrize("ranks", [EP, pytest.param(TP, marks=pytest.mark.slow)], ids=str)
def test_step_that_raises_once_on_a_follower_ends_no_request(faulty, right, ranks):
    core = faulty({"before_step": 1}, **ranks)
    assert tokens_of(drive(core, *bad_among_others()), "upper", *OTHERS) == right


@pytest.mark.slow
def test_each_of_three_followers_may_raise(faulty, right):
    core = faulty({"before_step": 1}, expert_parallel=4)
    assert tokens_of(drive(core, *bad_among_others()), "upper", *OTHERS) == right


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_follower_that_is_killed_while_the_ranks_meet_anew_ends_the_engine(faulty, num_ranks):
    core = faulty({"before_step": 1, "killed_in_meet": 1}, expert_parallel=num_ranks)
    with pytest.raises(EngineDeadError, match=rf"rank {num_ranks - 1} .* was killed by SIGKILL"):
        drive(core, *bad_among_others())


def test_follower_that_stands_still_while_the_ranks_meet_anew_ends_the_engine(faulty, monkeypatch):
    core = faulty({"before_step": 1, "stopped_in_meet": 1}, **EP)
    monkeypatch.setattr(followers, "MEET_TIMEOUT_S", 0.2)
    with pytest.raises(EngineDeadError, match=r"rank 1 .* within 0\.2 s: it hangs, or this machine"):
        drive(core, *bad_among_others())
    core.close(at_once=True)


def test_follower_that_is_stopped_in_a_step_ends_the_engine(faulty, monkeypatch):
    monkeypatch.setattr(followers, "STOPPED_S", 0.2)
    core = faulty({"stopped_in_step": 1}, **EP)
    with pytest.raises(EngineDeadError, match=r"rank 1 .* was killed by SIGKILL"):
        drive(core, *bad_among_others())


def test_follower_that_waits_for_ever_in_a_step_is_named_after_the_librarys_setting(faulty):
    """Its process is not stopped: only its step hangs."""
    core = met_soon(lambda limit_s: faulty({"hangs_in_step": 1}, **EP, rank_timeout_s=limit_s))
    with pytest.raises(EngineDeadError, match=r"rank 1 .* does not answer within \d+ s.* rank_timeout_s"):
        drive(core, *bad_among_others())
    core.close(at_once=True)


def test_follower_that_is_killed_while_the_ranks_meet_first_ends_the_build(faulty):
    with pytest.raises(EngineDeadError, match=r"rank 3 .* was killed by SIGKILL"):
        faulty({"killed_in_join": 1}, expert_parallel=4)


@pytest.mark.parametrize(("ranks", "kind"), diagonal((EP, TP), ("open", "copy")), ids=str)
def test_load_that_fails_twice_on_a_follower_is_repeated(faulty, right, ranks, kind):
    core = faulty({kind: 2}, **ranks)
    assert tokens_of(drive(core, *bad_among_others()), "upper", *OTHERS) == right


def test_adapters_that_a_follower_cannot_load_are_unavailable_and_the_base_model_goes_on(faulty, right):
    core = faulty({"copy": ALWAYS}, **EP)
    found = drive(core, *bad_among_others())
    assert found["base"][0] == right["base"]
    for name in NAMES:
        assert found[name][1].finish_reason == "error"
        assert "the disk of this follower is gone" in (found[name][1].error or "")
    assert all(one.residency == "unavailable" for one in infos(core))


def test_follower_that_loads_slowly_changes_no_token(faulty, right):
    core = faulty({"late": 40}, **EP)
    for _ in range(2):
        assert tokens_of(drive(core, *bad_among_others()), "upper", *OTHERS) == right


def test_prompts_while_a_follower_has_some_of_the_layers_have_the_right_tokens(faulty):
    prompts = [tuple(range(3 + number, 27 + number)) for number in range(4)]
    requests = [request(f"r{number}", "reverse", prompt) for number, prompt in enumerate(prompts)]
    core = build_engine(CONFIG)
    right = {name: tokens for name, (tokens, _) in drive(core, *requests).items()}
    core.close()
    core = faulty({"late": ALWAYS}, **EP, host_workers=1)
    drive(core, request("first", "upper"))  # a later adapter has a later slot
    found: dict[str, list[int]] = {}
    for one in requests:
        core.add_request(one)
        for _ in range(3):
            for output in core.step():
                found.setdefault(output.request_id, []).extend(output.token_ids)
    while core.has_work:
        for output in core.step():
            found.setdefault(output.request_id, []).extend(output.token_ids)
    assert found == right
