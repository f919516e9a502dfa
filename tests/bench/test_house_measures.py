# SPDX-License-Identifier: Apache-2.0
"""Each measure of the house counts by its definition, on small packages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.house import interface, language, shape
from bench.house.measures import Found, Limits, limits_table
from bench.house.sources import PACKAGE, Source, read_sources


def _package(folder: Path, **files: str) -> dict[str, Source]:
    for name, text in files.items():
        path = folder / "moe_lora" / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return read_sources(folder, PACKAGE)


def _first(package: dict[str, Source]) -> Source:
    return package["moe_lora.a"]


def test_a_function_of_61_lines_is_long_also_inside_a_function(tmp_path: Path) -> None:
    body = "        pass\n"
    text = f"def outer():\n    def inner():\n{body * 59}    def longer():\n{body * 60}"
    found = shape.long_functions(_package(tmp_path, a=text, **{"kernels.triton.b": text}))
    assert found == ["moe_lora/a.py:outer (122)", "moe_lora/a.py:outer.longer (61)"]


def test_star_arguments_count_as_the_parameters_that_they_fill(tmp_path: Path) -> None:
    text = (
        "def plain(a, b, /, c, *, d): ...\n"
        "def passes(first, *rest, **more): plain(first, *rest, **more)\n"
        "def foreign(*rest): print(*rest)\n"
    )
    package = _package(tmp_path, a=text)
    parameters = shape.Parameters(package)
    numbers = {name: parameters.number_of(name, node) for name, node in _first(package).functions}
    assert numbers == {"plain": 4, "passes": 1 + 3, "foreign": 1}


_PARTS = (
    "class Parts(NamedTuple):\n    a: int\n    b: int\n    c: int\n"
    "class Engine:\n    def __init__(self, parts: Parts):\n"
)


@pytest.mark.parametrize(
    ("body", "number"),
    [
        ("        self.a, self.b = parts.a, parts.b\n", 1 + 3),
        ("        self.a, self.b, self.c = (*parts,)\n", 1 + 3),
        ("        self.parts = parts\n", 1 + 1),
        ("        self.a = parts.a\ndef other(parts: Parts): ...\n", 1 + 1),
    ],
)
def test_an_object_that_one_constructor_only_unpacks_counts_as_its_fields(
    body: str, number: int, tmp_path: Path
) -> None:
    assert shape.Parameters(_package(tmp_path, a=_PARTS + body)).of("Engine.__init__") == number


def test_a_renamed_engine_is_an_error_not_a_zero(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no function is named 'EngineCore.__init__'"):
        shape.Parameters(_package(tmp_path, a="")).of("EngineCore.__init__")


def test_comments_alone_between_blank_lines_are_headings_at_any_depth(tmp_path: Path) -> None:
    inner = "class A:\n    x = 1\n\n    # Two\n    # goes on.\n\n    y = 2\n"
    text = f'"""A file."""\n\n# One\n\n{inner}\n# of B\nB = 1\n'
    assert len(shape.headings(_first(_package(tmp_path, a=text)))) == 2


def test_two_subjects_with_importers_of_their_own_count_as_two_files(tmp_path: Path) -> None:
    two = "LIMIT = 1\ndef near(): return LIMIT\ndef far(): ...\nclass Far: ...\n"
    users = {"b": "from .a import near, LIMIT\n", "c": "from moe_lora import a\na.far()\n"}
    package = _package(tmp_path, a=two, **users)
    assert shape.divided_files(package) == ["moe_lora/a.py"]
    assert shape.parts(package, ["moe_lora/a.py"]) == 4


@pytest.mark.parametrize(
    ("definitions", "user"),
    [
        ("def near(): ...\ndef far(): near()\n", ""),
        ("def near(): ...\ndef far(): ...\n", "from .a import near, far\n"),
        ("def near(): ...\ndef _far(): ...\n", ""),
    ],
)
def test_references_and_common_importers_make_one_subject(
    definitions: str, user: str, tmp_path: Path
) -> None:
    files = {"a": definitions, "b": "from .a import near\n", "c": "from .a import far\n", "d": user}
    assert shape.divided_files(_package(tmp_path, **files)) == []


def test_files_are_reached_by_imports_and_names_but_not_for_types_alone(tmp_path: Path) -> None:
    types_alone = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import typed\n"
    make = "def make(name):\n    import importlib\n    importlib.import_module(f'.{name}', __name__)\n"
    files = {
        "__init__": "EXPORTS = {'LLM': 'moe_lora.api'}\n",
        "api": f"{types_alone}from .kinds import make\nmake('second-kind')\n",
        "typed": "",
        "kinds.__init__": make,
        "kinds.second_kind": "TABLE = ('third.function',)\n",
        "kinds.third": "",
        "kinds.nobody": "",
    }
    assert shape.unreachable(_package(tmp_path, **files)) == ["moe_lora/kinds/nobody.py", "moe_lora/typed.py"]


def test_shapes_stand_in_docstrings_of_public_functions_on_tensors(tmp_path: Path) -> None:
    text = (
        'def shown(x: torch.Tensor):\n    """x: [T, D]."""\n'
        'def silent(x: torch.Tensor):\n    """Of x [see above]."""\n'
        'def _inner(x: torch.Tensor):\n    """x: [T, D]."""\n'
        'def number(x: int):\n    """x: [T, D]."""\n'
    )
    package = _package(tmp_path, a=text)
    assert (shape.shaped_functions(package), shape.documented_names(package)) == (1, 3)


def test_sentences_are_literals_of_four_words_with_all_their_parts(tmp_path: Path) -> None:
    text = (
        '"""Module, which says so."""\n'
        "name = 'two words'\n"
        "problem = f'{name} is not known; ' f'give {name}'\n"
        "longer = 'what ' + 'that ' + name + ' one of those'\n"
    )
    source = _first(_package(tmp_path, a=text))
    found = [" ".join(one.split()) for one in language.sentences(source)]
    assert found == ["is not known; give", "what that one of those"]
    prose = language.count_prose([*language.explanations(source), *language.sentences(source)])
    assert (prose.num_words, prose.relative_per_1000, prose.pronouns_per_1000) == (13, 230.8, 230.8)


def test_pages_count_without_code_and_generated_tables() -> None:
    page = (
        "Two words `code`\n```bash\nnot these\n```\n<!-- settings: engine -->\n| a | b |\n<!-- end -->\nend"
    )
    assert language.count_prose([language.page_prose(page)]).num_words == 3


def test_blocks_with_output_count_once_a_test_compares_them(tmp_path: Path) -> None:
    for folder in ("docs", "bench", "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / "bench/README.md").write_text("```console\n$ only a command\n```\n")
    (tmp_path / "README.md").write_text("```console\n$ echo a\na\n```\n```bash\n$ echo b\nb\n```\n")
    assert language.compared_blocks(tmp_path) == 0
    (tmp_path / "tests/test_pages.py").write_text("for one in sessions(ROOT): ...\n")
    assert language.compared_blocks(tmp_path) == 1
    assert [(one.commands, one.output) for one in language.sessions(tmp_path)] == [(("echo a",), "a")]


def test_a_control_verb_is_written_into_routes_tables_and_functions(tmp_path: Path) -> None:
    files = {
        "route": "@router.post('/pin')\nasync def pin(): await client.pin_adapter('a')\n",
        "table": "TABLE = {'pin_adapter': pin}\n",
        "forward": "class Link:\n    async def pin_adapter(self): ...\n",
        "library": "class LLM:\n    def pin_adapter(self): ...\n",
        "user": "core.pin_adapter('a')\n",
    }
    found = interface.control_verb_files(_package(tmp_path, **files))
    assert found == ["moe_lora/forward.py", "moe_lora/route.py", "moe_lora/table.py"]


def test_hidden_options_and_leaves_of_settings_count() -> None:
    assert {"--help-vllm", "--max-loras"} <= set(interface.options())
    assert {"model_dir", "engine.max_loras"} <= set(interface.settings())


def _limits(folder: Path) -> Limits:
    path = folder / "house_limits.json"
    raises = [{"by": 20, "reason": "a sixth family of models"}]
    budgets = {"code_lines": {"limit": 100, "raises": raises}}
    content = {"ratchets": {"fan_out": 20}, "floors": {"documented_names": 7}, "budgets": budgets}
    path.write_text(json.dumps(content))
    return Limits(path)


def test_a_number_past_its_limit_is_named_with_its_places_and_the_way_out(tmp_path: Path) -> None:
    limits = _limits(tmp_path)
    problem = limits.problem("fan_out", Found(21, ["moe_lora/a.py"]))
    assert problem is not None
    for part in ("files that one file imports: 21", "at most 20", "ratchets", "Way out", "moe_lora/a.py"):
        assert part in problem
    assert limits.problem("fan_out", Found(20)) is None
    assert "at least 7" in str(limits.problem("documented_names", Found(6)))
    assert "at most 120" in str(limits.problem("code_lines", Found(121)))
    assert "past the limit" in limits_table({"fan_out": Found(21)}, limits)


def test_better_numbers_become_limits_and_worse_ones_do_not(tmp_path: Path) -> None:
    limits = _limits(tmp_path)
    limits.tighten({"fan_out": Found(18), "documented_names": Found(6), "code_lines": Found(90)})
    again = Limits(tmp_path / "house_limits.json")
    assert [again.of(name) for name in ("fan_out", "documented_names", "code_lines")] == [18, 7, 90]
