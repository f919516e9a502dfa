# SPDX-License-Identifier: Apache-2.0
"""The calls of verl's SGLang rollout (`AsyncHttpServerAdapter`) in a training step, with our files.

If verl is installed, its own classes make the calls, without Ray and SGLang.
"""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import inspect
import json
import pickle
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from peft import LoraConfig, TaskType
from safetensors.torch import load_file

from moe_lora.integrations.verl import SendsSafetensors
from tests.serve.demo_server import DEMO, demo_server, few_adapters
from tests.serve.test_controls import Http

NAME = "verl_actor_lora_name"
SAMPLING = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}


class Adapter:
    """verl's side: collects the trained weights, and posts what `wrap_lora_params` gives."""

    def __init__(self, http: Http) -> None:
        self._http = http

    def wrap_lora_params(
        self, peft_config: dict[str, Any], weights: Any
    ) -> tuple[dict[str, Any], list[bytes]]:
        return {}, [pickle.dumps(dict(weights))]

    def update_weights(self, folder: Path) -> Any:
        given = json.loads((folder / "adapter_config.json").read_text())
        known = {key: value for key, value in given.items() if key in LoraConfig.__dataclass_fields__}
        config = LoraConfig(**{**known, "task_type": TaskType.CAUSAL_LM}).to_dict()
        weights = load_file(folder / "adapter_model.safetensors").items()
        models = self._http.ok("GET", "/v1/models")["data"]
        if any(one["id"] == NAME for one in models):
            self._http.ok("POST", "/unload_lora_adapter", json={"lora_name": NAME})
        sent, files = self.wrap_lora_params(
            config, ((key, value.to(torch.float32)) for key, value in weights)
        )
        copies = [base64.b64encode(one).decode() for one in files]
        body = {"lora_name": NAME, "config_dict": sent, "serialized_named_tensors": copies}
        return self._http("POST", "/load_lora_adapter_from_tensors", json=body)


class OurAdapter(SendsSafetensors, Adapter):
    pass


def test_a_step_releases_memory_resumes_it_and_serves_the_next_adapter(tmp_path: Path) -> None:
    options = ("--eager", "--dtype", "float32", *few_adapters("upper", "reverse"))
    with demo_server(tmp_path / "log", *options) as server:
        http = Http(server.url)

        def rollout(model: str) -> list[int]:
            body = {"input_ids": [1, 40, 41, 42], "sampling_params": SAMPLING, "lora_path": model}
            found: list[int] = http.ok("POST", "/generate", json=body)["output_ids"]
            return found

        http.ok("GET", "/health_generate")
        http.ok("GET", "/flush_cache")
        expected = {name: rollout(name) for name in ("upper", "reverse")}
        for name in expected:
            http.ok("POST", "/release_memory_occupation", json={"tags": ["kv_cache", "weights"]})
            http.ok("POST", "/resume_memory_occupation", json={"tags": ["weights"]})
            assert OurAdapter(http).update_weights(DEMO / "adapters" / name).json()["success"]
            http.ok("POST", "/resume_memory_occupation", json={"tags": ["kv_cache"]})
            http.ok("GET", "/flush_cache")
            assert rollout(NAME) == expected[name]
        refused = Adapter(http).update_weights(DEMO / "adapters" / "upper")
        assert (refused.status_code, "pickle" in refused.text) == (400, True)


ROLLOUT = "verl.workers.rollout.sglang_rollout"
READ = {ROLLOUT, *(f"{ROLLOUT}.{name}" for name in ("http_server_engine", "sglang_rollout", "utils"))}
"""Modules of verl with its own source; all others, Ray and SGLang are stand-ins."""


def is_stood_in(module: str) -> bool:
    return module.split(".")[0] in ("ray", "sglang", "verl")


class StandIn(ModuleType):
    """A module of which each name is a class with any fields."""

    __path__ = ()

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (SimpleNamespace,), {})


class Finder:
    """Finds the modules of `READ` in verl's folder, and stand-ins for the rest of three packages."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not is_stood_in(name):
            return None
        if name in READ - {ROLLOUT}:
            place = Path(self._folder, *ROLLOUT.split(".")[1:])
            return PathFinder.find_spec(name, [str(place)])
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@pytest.fixture
def verl_classes(monkeypatch) -> Iterator[tuple[type, type]]:
    """verl's `ServerAdapter` and `AsyncHttpServerAdapter`."""
    found = importlib.util.find_spec("verl")
    if found is None or not found.submodule_search_locations:
        pytest.skip("verl is not installed")
    monkeypatch.setattr(sys, "meta_path", [Finder(found.submodule_search_locations[0]), *sys.meta_path])
    rollout = importlib.import_module(f"{ROLLOUT}.sglang_rollout")
    yield rollout.ServerAdapter, rollout.AsyncHttpServerAdapter
    for name in [*filter(is_stood_in, sys.modules)]:
        del sys.modules[name]


def test_verls_own_rollout_syncs_generates_and_sleeps(verl_classes, tmp_path: Path) -> None:
    adapter_class, http_class = verl_classes
    options = ("--eager", "--dtype", "float32", *few_adapters("upper", "reverse"))
    with demo_server(tmp_path / "log", *options) as server:
        place = urlsplit(server.url)
        engine = http_class(host=place.hostname, port=place.port, node_rank=0, launch_server=False)
        ours = type("Ours", (SendsSafetensors, adapter_class), {})
        words = [
            [*inspect.signature(one.wrap_lora_params).parameters] for one in (SendsSafetensors, adapter_class)
        ]
        assert words[0] == words[1]
        asyncio.run(check_steps(made(ours, engine), engine))


def made(kind: type, engine: Any) -> Any:
    """An adapter of one rank; __init__ needs Ray."""
    mesh = SimpleNamespace(get_local_rank=lambda: 0)
    one = kind.__new__(kind)
    about = {"_engine": engine, "_pd_role": None, "sleep_level": 2, "device_mesh": {"infer_tp": mesh}}
    vars(one).update(**about, config=SimpleNamespace(free_cache_engine=True))
    return one


async def check_steps(ours: Any, engine: Any) -> None:
    async def rollout(model: str) -> list[int]:
        words = {"input_ids": [1, 40, 41, 42], "sampling_params": SAMPLING, "lora_path": model}
        found: list[int] = (await engine.async_generate(**words, return_logprob=True))["output_ids"]
        return found

    expected = {name: await rollout(name) for name in ("upper", "reverse")}
    for name in expected:
        folder = DEMO / "adapters" / name
        given = json.loads((folder / "adapter_config.json").read_text())
        weights = load_file(folder / "adapter_model.safetensors")
        await ours.release()
        await ours.resume(["weights"])
        await ours.update_weights(iter(weights.items()), peft_config=given, base_sync_done=True)
        await ours.resume(["kv_cache"])
        assert await rollout(NAME) == expected[name]
    await engine.abort_request(abort_all=True)
