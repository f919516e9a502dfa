# SPDX-License-Identifier: Apache-2.0
"""Settings of the resolver that can't be right are refused by name."""

from __future__ import annotations

import pytest

from moe_lora.config import EngineConfig, FrontEndConfig
from moe_lora.config.cluster import ClusterConfig
from moe_lora.config.optional_parts import SourcesConfig
from moe_lora.core.errors import ConfigError


@pytest.mark.parametrize(
    ("resolver", "front_end", "problem"),
    [
        ("registry", {}, "--registry FOLDER"),
        ("hf:", {}, "give an organisation"),
        ("hf:acme", {}, r"sources.allow=hf://acme/\*"),
        ("/adapters", {"adapter_chat_template": True}, "do not go together"),
    ],
)
def test_a_resolver_that_other_settings_exclude_is_refused(
    resolver: str, front_end: dict[str, bool], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        ClusterConfig(
            engine=EngineConfig(model_dir="base"),
            served_model_name="base",
            front_end=FrontEndConfig(**front_end),
            sources=SourcesConfig(resolver=resolver),
        )
