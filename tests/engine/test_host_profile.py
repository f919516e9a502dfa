# SPDX-License-Identifier: Apache-2.0
"""Prompts begin on host workers or wait, by a profile of the machine; what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_lora.config import EngineConfig
from moe_lora.config.cluster import cluster_of
from moe_lora.config.optional_parts import EmulationConfig, StageTime, StepProfile
from moe_lora.core.errors import ConfigError
from moe_lora.core.wrong_files import read_config
from moe_lora.dist.host_workers.profile import emulated, host_section, read_host_times
from moe_lora.engine.adapters import copies
from moe_lora.engine.ranks.host_settings import HostSettings, host_settings, machine_of, model_of
from moe_lora.families import shape_of
from moe_lora.policies.admission.host_start import HostStart, enough_workers
from moe_lora.timing.host_times import HostTimes, PartTime
from tests.families import NUM_LAYERS
from tests.models.conftest import served  # noqa: F401  (the fixture)

from .test_host_assisted import SLOW, ask, expected_of, start

CPU = torch.device("cpu")


def host_times(worker_s: float, **other) -> HostTimes:
    """A worker that takes so long for each token of a layer, and a device that takes 1 ms for any layer."""
    given = {
        "worker": {"q+k+v": PartTime(per_token_s=worker_s), "gate+up": PartTime(per_token_s=worker_s)},
        "device": PartTime(fixed_s=0.001),
        "num_layers": NUM_LAYERS,
        "load_fixed_s": 0.0,
        "load_bytes_per_s": 2e5,
        "bytes_per_rank": 1e4,
        "max_tokens": 64,
        "max_rank": 16,
    }
    return HostTimes(**(given | other))


def write_profile(path: Path, model_dir: str, times: HostTimes, **changed) -> str:
    model = model_of(shape_of(read_config(Path(model_dir))), torch.float32)
    section = host_section(times, machine_of(CPU), model, {}, [])
    path.write_text(json.dumps({"format": "any", "host": section | changed}))
    return str(path)


@pytest.mark.parametrize(("worker_s", "waits"), [(1e-9, False), (1000.0, True)])
def test_prompts_begin_on_the_host_where_that_is_quicker(worker_s, waits, served, tmp_path):  # noqa: F811
    """Loads take about a second; the profile says a worker needs nothing, or 1000 s a token."""
    model = served("mixtral")
    path = write_profile(tmp_path / "steps.json", model.model_dir, host_times(worker_s))
    with start(model, performance_model=path, host_tokens_per_worker=None, **SLOW) as llm:
        answered = ask(llm, model)
        assert answered == expected_of(model, answered)
        stats = llm.stats()
    assert stats.adapter_misses > 0
    assert (stats.lora_rows_host == 0) is waits
    assert stats.host_fallback_rows == 0


def test_layers_are_loaded_in_the_order_that_the_profile_asks_for(served, tmp_path, monkeypatch):  # noqa: F811
    """Workers that are as quick as the device compute every layer of a slow load: the first comes first."""
    model, order = served("mixtral"), []
    point_layer = copies.point_layer

    def noted(slots, slot, number, *place):
        order.append(number)
        point_layer(slots, slot, number, *place)

    monkeypatch.setattr(copies, "point_layer", noted)
    orders = {}
    for name, worker_s, load in (("host", 1e-9, 2e-4), ("device", 1e-9, 1e4)):
        path = write_profile(
            tmp_path / f"{name}.json", model.model_dir, host_times(worker_s, load_bytes_per_s=1e15)
        )
        order.clear()
        emulation = EmulationConfig(load_gb_per_s=load)
        with start(model, performance_model=path, emulation=emulation) as llm:
            answered = ask(llm, model)
            assert answered == expected_of(model, answered)
        orders[name] = order[:NUM_LAYERS]
    assert orders["host"] == [0, 1], "all layers are the first group"
    assert orders["device"] == [1, 0], "only the first layer is"


def facts(model_dir: str, device: str = "cuda") -> dict[str, Any]:
    shape = shape_of(read_config(Path(model_dir)))
    sites = [site.name for site in shape.sites]
    return {"device": torch.device(device), "shape": shape, "dtype": torch.float32, "local_sites": sites}


def test_auto_is_none_on_a_cpu_device(served):  # noqa: F811
    model = served("mixtral")
    with start(model, host_workers="auto", host_tokens_per_worker=None, **SLOW) as llm:
        answered = ask(llm, model)
        assert answered == expected_of(model, answered)
        assert llm.stats().lora_rows_host == 0


def test_auto_asks_for_as_many_as_a_step_needs(served, tmp_path, monkeypatch):  # noqa: F811
    """c is 5: a token of a worker takes 0.2 ms at two sites each, the device's layer 2 ms."""
    model = served("mixtral")
    times = host_times(2e-4, device=PartTime(fixed_s=0.002))
    path = write_profile(tmp_path / "steps.json", model.model_dir, times)
    monkeypatch.setattr("moe_lora.engine.ranks.host_settings.machine_of", lambda device: machine_of(CPU))
    monkeypatch.setattr("moe_lora.dist.host_workers.profile.usable_cores", lambda: 16)
    monkeypatch.setattr("moe_lora.dist.host_workers.workers.usable_cores", lambda: 16)
    rank = facts(model.model_dir)

    def number(**settings) -> int:
        given = {"host_workers": "auto", "max_num_seqs": 4, "max_num_batched_tokens": 32}
        config = EngineConfig(model_dir=model.model_dir, performance_model=path, **(given | settings))
        found = host_settings(config, **rank)
        assert found.num_workers == 0 or found.tokens_per_worker == 5
        assert (found.rule is not None) == (found.num_workers > 0)
        return found.num_workers

    assert number() == 7, "32 tokens in pieces of 5"
    assert number(max_num_batched_tokens=2048) == 15, "the engine keeps a core"
    assert number(max_num_batched_tokens=2048, num_instances=4) == 3, "instances divide the cores"
    assert number(emulation=EmulationConfig(host_slowdown=1e9), host_tokens_per_worker=5) == 0


