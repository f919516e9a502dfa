# SPDX-License-Identifier: Apache-2.0
"""Step times, against the way an emulated device passes a layer's sites."""

from types import SimpleNamespace

import pytest

from moe_lora.config.optional_parts import StageTime, StepProfile
from moe_lora.core.errors import ConfigError
from moe_lora.provision.replayed.instance import StepTime, delayed_step_s
from moe_lora.provision.replayed.system_config import InstanceConfig

ATTENTION, EXPERTS = StageTime(fixed_s=5.0, per_row_s=0.5), StageTime(least_s=12.0, per_row_s=1.0)
LORA, TRANSFER = StageTime(fixed_s=3.0, per_row_s=0.25), StageTime(fixed_s=6.0, per_row_s=1.0)


def paced_layer_s(profile, num_rows, remote, has_adapters=True):
    """Due times of `lora.paced.PacedBackend`: gate and up are 2/3 of a layer's experts, down is 1/3."""
    lora_rows = num_rows if has_adapters else 0
    due_s = profile.attention.seconds(num_rows)
    for share in (2 / 3, 1 / 3):
        base_s = share * profile.experts.seconds(num_rows)
        lora_s = share * profile.lora.seconds(lora_rows)
        arrived_s = due_s + lora_s + share * profile.transfer.seconds(lora_rows)
        if not remote:
            due_s += base_s + lora_s
        elif not lora_rows:
            due_s += base_s
        elif profile.overlap:
            due_s += max(base_s, arrived_s - due_s)
        else:
            due_s = arrived_s + base_s
    return due_s


@pytest.mark.parametrize("num_rows", [0, 1, 8, 40])
@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("has_adapters", [False, True])
def test_a_layer_takes_as_long_as_on_an_emulated_device(num_rows, remote, overlap, has_adapters):
    profile = StepProfile(attention=ATTENTION, experts=EXPERTS, lora=LORA, transfer=TRANSFER, overlap=overlap)
    batch = SimpleNamespace(num_rows=num_rows, num_with_adapter=int(has_adapters))
    found, _ = StepTime(InstanceConfig(profile=profile, num_layers=3), remote=remote).layer_s(batch)
    assert found == pytest.approx(paced_layer_s(profile, num_rows, remote, has_adapters))


def test_nobody_gets_through_a_layer_faster_than_the_server_serves_all():
    step_time = StepTime(InstanceConfig(profile=StepProfile(), num_layers=10), remote=True)
    assert step_time.step_s(2.0, 1.5) == 20.0
    assert step_time.step_s(2.0, 3.5) == 35.0


@pytest.mark.parametrize(
    ("first_s", "last_s", "expected"),
    [
        (-1.0, -1.0, 4.0),  # loaded long ago
        (0.5, 2.0, 4.5),  # loads keep ahead of the step: only the first layer is waited for
        (2.0, 8.0, 9.0),  # they don't: the last layer is computed once it is there
        (8.0, 8.0, 12.0),  # nothing is ready before all is
    ],
)
def test_a_step_waits_for_the_layers_being_loaded(first_s, last_s, expected):
    assert delayed_step_s(4.0, 4, first_s, last_s) == expected


def test_a_model_without_layers_is_refused():
    with pytest.raises(ConfigError, match="num_layers=0"):
        InstanceConfig(profile=StepProfile(), num_layers=0)
