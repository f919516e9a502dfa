# SPDX-License-Identifier: Apache-2.0
"""What routers know of host workers, from the settings and the performance model's file."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from moe_lora.config import FrontEndConfig
from moe_lora.config.optional_parts import EmulationConfig, LoraServerConfig
from moe_lora.core.clock import WallClock
from moe_lora.core.errors import ConfigError
from moe_lora.dist.cluster.controller.routes import make_routes
from moe_lora.dist.cluster.instances import InstanceRegistry
from moe_lora.dist.cluster.prefill_first import PrefillFirstClient
from moe_lora.dist.host_workers.profile import host_section
from moe_lora.policies.routing.model_routing import RankAware, ShortestPendingTime
from moe_lora.timing.answer_lengths import FIRST_TOKENS
from moe_lora.timing.host_times import HostTimes, PartTime
from moe_lora.timing.step_model import StepModel
from tests.dist.cluster.fleet_parts import cluster_config
from tests.policies.routing_parts import Instance, Request

TIMES = HostTimes(
    worker={"q+k+v": PartTime(per_token_s=0.1)},
    device=PartTime(fixed_s=0.1),
    num_layers=2,
    load_fixed_s=0.0,
    load_bytes_per_s=100.0,
    bytes_per_rank=1.0,
    max_tokens=512,
    max_rank=128,
)
"""c = 1: a token takes a worker as long as a layer takes the device.  1.28 s to load rank 128."""
STEPS = StepModel(kernel="sgmv", form="full", expert_share=1.0, decode_s={"step": 0.01}, prefill_s={})
FOUR = Request("large", prompt_tokens=4)


def profile(folder: Path, device: str | None = "a GPU", name: str = "steps.json") -> str:
    """device: None: without times of host workers."""
    content: dict[str, Any] = {"format": "moe-lora performance models", "models": [asdict(STEPS)]}
    if device is not None:
        content["host"] = host_section(TIMES, {"cpu": "one", "device": device}, {}, {}, [])
    (folder / name).write_text(json.dumps(content))
    return str(folder / name)


def start_s(path: str, *, lora_server: LoraServerConfig | None = None, **engine: Any) -> float:
    """What a prompt of 4 tokens waits for on an idle instance without its adapter."""
    front_end = FrontEndConfig(routing="shortest_pending_time", performance_model=path)
    routes = make_routes(replace(cluster_config(front_end, **engine), lora_server=lora_server))
    routes.ranks["large"] = 128
    there = Instance(0)
    there.load.recent["large"] = None
    router = cast(ShortestPendingTime, routes.router)
    assert router.pending_s(FOUR, [there])[0] == 0
    return float(router.pending_s(FOUR, [Instance(1)])[0])


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ({}, 0.0),
        ({"host_workers": 1}, 2 * 0.4 - 2 * 0.1),
        ({"host_workers": 3}, 2 * 0.2 - 2 * 0.1),
        ({"host_workers": 4}, 0.0),
        ({"host_workers": 1, "max_num_batched_tokens": 2, "max_num_seqs": 1}, 2 * 0.2 - 2 * 0.1),
        ({"host_workers": 1, "emulation": EmulationConfig(host_slowdown=10.0)}, 1.28),
        ({"host_workers": "auto", "host_cores": (0, 1, 2)}, 2 * 0.2 - 2 * 0.1),
        ({"host_workers": "auto", "host_cores": (0, 1, 2), "device": "cpu"}, 0.0),
        ({"host_workers": 1, "lora_server": LoraServerConfig()}, 0.0),
    ],
)
def test_workers_of_the_settings_compute_as_the_profile_says(engine, expected, tmp_path):
    """4 tokens are as many pieces, which workers take in turn; with 4 of them the host costs nothing."""
    assert start_s(profile(tmp_path), **engine) == pytest.approx(expected)


def test_auto_is_none_where_the_file_is_of_a_cpu_device_or_has_no_times(tmp_path):
    auto = {"host_workers": "auto", "host_cores": (0, 1, 2)}
    assert start_s(profile(tmp_path, "cpu"), **auto) == 0
    assert start_s(profile(tmp_path, None), **auto) == 0


def test_times_are_those_of_the_file_that_engines_take(tmp_path):
    path, own = profile(tmp_path, None), profile(tmp_path, name="own.json")
    assert start_s(path, host_workers=1, performance_model=own) == pytest.approx(0.6)
    with pytest.raises(ConfigError, match="has no times of host workers; write it with"):
        start_s(path, host_workers=1)


def test_rank_aware_routing_counts_the_start_too(tmp_path):
    front_end = FrontEndConfig(routing="rank_aware", performance_model=profile(tmp_path))
    costs = []
    for number in (0, 1):
        routes = make_routes(cluster_config(front_end, host_workers=number))
        routes.ranks["large"] = 128
        costs.append(cast(RankAware, routes.router).cost_s(FOUR, Instance(0).run(None)))
    assert costs[1] - costs[0] == pytest.approx(0.6 / FIRST_TOKENS)


def test_the_settings_of_rank_aware_reach_the_router(tmp_path):
    settings = {"slo_tpot_s": 0.5, "mean_output_tokens": 30.0, "rank_aware_cost": "all"}
    front_end = FrontEndConfig(routing="rank_aware", performance_model=profile(tmp_path), **settings)
    router = cast(RankAware, make_routes(cluster_config(front_end)).router)
    assert (router._model.slo_tpot_s, router._model.cost) == (0.5, "all")
    assert router.mean_output_tokens == 30.0


def test_instances_for_prompts_have_slots_beside_a_lora_server(tmp_path):
    front_end = FrontEndConfig(
        routing="shortest_pending_time",
        performance_model=profile(tmp_path),
        prefill_instances=("instance-0", "instance-1"),
    )
    config = replace(cluster_config(front_end, num_instances=4, max_loras=2), lora_server=LoraServerConfig())
    registry = InstanceRegistry([])
    here = [registry.enter(f"instance-{number}", cast(Any, None)) for number in (0, 2)]
    client = PrefillFirstClient(registry, make_routes(config), WallClock(), cast(Any, None))
    assert [one.load.has_slots for one in here] == [True, False]
    for number in (1, 3):
        registry.enter(f"instance-{number}", cast(Any, None))
    begun = {"prompt": SimpleNamespace(is_begun=False), "answer": SimpleNamespace(is_begun=True)}
    client._running.update(cast(Any, begun))
    # The first of each kind has two adapters and little work, the second a long prompt.
    instances = sorted(registry.instances, key=lambda one: one.name)
    for index, one in enumerate(instances):
        one.index = index
        for adapter, prompt_tokens in ((None, 900),) if index % 2 else (("a", 1), ("b", 1)):
            one.load.add(adapter, prompt_tokens)
    for request_id, chosen in (("prompt", 1), ("answer", 2)):
        request = SimpleNamespace(request_id=request_id, adapter="large", prompt_tokens=4)
        assert client._router.choose(cast(Any, request), instances).index == chosen
