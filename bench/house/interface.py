# SPDX-License-Identifier: Apache-2.0
"""Names for users and developers: options, settings, control verbs."""

from __future__ import annotations

import ast
from dataclasses import is_dataclass
from typing import Any

from .sources import FUNCTIONS, FunctionNode, Source

_METHODS = ("get", "post", "put", "delete", "patch")
CONTROL_VERB = "pin_adapter"
"""A verb on its way from an HTTP route to the engine."""
LIBRARY = "LLM"
"""The class of the library's own calls; its file is on no way from a route to the engine."""


def options() -> list[str]:
    """Declared options of `moe-lora serve`, hidden options among them.

    A second name of an option, such as vLLM's name, does not count.
    """
    import click

    from moe_lora.cli.serve import serve

    return [max(one.opts, key=len) for one in serve.params if isinstance(one, click.Option)]


def settings() -> list[str]:
    """Leaves of the cluster file: top-level keys without sections, and settings of each section.

    Parameters of a named policy (`Rule.policy`) do not count.
    """
    from moe_lora.config.cluster import NAMES, SECTIONS
    from moe_lora.config.front_end import FrontEndPlace

    sections = {**SECTIONS, "front_ends": FrontEndPlace}
    found = [name for name in NAMES if name not in sections]
    return found + [leaf for name, kind in sections.items() for leaf in _leaves(name, kind)]


def _leaves(section: str, kind: Any) -> list[str]:
    from moe_lora.config.settings import settings_of

    found = []
    for name, one in settings_of(kind).items():
        inner = [each for each in one.kinds if isinstance(each, type) and is_dataclass(each)]
        if one.rule.in_file and not one.rule.policy:
            place = f"{section}.{name}"
            found += _leaves(place, inner[0]) if inner else [place]
    return found


def control_verb_files(package: dict[str, Source]) -> list[str]:
    """Files with the control verb on its way from an HTTP route to the engine.

    A file counts if it defines a function of the verb's name, has the name as a key of a table, or names the
    verb in a route.  Neither the library's own call nor a caller elsewhere counts.
    """
    found = sorted(one.path for one in package.values() if _passes_on(one))
    if not found:
        raise ValueError(f"no file passes {CONTROL_VERB!r} on; state another CONTROL_VERB in {__name__}")
    return found


def _passes_on(source: Source) -> bool:
    if CONTROL_VERB not in source.text or any(_is_library(node) for node in source.tree.body):
        return False
    tables = (node for node in source.nodes if isinstance(node, ast.Dict))
    functions = (node for node in source.nodes if isinstance(node, FUNCTIONS))
    return any(any(map(_is_verb, table.keys)) for table in tables) or any(
        one.name == CONTROL_VERB or (_is_route(one) and any(map(_is_verb, ast.walk(one))))
        for one in functions
    )


def _is_library(node: ast.stmt) -> bool:
    return isinstance(node, ast.ClassDef) and node.name == LIBRARY


def _is_verb(node: ast.AST | None) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr == CONTROL_VERB
    return isinstance(node, ast.Constant) and node.value == CONTROL_VERB


def _is_route(function: FunctionNode) -> bool:
    return any(
        isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and one.func.attr in _METHODS
        for one in function.decorator_list
    )
