# SPDX-License-Identifier: Apache-2.0
"""What users touch, one line an item, held against files: a change of these is seen in a diff.

UPDATE_SNAPSHOTS=1 python -m pytest tests/snapshots     writes the files anew
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from prometheus_client.parser import text_string_to_metric_families

import moe_lora
from moe_lora import LLM, AsyncLLM, Completion, EngineConfig, SamplingParams
from moe_lora.cli.main import main
from moe_lora.cli.vllm_options import VLLM_OPTIONS
from moe_lora.config import FrontEndConfig, FrontEndPlace, LoraServerConfig, cluster
from moe_lora.config.cluster import read_cluster
from moe_lora.config.settings import Settings, settings_of
from moe_lora.core.address import Address
from moe_lora.core.errors import ConfigError
from moe_lora.core.records import ServerState
from moe_lora.core.request import (
    AdapterResidency,
    EngineStats,
    FleetStats,
    InstanceStats,
    ModelInfo,
    RoutingStats,
)
from moe_lora.dist.cluster.controller.cluster_state import Figures
from moe_lora.dist.cluster.controller.controller_link import ControllerLink
from moe_lora.engine.client.messages import Alias, KnownAliases
from moe_lora.serve.metrics import Metrics
from tests.serve.conftest import app_of
from tests.serve.scripted_engine import adapter_info

GOLDEN = Path(__file__).with_name("golden")


def check(name: str, lines: Iterable[str]) -> None:
    """Holds the sorted lines against golden/NAME.txt, or writes that file."""
    path, found = GOLDEN / f"{name}.txt", sorted(set(lines))
    if os.environ.get("UPDATE_SNAPSHOTS"):
        path.write_text("".join(f"{line}\n" for line in found), encoding="utf-8")
    golden = path.read_text(encoding="utf-8").splitlines()
    gone, new = sorted(set(golden) - set(found)), sorted(set(found) - set(golden))
    assert not gone + new, (
        f"{path} differs from what is there; gone: {gone}, new: {new}; if that is wanted: "
        "UPDATE_SNAPSHOTS=1 python -m pytest tests/snapshots"
    )


def _command_lines(name: str, command: click.Command) -> Iterator[str]:
    with click.Context(command, info_name=name) as context:
        if isinstance(command, click.Group):
            for inner in command.list_commands(context):
                found = command.get_command(context, inner)
                assert found is not None
                yield from _command_lines(f"{name} {inner}", found)
    for parameter in command.params:
        info = parameter.to_info_dict()
        title = f"{name} {' '.join([*info['opts'], *info['secondary_opts']])}"
        kind = {key: value for key, value in info["type"].items() if key not in ("choices", "param_type")}
        yield f"{title}: type = {json.dumps(kind, sort_keys=True)}"
        yield from (f"{title}: choice {choice}" for choice in info["type"].get("choices", ()))
        for key in ("required", "nargs", "multiple", "default", "is_flag", "hidden", "envvar", "count"):
            if info.get(key) not in (None, False) and (key, info.get(key)) != ("nargs", 1):
                yield f"{title}: {key} = {info[key]!r}"


def test_options_of_the_commands() -> None:
    check("cli", _command_lines("moe-lora", main))


def test_options_of_vllm() -> None:
    check(
        "vllm_options",
        (
            f"{heading}: {' '.join(one.names)} ({one.takes}): {one.here()}"
            for heading, options in VLLM_OPTIONS.items()
            for one in options
        ),
    )


def _schema_lines(name: str, schema: dict[str, Any]) -> Iterator[str]:
    for key, value in schema.items():
        if key == "properties":
            for inner, one in value.items():
                yield from _schema_lines(f"{name}.{inner}", one)
        elif key == "required":
            yield from (f"{name}.{inner}: required" for inner in value)
        elif key not in ("title", "description"):
            yield f"{name}: {key} = {json.dumps(_untitled(value), sort_keys=True)}"


def _untitled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _untitled(one) for key, one in value.items() if key not in ("title", "description")}
    return [_untitled(one) for one in value] if isinstance(value, list) else value


def test_paths_parameters_and_schemas_of_http(engine, tokenizer) -> None:
    registry: Any = object()
    app = app_of(engine, tokenizer, registry=registry)
    lines = [
        f"route {method} {route.path}"
        for route in app.routes
        for method in sorted(getattr(route, "methods", None) or ())
    ]
    document = app.openapi()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            title = f"{method.upper()} {path}"
            lines.append(title)
            for one in operation.get("parameters", ()):
                need = " required" if one["required"] else ""
                lines += _schema_lines(f"{title}: {one['in']} {one['name']}{need}", one["schema"])
            for kind, body in operation.get("requestBody", {}).get("content", {}).items():
                lines += _schema_lines(f"{title}: body {kind}", body["schema"])
            for status, answer in operation["responses"].items():
                lines.append(f"{title}: answer {status}")
                for kind, body in answer.get("content", {}).items():
                    lines += _schema_lines(f"{title}: answer {status} {kind}", body["schema"])
    for name, schema in document.get("components", {}).get("schemas", {}).items():
        lines += _schema_lines(f"schema {name}", schema)
    check("http", lines)


class _Ones:
    """A state of which every number is 1."""

    def __getattr__(self, name: str) -> int:
        return 1


def test_names_and_labels_of_metrics() -> None:
    counts = {one.name: 1 for one in dataclasses.fields(ServerState)}
    instance = {one.name: 1 for one in dataclasses.fields(InstanceStats) if one.name != "name"}
    numbers = {one.name: 1 for one in dataclasses.fields(EngineStats) if one.name.startswith("num_")}
    routes = SimpleNamespace(meter=None, ranks={})
    link: Any = ControllerLink({"controller": Address(path="/nowhere")}, None, "a", None, routes)  # type: ignore[arg-type]
    link._fence = SimpleNamespace(epoch=1)  # as of one of several controllers
    ones: Any = _Ones()
    link.figures = Figures(num_tables=1, num_copies=1, num_problems=1, quality=ones, outlook=ones)
    front_end = FrontEndConfig(placement="loraserve", operating_points="points.json")
    config = cluster.ClusterConfig(
        engine=EngineConfig(model_dir="base"),
        served_model_name="base",
        lora_server=LoraServerConfig(),
        front_end=front_end,
    )
    metrics = Metrics(config, link)
    metrics.server = ServerState(**{**counts, "ranks": (1,), "unlinked": (0,)})
    metrics.stats = FleetStats(
        **numbers,
        resident_adapters=("a",),
        instances=(InstanceStats(name="a", **instance),),
        routing=RoutingStats(num_choices={"finite": 1, "infinite": 1}, mean_output_tokens=1.0),
    )
    metrics.info = ModelInfo(
        name="base",
        model_dir="base",
        family="llama",
        dtype="float32",
        max_model_len=1,
        vocab_size=1,
        max_loras=1,
        eos_token_ids=(),
    )
    metrics.adapters = [adapter_info("a")]
    metrics.aliases = KnownAliases()
    metrics.aliases |= {"b": Alias("a")}
    for counts in (metrics.by_adapter, metrics.by_tenant):
        assert counts is not None
        counts.add("a", "stop", 1, 1, 0.1)
    metrics.count("stop")
    lines = []
    for family in text_string_to_metric_families(metrics.render().decode()):
        if family.name.endswith("_created"):
            continue
        labels = sorted({name for sample in family.samples for name in sample.labels} - {"le"})
        lines.append(f"{family.name} {family.type} {{{', '.join(labels)}}}")
        lines += [
            f"{family.name} {label}={value}"
            for sample in family.samples
            for label, value in sample.labels.items()
            if label in ("tier", "kind", "direction", "source", "cost")
        ]
    check("metrics", lines)


def test_words_for_where_an_adapter_is() -> None:
    check("residency", typing.get_args(AdapterResidency))


SECTIONS: dict[str, Any] = {**cluster.SECTIONS, "front_ends.NAME": FrontEndPlace}


def _kind(kind: Any) -> str:
    if typing.get_origin(kind) is not None:
        return str(kind)
    return "None" if kind is type(None) else kind.__name__


def _key_lines(section: str, kind: Any) -> Iterator[str]:
    for one in settings_of(kind).values():
        if isinstance(one.default, Settings):
            yield from _key_lines(f"{section}.{one.name}", type(one.default))
        elif one.rule.in_file:
            kinds = " | ".join(_kind(each) for each in one.kinds)
            default = "" if one.default is dataclasses.MISSING else f" = {one.default!r}"
            yield f"{section}.{one.name}: {kinds}{default}"


def _refusal(path: Path, text: str) -> str:
    path.write_text(f"model_dir: model\n{text}")
    with pytest.raises(ConfigError) as caught:
        read_cluster(path)
    return str(caught.value)


def test_keys_of_the_cluster_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    allowed = _refusal(path, "zzz: 1\n").rpartition("allowed are ")[2]
    lines = [f"{name}" for name in allowed.split(", ")]
    for section, kind in SECTIONS.items():
        words = section.replace("NAME", "a").split(".")
        text = "".join(f"{'  ' * depth}{word}:\n" for depth, word in enumerate([*words, "zzz"]))
        allowed = _refusal(path, text).rpartition("allowed are ")[2]
        assert allowed.split(", ") == [one.name for one in settings_of(kind).values() if one.rule.in_file]
        lines += _key_lines(section, kind)
    check("cluster_file", lines)


def _signature_lines(name: str, function: Any) -> Iterator[str]:
    signature = inspect.signature(function)
    yield f"{name} -> {signature.return_annotation}"
    yield from (f"{name}: {one.kind.name.lower()} {one}" for one in signature.parameters.values())


def test_python_names_and_signatures() -> None:
    lines = list(moe_lora.__all__)
    for kind in (LLM, AsyncLLM, Completion, EngineConfig, SamplingParams):
        lines += [f"{line}" for line in _signature_lines(kind.__name__, kind) if " -> " not in line]
        for name, member in inspect.getmembers(kind):
            if name.startswith("_"):
                continue
            if inspect.isfunction(member) or inspect.ismethod(member):
                lines += _signature_lines(f"{kind.__name__}.{name}", member)
            elif isinstance(member, property):
                lines.append(f"{kind.__name__}.{name}: property")
    check("python", lines)
