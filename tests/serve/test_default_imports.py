# SPDX-License-Identifier: Apache-2.0
"""A default server's front end imports no part that its settings leave off."""

from __future__ import annotations

import subprocess
import sys

from moe_lora.serve.access import Access
from moe_lora.serve.api_keys import add_key
from moe_lora.serve.server import create_app

from .conftest import frontend_of
from .test_access import rights

OFF = (
    "llguidance",
    "moe_lora.adapters.registry",
    "moe_lora.cache",
    "moe_lora.dist.cluster.controller.capacity_controller",
    "moe_lora.dist.cluster.controller.controller_link",
    "moe_lora.dist.cluster.controller.migration_controller",
    "moe_lora.dist.cluster.controller.placement_controller",
    "moe_lora.dist.cluster.migration",
    "moe_lora.dist.cluster.pool",
    "moe_lora.dist.host_workers",
    "moe_lora.dist.lora_server",
    "moe_lora.policies.admission",
    "moe_lora.policies.caching",
    "moe_lora.policies.migration",
    "moe_lora.policies.routing.demand",
    "moe_lora.policies.routing.model_routing",
    "moe_lora.provision",
    "moe_lora.report",
    "moe_lora.serve.admin.controls",
    "moe_lora.serve.admin.received",
    "moe_lora.serve.anthropic",
    "moe_lora.serve.api_keys",
    "moe_lora.serve.batches",
    *(
        f"moe_lora.serve.openai.{name}"
        for name in (
            *("adapter_versions", "beams", "chat_batch", "cohere", "converted", "embedding"),
            *("forwarded_prompt", "invocations", "load_report", "native", "parsers", "prompt_bodies"),
            *("prompt_side", "rendering", "request_metrics", "responses", "routed_experts", "structured"),
            *("tags", "token_ids", "tokenizing"),
        )
    ),
    "moe_lora.serve.reload",
    "moe_lora.sim",
    "moe_lora.timing",
    "moe_lora.workload",
    "scipy",
    "sqlite3",
    "torch",
)
SERVE = """
import sys
import moe_lora.assemble
import moe_lora.serve.frontend, moe_lora.serve.server
from moe_lora.config import ONE_FRONT_END, EngineConfig, FrontEndConfig
from moe_lora.config.cluster import ClusterConfig
from moe_lora.dist.launch.host_roles import HostRoles

cluster = ClusterConfig(
    engine=EngineConfig(model_dir="base"),
    served_model_name="base",
    front_end=FrontEndConfig(engines_address="/nowhere/engines"),
)
with moe_lora.assemble._dialled_fleet(cluster, ONE_FRONT_END):
    print(*sys.modules)
"""


def test_a_default_front_end_imports_no_part_that_is_off():
    found = subprocess.run(
        [sys.executable, "-c", SERVE], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "moe_lora.serve.server" in found
    assert [one for one in found if any(one == off or one.startswith(f"{off}.") for off in OFF)] == []


def test_access_is_checked_where_there_are_keys_or_an_address_of_administrators(engine, tokenizer, tmp_path):
    def checks(**settings: object) -> bool:
        app = create_app(frontend_of(engine, tokenizer, **settings))
        return any(one.cls is Access for one in app.user_middleware)

    keys = tmp_path / "keys.json"
    add_key(keys, rights("one"))
    assert not checks()
    assert checks(admin_address=str(tmp_path / "admin"))
    assert checks(api_keys=str(keys))
