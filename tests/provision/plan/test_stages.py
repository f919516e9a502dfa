# SPDX-License-Identifier: Apache-2.0
"""Stage times: the table where it was taken, and carried over to other sizes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from moe_lora.config.weight_format import weight_format
from moe_lora.core.errors import ConfigError
from moe_lora.provision.device_profile import read_profile
from moe_lora.provision.plan.memory import KNOWN_MODELS, known_model
from moe_lora.provision.plan.stages import StageTimes
from tests.provision.test_device_profile import CONTENT, changed

from .plans import zipf

MIXTRAL = known_model("Mixtral-8x7B")
ROOFLINE = {
    "name": "roof",
    "kind": "roofline",
    "gpu": CONTENT["gpu"],
    "efficiency": {"memory": 0.7, "flop": 0.8, "net": 0.9},
    "fixed_us": {"receive": 20, "compute": 30, "send": 20, "attention": 80, "sync_per_rank": 5},
}


def times(
    model: str = "Mixtral-8x7B", lora_rank: float | None = None, profile: object = "hopper96"
) -> StageTimes:
    known = known_model(model)
    read = read_profile(profile)  # type: ignore[arg-type]
    return StageTimes(read, known.shape, lora_rank or known.lora_rank, known.instance_gpus, 900.0, zipf())


def written(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(content))
    return path


def test_the_profiled_model_gets_the_tables_own_times() -> None:
    stages = times()
    for ep, listed in CONTENT["server_us"].items():
        for i, batch in enumerate(CONTENT["batches"]):
            found = stages.server(int(ep), batch)
            got = [found.receive_s * 1e6, found.compute_s * 1e6, found.send_s * 1e6]
            assert got == pytest.approx([listed[name][i] for name in ("receive", "compute", "send")])
            assert stages.experts_s(batch) * 1e6 == pytest.approx(CONTENT["base_us"]["experts"][i])


def test_half_the_rank_counts_as_half_the_rows_in_computing_only() -> None:
    whole, half = times(), times(lora_rank=32)
    assert half.server(4, 200).compute_s == pytest.approx(whole.server(4, 100).compute_s)
    assert half.server(4, 200).send_s == pytest.approx(whole.server(4, 200).send_s)


def test_twice_the_instances_nics_carry_twice_the_rows() -> None:
    known = known_model("Mixtral-8x7B")
    wide = StageTimes(read_profile("hopper96"), known.shape, 64, 4, 900.0, zipf())
    assert wide.server(4, 256).receive_s == pytest.approx(times().server(4, 128).receive_s)


def test_degrees_between_listed_ones_lie_between_and_beyond_them_gain_nothing(tmp_path: Path) -> None:
    path = written(tmp_path, changed("server_us.2", None))
    stages = times(profile=path)
    one, two, four = (stages.server(ep, 128).compute_s for ep in (1, 2, 4))
    assert two == pytest.approx((one + four) / 2)
    assert times("Qwen3-30B-A3B").server(64, 128) == times("Qwen3-30B-A3B").server(8, 128)


def test_base_times_of_other_models_follow_weights_and_operations() -> None:
    mixtral, dbrx = times(), times("DBRX")
    ratio = (16 * 6144 * 10752 / 4) / (8 * 4096 * 14336 / 2)  # expert weights of a GPU
    assert dbrx.experts_s(1) / mixtral.experts_stage.seconds(1) == pytest.approx(ratio)


def test_quantised_weights_are_read_at_the_rate_of_unquantised_ones() -> None:
    known, plain = known_model("Mixtral-8x7B"), times()
    int4 = weight_format({}, "int4", 64)
    stages = StageTimes(read_profile("hopper96"), known.shape, 64, known.instance_gpus, 900.0, zipf(), int4)
    assert stages.experts_stage.least_s == pytest.approx(plain.experts_stage.least_s * 4.25 / 16)
    assert stages.experts_stage.per_row_s == plain.experts_stage.per_row_s
    assert stages.experts_s(1) < plain.experts_s(1) / 3
    assert stages.attention_stage.fixed_s < plain.attention_stage.fixed_s
    assert stages.server(4, 64) == plain.server(4, 64)


def test_profile_without_rates_holds_for_its_own_model_only(tmp_path: Path) -> None:
    content = changed("base_us.attention", [100, 150])
    content["taken_at"]["context_tokens"] = 900
    del content["gpu"]["bytes_per_s"], content["gpu"]["flop_per_s"]
    path = written(tmp_path, content)
    assert times(profile=path).attention_s(128) == pytest.approx(100e-6)
    with pytest.raises(ConfigError, match="take one of this model with `moe-lora profile`"):
        times("DBRX", profile=path)
    known, int8 = known_model("Mixtral-8x7B"), weight_format({}, "int8")
    with pytest.raises(ConfigError, match="format of its weights than 'int8', and names no bytes_per_s"):
        StageTimes(read_profile(path), known.shape, 64, known.instance_gpus, 900.0, zipf(), int8)


@pytest.mark.parametrize(("context", "allowed"), [(720, True), (719, False), (None, False)])
def test_tables_of_attention_hold_near_their_context(
    tmp_path: Path, context: int | None, allowed: bool
) -> None:
    content = changed("base_us.attention", [100, 150])
    if context is not None:
        content["taken_at"]["context_tokens"] = context
    path = written(tmp_path, content)
    if allowed:
        assert times(profile=path).attention_s(128) == pytest.approx(100e-6)
        return
    said = f"times of attention over {context or 512} tokens, and the load has 900 on average"
    with pytest.raises(ConfigError, match=f"{said}.*profile again with --context-tokens 900"):
        times(profile=path)


@pytest.mark.parametrize("name", ["num_heads", "num_kv_heads", "head_dim"])
def test_a_model_of_other_heads_is_another_model(tmp_path: Path, name: str) -> None:
    content = changed("base_us.attention", [100, 150])
    content["taken_at"] |= {"context_tokens": 900, name: getattr(MIXTRAL.shape, name)}
    assert times(profile=written(tmp_path, content)).attention_s(128) == pytest.approx(100e-6)
    content["taken_at"][name] *= 2
    assert times(profile=written(tmp_path, content)).attention_s(128) != pytest.approx(100e-6)


@pytest.mark.parametrize("model", [known.name for known in KNOWN_MODELS])
def test_roofline_grows_with_the_batch_and_shrinks_with_ranks(tmp_path: Path, model: str) -> None:
    stages = times(model, profile=written(tmp_path, ROOFLINE))
    batches = [1, 8, 64, 512]
    for ep in (1, 4):
        totals = [stages.server(ep, batch).total_s for batch in batches]
        assert totals == sorted(totals)
    assert stages.server(4, 256).compute_s < stages.server(1, 256).compute_s


def test_roofline_reads_each_distinct_pair_once(tmp_path: Path) -> None:
    one_adapter = np.ones(1)
    known, profile = MIXTRAL, read_profile(written(tmp_path, ROOFLINE))
    stages = StageTimes(profile, known.shape, 64, 2, 900.0, one_adapter)
    pair_bytes = 3 * (4096 + 14336) * 64 * 2
    read_s = stages.server(1, 40).compute_s - 30e-6  # 40 rows choose all 8 experts: 8 pairs, read once
    assert read_s == pytest.approx(8 * pair_bytes / (4e12 * 0.7), rel=1e-3)
