from __future__ import annotations

import pytest

from moe_lora.config import EngineConfig
from moe_lora.core.errors import ConfigError
from moe_lora.dist.launch.host_roles import instance_config, thread_share


@pytest.mark.parametrize(
    ("num_threads", "num_instances", "num_cores", "share"),
    [(None, 1, 8, 8), (None, 3, 8, 2), (None, 4, 2, 1), (1, 4, 2, 1), (2, 4, 8, 2), (1, 4, 8, 1)],
)
def test_cores_are_shared_out(num_threads, num_instances, num_cores, share):
    assert thread_share(num_threads, num_instances, num_cores) == share


@pytest.mark.parametrize(("num_threads", "num_instances", "most"), [(3, 4, 2), (9, 1, 8), (2, 16, 1)])
def test_more_threads_than_cores_are_refused(num_threads, num_instances, most):
    with pytest.raises(ConfigError, match=f"there are 8 cores; choose at most {most}"):
        thread_share(num_threads, num_instances, 8)


def test_seeds_differ_between_instances():
    config = EngineConfig(model_dir="m", num_instances=3, seed=5)
    assert [instance_config(config, index, ()).seed for index in range(3)] == [5, 6, 7]