def test_rows_beside_others_are_those_of_the_budget(served, tmp_path):  # noqa: F811
    """A token takes a worker 0.2 ms at each of two sites, the device 1 ms a layer; there are two."""
    model = served("mixtral")
    path = write_profile(tmp_path / "steps.json", model.model_dir, host_times(2e-4))

    def found(**settings) -> HostSettings:
        given = {"host_workers": 1, "host_tokens_per_worker": 16, "performance_model": path}
        return host_settings(
            EngineConfig(model_dir=model.model_dir, **(given | settings)), **facts(model.model_dir, "cpu")
        )

    assert found().tokens_per_step == 16
    assert found(host_tokens_per_step=5).tokens_per_step == 5
    assert found(host_tpot_budget_ms=3.3).tokens_per_step == 4, "1.6 ms a layer"
    with pytest.raises(ConfigError, match=r"host_tpot_budget_ms=1: .* takes 2; give more than that"):
        found(host_tpot_budget_ms=1.0)
    with pytest.raises(
        ConfigError, match=r"host_tpot_budget_ms=3 needs the times .* or leave the budget out"
    ):
        found(host_tpot_budget_ms=3.0, performance_model=None)
    with pytest.raises(ConfigError, match="say the same thing twice"):
        found(host_tpot_budget_ms=3.0, host_tokens_per_step=5)
    alone = {"tpot_budget_ms": 3.0, "tokens_per_step": 5, "tokens_per_worker": 9, "cores": (0,)}
    for name, value in alone.items():
        with pytest.raises(ConfigError, match=f"host_{name}=.* is for host workers; set host_workers, or"):
            EngineConfig(model_dir=model.model_dir, **{f"host_{name}": value})
    with pytest.raises(ConfigError, match="host_tpot_budget_ms=nan must be positive and finite"):
        found(host_tpot_budget_ms=math.nan)
    with start(model, performance_model=path, host_tpot_budget_ms=3.3, **SLOW) as llm:
        answered = ask(llm, model)
        assert answered == expected_of(model, answered)
        assert llm.stats().lora_rows_host > 0


def test_auto_without_a_profile_is_refused(served):  # noqa: F811
    model_dir = served("mixtral").model_dir
    with pytest.raises(ConfigError, match="performance_model"):
        host_settings(EngineConfig(model_dir=model_dir, host_workers="auto"), **facts(model_dir))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"machine": {"cpu": "another one", "device": "cpu"}}, "another machine: cpu 'another one'"),
        ({"model": {"num_layers": 80}}, "another model: num_layers 80"),
        ({"version": 99}, "host\\.version=99"),
    ],
)
def test_profiles_of_other_machines_models_and_versions_are_refused(changed, said, served, tmp_path):  # noqa: F811
    model = served("mixtral")
    path = write_profile(tmp_path / "steps.json", model.model_dir, host_times(1.0), **changed)
    with pytest.raises(ConfigError, match=said):
        start(model, performance_model=path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("load_bytes_per_s", value) for value in (0.0, -1.0, math.nan, math.inf, 1e308, 1e-308)),
        *(("load_fixed_s", value) for value in (-1.0, math.nan, math.inf, 1e308)),
        ("bytes_per_rank", 1e308),
        ("num_layers", 0),
        ("max_tokens", 10**12),
        ("max_rank", 10**400),
        *(("per_token_s", value) for value in (-1.0, math.nan, math.inf, 1e308)),
    ],
)
def test_profiles_with_numbers_that_can_not_be_are_refused_at_start(name, value, served, tmp_path):  # noqa: F811
    model = served("mixtral")
    path = write_profile(tmp_path / "steps.json", model.model_dir, host_times(1e-4))
    content = json.loads(Path(path).read_text())
    times = content["host"]["times"]
    (times["worker"]["q+k+v"] if name == "per_token_s" else times)[name] = value
    Path(path).write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=rf"steps.json: .*{name}"):
        start(model, performance_model=path)


