"""A cluster's settings as the text of its file."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import Any

import yaml

from .cluster import NOT_IN_ENGINE, ClusterConfig


def cluster_text(cluster: ClusterConfig) -> str:
    """What `read_cluster` reads as the same settings from anywhere on this host."""
    content = {
        "model_dir": os.path.abspath(cluster.engine.model_dir),
        "served_model_name": cluster.served_model_name,
        "adapters": {name: os.path.abspath(path) for name, path in cluster.engine.adapters},
        "certificates": None if cluster.certificates is None else os.path.abspath(cluster.certificates),
        "engine": _given(cluster.engine, NOT_IN_ENGINE),
        "lora_server": None if cluster.lora_server is None else _plain(dict(cluster.lora_server)),
        "front_end": _given(cluster.front_end),
        "front_ends": {name: _given(place) for name, place in cluster.front_ends.items()},
        "controller": None if cluster.controller is None else _given(cluster.controller),
        "pool": None if cluster.engine.pool is None else _given(cluster.engine.pool),
        "provision": None if cluster.provision is None else _given(cluster.provision),
        "registry": None if cluster.registry is None else _given(cluster.registry),
    }
    written = {name: value for name, value in content.items() if value is not None}
    return yaml.safe_dump(written, sort_keys=False)


def _given(settings: Any, left_out: tuple[str, ...] = ()) -> dict[str, Any]:
    """The fields of a dataclass."""
    names = (one.name for one in fields(settings) if one.name not in left_out)
    return _plain({name: getattr(settings, name) for name in names})


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: _value(name, value) for name, value in settings.items() if value is not None}


def _value(name: str, value: Any) -> Any:
    if name in _PATHS:
        return os.path.abspath(value)
    return list(value) if isinstance(value, tuple) else value


_PATHS = ("operating_points", "performance_model", "store_dir", "folder", "state_dir", "contents_dir")
