# SPDX-License-Identifier: Apache-2.0
"""No code outside moe_lora/families names a family or an architecture."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_lora.cli.vllm_options import _REASONING_PARSERS, _TOOL_PARSERS
from moe_lora.families import _NAMES, FAMILIES
from moe_lora.serve.openai.parsers import TOOL_FORMATS
from moe_lora.serve.openai.parsers.thinking import REASONING_FORMATS

ROOT = Path(__file__).parents[2]
NAMES = {name for names in _NAMES.values() for name in names} | set(FAMILIES)
NAMED = re.compile(rf"(?<![A-Za-z0-9_])(?:{'|'.join(sorted(NAMES))})(?![A-Za-z0-9_])|\w+ForCausalLM")
IDENTIFIER = re.compile(rf"(?:^|_)(?:{'|'.join(sorted(FAMILIES))})(?:_|$)", re.I)
SHIPPED = [
    *(path for path in (ROOT / "moe_lora").rglob("*.py") if "families" not in path.parts[len(ROOT.parts) :]),
    *(ROOT / "cli").rglob("*.py"),
]
OF_FORMATS = ("cli/vllm_options.py", "config/front_end.py", "serve/openai/parsers/")
"""Files that name vLLM's formats of answers: some formats have names of families."""
FORMATS = {*TOOL_FORMATS, *REASONING_FORMATS, *_TOOL_PARSERS, *_REASONING_PARSERS}
MENTIONED = [one.lower() for one in {*NAMES, *FAMILIES, "ForCausalLM"}]
JOINT = re.compile(r"""["']\s*[fr]?["']""")
"""Between two parts of a string."""
BESIDE = [path for part in ("bench", "demo", "examples") for path in (ROOT / part).rglob("*.py")]
"""Programs that write checkpoints, as tests do: a config.json names its family.  They may not compare one."""


def is_mentioned(text: str) -> bool:
    """Whether the text may have a family's name; few texts do, and only these are parsed."""
    lower = JOINT.sub("", text).lower()
    return any(one in lower for one in MENTIONED)


def docstrings(tree: ast.AST) -> set[int]:
    """Ids of strings that stand alone: docstrings and attribute docs."""
    alone = (node.value for node in ast.walk(tree) if isinstance(node, ast.Expr))
    return {id(value) for value in alone if isinstance(value, ast.Constant)}


def strings(tree: ast.AST) -> Iterator[ast.Constant]:
    skipped = docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node


def identifiers(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name", "module"):
            value, line = getattr(node, field, None), getattr(node, "lineno", 0)
            if isinstance(value, str):
                yield from ((part, line) for part in value.split("."))


def compared(tree: ast.AST) -> Iterator[ast.Constant]:
    """Strings of comparisons and of `case` patterns."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Compare, ast.MatchValue)):
            yield from strings(node)


@pytest.mark.parametrize(
    "code",
    [
        'if shape.family == "dbrx": pass',
        'x = f"a {y} mixtral"',
        'match x:\n    case "qwen3_moe": pass',
        'x = {"LlamaForCausalLM": 1}',
        'x = "DeepseekV3ForCausalLM"',
    ],
)
def test_a_name_in_a_string_is_found(code: str) -> None:
    assert [node for node in strings(ast.parse(code)) if NAMED.search(node.value)]


@pytest.mark.parametrize("code", ["def _dbrx_layer(): pass", "x = GPT_OSS_YARN", "import a.mixtral"])
def test_a_name_in_an_identifier_is_found(code: str) -> None:
    assert [name for name, _ in identifiers(ast.parse(code)) if IDENTIFIER.search(name)]


@pytest.mark.parametrize(
    "code", ['"""dbrx."""', 'kind = "llama3"', 'x = "Mixtral-8x7B"', "def llama3(): pass"]
)
def test_docstrings_rope_kinds_and_names_of_models_are_free(code: str) -> None:
    tree = ast.parse(code)
    assert not [node for node in strings(tree) if NAMED.search(node.value)]
    assert not [name for name, _ in identifiers(tree) if IDENTIFIER.search(name)]


def test_no_shipped_file_names_a_family() -> None:
    found = []
    for path in SHIPPED:
        text = path.read_text(encoding="utf-8")
        if not is_mentioned(text):
            continue
        tree = ast.parse(text)
        free = FORMATS if any(one in str(path) for one in OF_FORMATS) else ()
        lines = [one.lineno for one in strings(tree) if one.value not in free and NAMED.search(one.value)]
        lines += [line for name, line in identifiers(tree) if name not in free and IDENTIFIER.search(name)]
        found += [f"{path.relative_to(ROOT)}:{line}" for line in lines]
    assert len(SHIPPED) > 200
    assert found == []


def test_no_bench_compares_a_family() -> None:
    found = []
    for path in BESIDE:
        text = path.read_text(encoding="utf-8")
        if not is_mentioned(text):
            continue
        tree = ast.parse(text)
        found += [
            f"{path.relative_to(ROOT)}:{node.lineno}" for node in compared(tree) if NAMED.search(node.value)
        ]
    assert found == []