@given(
    numbers=st.lists(st.sampled_from([0.0, 1e-300, 1e-30, 1e-9, 1.0, 1e9, 1e30]), min_size=7, max_size=7),
    counts=st.tuples(*[st.sampled_from([1, 2, 1 << 20])] * 3),
)
def test_no_profile_that_is_accepted_overflows(numbers, counts):
    """The extremes of what is accepted; largest counts apart, for which loops are long."""
    fixed_s, token_s, rank_s, both_s, device_s, load_s, rate = numbers
    num_layers, max_tokens, max_rank = (min(count, 64) for count in counts)
    part = PartTime(fixed_s=fixed_s, per_token_s=token_s, per_rank_s=rank_s, per_token_rank_s=both_s)
    times = HostTimes(
        worker={"q": part},
        device=PartTime(per_token_s=device_s),
        num_layers=num_layers,
        load_fixed_s=load_s,
        load_bytes_per_s=max(rate, 1e-30),
        bytes_per_rank=max(rate, 1e-30),
        max_tokens=max_tokens,
        max_rank=max_rank,
    )
    c = times.tokens_per_worker(max_rank)
    assert 1 <= c <= max_tokens
    rule = HostStart(times=times, num_workers=2, tokens_per_worker=c)
    adapter = times.adapter(max_rank)
    assert rule.pays_at_once(5, adapter) in (False, True)
    assert 1 <= rule.first_group(5, adapter, 1e9) <= num_layers
    assert enough_workers(times, c, adapter, max_tokens=64, num_cores=4) in range(5)
    assert rule.tokens_per_step(64) == 2 * c


def test_file_without_times_of_host_workers_is_refused(tmp_path):
    path = tmp_path / "steps.json"
    path.write_text('{"format": "moe-lora performance models"}')
    with pytest.raises(ConfigError, match="no times of host workers; write it with"):
        read_host_times(path)


def test_profile_is_read_as_it_was_written(served, tmp_path):  # noqa: F811
    times = host_times(0.5)
    path = write_profile(tmp_path / "steps.json", served("mixtral").model_dir, times)
    assert read_host_times(path) == times


def test_emulated_devices_links_and_workers_replace_what_was_measured():
    profile = StepProfile(prefill=StageTime(fixed_s=0.5, per_row_s=0.25))
    emulation = EmulationConfig(step_profile=profile, load_gb_per_s=1e-5, host_slowdown=3.0)
    times = emulated(host_times(0.5), emulation)
    assert times.device == PartTime(fixed_s=0.5, per_token_s=0.25)
    assert times.load_bytes_per_s == 1e4
    assert times.worker["q+k+v"] == PartTime(per_token_s=1.5)
    assert emulated(host_times(0.5), EmulationConfig()) == host_times(0.5)


def test_instances_divide_the_cores_of_their_host(served, monkeypatch):  # noqa: F811
    model_dir = served("mixtral").model_dir
    usable = [*range(8)]
    monkeypatch.setattr("moe_lora.dist.host_workers.workers.allowed_core_numbers", lambda: usable)
    monkeypatch.setattr("moe_lora.dist.host_workers.workers.usable_cores", lambda: len(usable))
    rank = facts(model_dir, "cpu")

    def cores(dist_rank: int = 0, **settings) -> tuple[int, ...]:
        config = EngineConfig(model_dir=model_dir, **({"host_workers": 2} | settings))
        return host_settings(config, **rank, dist_rank=dist_rank).cores

    two = {"num_instances": 2, "host_cores": (4, 5, 6, 7)}
    assert cores(instance="instance-0", **two) == (4, 5)
    assert cores(instance="instance-1", **two) == (6, 7)
    assert cores(host_cores=(1, 2)) == (1, 2)
    both = two | {"host_workers": 1, "expert_parallel": 2}
    assert cores(1, instance="instance-1", **both) == (7,)
    with pytest.raises(ConfigError, match="let its name end in a number"):
        cores(instance="east", **two)
    with pytest.raises(ConfigError, match="of each of num_instances=2"):
        cores(num_instances=2, host_cores=(4, 5))
    usable[:] = [1, 4, 5]
    assert cores() == ()
    assert cores(host_cores=(4, 1)) == (4, 1)
    with pytest.raises(ConfigError, match="may not use core 2; choose from 1, 4, 5, or give it more cores"):
        cores(host_cores=(4, 2))
    with pytest.raises(ConfigError, match="host_workers=2 for each of 2 ranks"):
        cores(num_instances=2)


def test_engines_take_the_profile_of_the_front_end(tmp_path):
    content = {"model_dir": "m", "front_end": {"performance_model": "steps.json"}}
    assert cluster_of(content, tmp_path).instance().performance_model == str(tmp_path / "steps.json")
    content["engine"] = {"host_workers": "auto"}
    assert cluster_of(content, tmp_path).instance().host_workers == "auto"
    content["engine"] = {"host_workers": "many"}
    with pytest.raises(ConfigError, match="host_workers='many' must be a number, 0 or more, or auto"):
        cluster_of(content, tmp_path)
