# SPDX-License-Identifier: Apache-2.0
"""The table of families: names in config.json, imports on choice, errors; and the form of a family's file."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

from moe_lora.core.attention_shapes import LATENT_SITES
from moe_lora.core.errors import ConfigError
from moe_lora.families import FAMILIES, family_named, family_of, model_spec, shape_of
from moe_lora.families.schema.family import of_all_experts
from tests.families import ALL_FAMILIES, tiny_config
from tests.families.wrapped import auto_class

MAX_LINES = 120
CHOSEN = {("q", 0), ("q_a", 0), ("q_b", 0), *(("global_qkv", module) for module in range(3))}
"""Places of attention, of which config.json chooses."""
PAGE = "docs/guides/families.md"
ROOT = Path(__file__).parents[2]


def test_tests_know_every_family() -> None:
    assert set(ALL_FAMILIES) == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_names_are_those_of_transformers(family: str) -> None:
    config = tiny_config(family)
    assert config.model_type.removesuffix("_text") == family
    architecture = auto_class(config)._model_mapping[type(config)].__name__
    assert family_of({"architectures": [architecture]}) is family_of({"model_type": family})


def test_model_type_decides_where_both_are_stated() -> None:
    config = {"model_type": "llama", "architectures": ["MixtralForCausalLM"]}
    assert family_of(config) is family_named("llama")
    assert shape_of({**tiny_config("llama").to_dict(), **config}).family == "llama"


def test_a_config_without_model_type_is_read_by_its_architecture() -> None:
    config = {**tiny_config("qwen3").to_dict(), "model_type": None}
    config["architectures"] = ["Unknown", "Qwen3ForCausalLM"]
    assert model_spec(config) == model_spec(tiny_config("qwen3").to_dict())


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({}, "config.json has no model_type"),
        ({"model_type": None, "architectures": None}, "config.json has no model_type"),
        ({"model_type": "gpt2"}, "model_type='gpt2'"),
        (
            {"model_type": "deepseek_v32"},
            "model_type='deepseek_v32', which has DeepSeek Sparse Attention (DSA)",
        ),
        (
            {"architectures": ["GlmMoeDsaForCausalLM"]},
            "architectures=['GlmMoeDsaForCausalLM'], which has DeepSeek Sparse Attention (DSA)",
        ),
        ({"model_type": ["llama"]}, "model_type=['llama']"),
        ({"model_type": ""}, "model_type=''"),
        ({"model_type": {"llama": 1}}, "model_type={'llama': 1}"),
        ({"model_type": "gpt2", "architectures": ["LlamaForCausalLM"]}, "model_type='gpt2'"),
        ({"architectures": ["BertModel"]}, "architectures=['BertModel']"),
        ({"architectures": []}, "architectures=[]"),
        ({"architectures": {"LlamaForCausalLM": 1}}, "architectures={'LlamaForCausalLM': 1}"),
        ({"architectures": [None]}, "architectures=[None]"),
    ],
)
def test_an_unknown_family_names_the_known_ones_and_the_page(config, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        shape_of(config)
    message = str(caught.value)
    assert named in message
    assert ", ".join(FAMILIES) in message
    assert PAGE in message


@pytest.mark.parametrize("config", [None, [], "llama", 3])
def test_a_config_that_is_no_object_is_refused(config) -> None:
    with pytest.raises(ConfigError, match="must be a JSON object"):
        model_spec(config)


def test_only_the_chosen_family_is_imported_and_no_torch() -> None:
    program = (
        "import json, sys; from moe_lora.families import model_spec; "
        f"model_spec(json.loads({json.dumps(json.dumps(tiny_config('dbrx').to_dict()))})); "
        "print([one for one in sys.modules if one.startswith('moe_lora.families.')], 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    names, _, has_torch = done.stdout.strip().rpartition(" ")
    assert has_torch == "False"
    families = {name.rpartition(".")[2] for name in ast.literal_eval(names)} & set(FAMILIES)
    assert families == {"dbrx"}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_a_short_file_of_data(family: str) -> None:
    module = importlib.import_module(f"moe_lora.families.{family}")
    source = inspect.getsource(module)
    assert len(source.splitlines()) <= MAX_LINES
    tree = ast.parse(source)
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    allowed = {"__future__", "collections.abc", "dataclasses", "typing"}
    assert all(name in allowed or name.startswith("schema") for name in imported)
    assert not [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ClassDef))]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_site_has_places_in_files(family: str) -> None:
    shape, described = shape_of(tiny_config(family).to_dict()), family_named(family)
    wanted = {(site.name, module) for site in shape.sites for module in range(len(site.modules))}
    for form in (*described.mlp, described.adapted):
        places = of_all_experts((*described.attention, *described.beside, *form), shape.num_experts)
        found = {
            (site, module)
            for place in places
            for site in (LATENT_SITES if place.form == "heads" else (place.site,))
            for module in place.modules
        }
        assert found - wanted <= CHOSEN
        assert wanted <= found
    assert any(all(place.form == "matrix" for place in form) for form in described.mlp)


def test_the_page_shows_a_family_s_file_as_it_is() -> None:
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    source = (ROOT / "moe_lora/families/qwen3.py").read_text(encoding="utf-8")
    assert f"```python\n{source}```" in page
    assert all(f"`{name}`" in page for name in FAMILIES)
