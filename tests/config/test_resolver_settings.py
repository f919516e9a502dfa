# SPDX-License-Identifier: Apache-2.0
"""Settings of the resolver: wrong ones are refused by name, a folder is found from anywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from moe_lora.config import EngineConfig, FrontEndConfig
from moe_lora.config.cluster import ClusterConfig, cluster_of, cluster_text, read_cluster
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


@pytest.mark.parametrize(
    ("resolver", "found"),
    [
        ("names", "names"),
        ("../names", "../names"),
        ("./registry", "registry"),
        ("registry", None),
        ("hf:acme", None),
        ("/names", None),
    ],
)
def test_a_relative_folder_starts_at_the_files_folder(
    resolver: str, found: str | None, tmp_path: Path
) -> None:
    """found: None: as given."""
    sources = {"resolver": resolver, "allow": ["hf://acme/*"]}
    content = {"model_dir": "base", "registry": {"folder": "stored"}, "sources": sources}
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(content))
    cluster = read_cluster(tmp_path / "cluster.yaml")
    assert cluster.sources is not None
    assert cluster.sources.resolver == (resolver if found is None else str(tmp_path / found))


@pytest.mark.parametrize("resolver", ["names", "registry", "hf:acme"])
def test_processes_of_a_server_read_one_folder(
    resolver: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    content = {
        "model_dir": "base",
        "registry": {"folder": "stored"},
        "sources": {"resolver": resolver, "allow": ["hf://acme/*"]},
    }
    text = cluster_text(cluster_of(content, Path()))
    monkeypatch.chdir("/")
    cluster = cluster_of(yaml.safe_load(text), Path())
    assert cluster.sources is not None
    assert cluster.sources.resolver == (str(tmp_path / "names") if resolver == "names" else resolver)
