# SPDX-License-Identifier: Apache-2.0
"""The files of a checkout as text and syntax trees: code lines, imports, public names."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

import networkx

PACKAGE = ("moe_lora", "cli")
PARTS = (*PACKAGE, "bench", "demo")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
_NO_CODE = {
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


_LEAVES = {"ctx", "op", "ops", "id", "attr", "name", "kind", "type_comment"}
"""Fields of syntax nodes without nodes below, contexts and operators among them."""


@cache
def _inner_fields(fields: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in fields if name not in _LEAVES)


def children(node: ast.AST) -> list[ast.AST]:
    """The nodes right below, without contexts and operators."""
    found: list[ast.AST] = []
    for name in _inner_fields(node._fields):
        value = getattr(node, name, None)
        if value.__class__ is list:
            found += [one for one in value if isinstance(one, ast.AST)]
        elif isinstance(value, ast.AST):
            found.append(value)
    return found


def walk(node: ast.AST) -> list[ast.AST]:
    """The node and all nodes below, as `ast.walk` in a third of the time, without contexts and operators."""
    found = [node]
    for one in found:
        found += children(one)
    return found


@dataclass(frozen=True)
class Source:
    """A file of a checkout: its path below the tree, its module, its text and syntax tree."""

    path: str
    module: str
    text: str
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        return self.path.endswith("__init__.py")

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree."""
        return walk(self.tree)

    @cached_property
    def names_of_modules(self) -> list[ast.AST]:
        """Nodes that can name a module: imports and constants."""
        return [node for node in self.nodes if isinstance(node, (ast.Import, ast.ImportFrom, ast.Constant))]

    @cached_property
    def lines_and_comments(self) -> tuple[frozenset[int], tuple[str, ...]]:
        """Numbers of the lines with a token of code, and the comments with their `#`."""
        lines, comments = set[int](), list[str]()
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type == tokenize.COMMENT:
                comments.append(token.string)
            elif token.type not in _NO_CODE:
                lines.update(range(token.start[0], token.end[0] + 1))
        return frozenset(lines), tuple(comments)

    @cached_property
    def functions(self) -> list[tuple[str, FunctionNode]]:
        """Qualified name and node of each function, nested functions and methods among them."""
        return list(_functions_below(self.tree, ""))


def read_sources(tree: Path, parts: Iterable[str] = PARTS) -> dict[str, Source]:
    """The files of the parts by module name; `cli` is the package moe_lora.cli."""
    found = {}
    for part in parts:
        for path in sorted((tree / part).rglob("*.py")):
            relative = path.relative_to(tree)
            words = relative.with_suffix("").parts
            words = words[:-1] if words[-1] == "__init__" else words
            module = ".".join(("moe_lora", *words) if part == "cli" else words)
            text = path.read_text(encoding="utf-8")
            found[module] = Source(str(relative), module, text, ast.parse(text))
    return found


def code_lines(source: Source) -> int:
    """Lines with code: no blank lines, comments, docstrings, imports."""
    lines = set(source.lines_and_comments[0])
    for node in source.nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)) or is_text(node):
            assert isinstance(node, ast.stmt)
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    given = source.text.splitlines()
    return sum(1 for number in lines if given[number - 1].strip())


def is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _functions_below(node: ast.AST, prefix: str) -> Iterator[tuple[str, FunctionNode]]:
    for inner in children(node):
        if isinstance(inner, (*FUNCTIONS, ast.ClassDef)):
            if isinstance(inner, FUNCTIONS):
                yield f"{prefix}{inner.name}", inner
            yield from _functions_below(inner, f"{prefix}{inner.name}.")
        elif not isinstance(inner, ast.expr):
            yield from _functions_below(inner, prefix)


def imported(source: Source, modules: dict[str, Source], *, deferred: bool) -> set[str]:
    """Modules of the checkout that a file imports; without deferred ones only what its import runs."""
    nodes = source.names_of_modules if deferred else _run_on_import(source.tree.body)
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found.update(_longest(name.name, modules) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = origin_of(source, node)
            for name in node.names:
                inner = f"{origin}.{name.name}"
                found.add(inner if inner in modules else _longest(origin, modules))
        elif deferred and source.is_package and isinstance(node, ast.Constant) and node.value in modules:
            found.add(node.value)
    return found - {"", source.module}


def _run_on_import(body: Iterable[ast.stmt]) -> Iterator[ast.AST]:
    for node in body:
        if isinstance(node, ast.If) and _for_types(node):
            yield from _run_on_import(node.orelse)
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            yield from _run_on_import(one for one in children(node) if isinstance(one, ast.stmt))
        elif not isinstance(node, FUNCTIONS):
            yield node


def origin_of(source: Source, node: ast.ImportFrom) -> str:
    """The module of a `from` statement, without dots at its start."""
    words = source.module.split(".")
    if not node.level:
        return node.module or ""
    base = words[: len(words) - node.level + (1 if source.is_package else 0)]
    return ".".join([*base, node.module] if node.module else base)


def _longest(name: str, modules: dict[str, Source]) -> str:
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name


def reached(package: dict[str, Source], roots: Iterable[str]) -> set[str]:
    """Modules behind the imports of the roots, at any distance and at any depth of a file.

    A module's full name in a string counts as an import.  A file with a call of `import_module` gives meaning
    to more strings: strings in its folder, and first arguments in its importers, count if they begin with the
    name of a module of the folder.  An import for type checking alone does not count.
    """
    importing = {name for name, one in package.items() if "import_module(" in one.text}
    edges = {name: _reaches(one, package, importing) for name, one in package.items()}
    found: set[str] = set()
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            parent = _longest(name.rpartition(".")[0], package)
            waiting += edges[name] | ({parent} if parent else set())
    return found


def _folder(source: Source) -> str:
    return source.module if source.is_package else source.module.rpartition(".")[0]


def _reaches(source: Source, package: dict[str, Source], importing: set[str]) -> set[str]:
    kept = [node for node in source.tree.body if not _for_types(node)]
    runs = source if len(kept) == len(source.tree.body) else replace(source, tree=ast.Module(kept, []))
    found = imported(runs, package, deferred=True)
    folders = {_folder(package[name]) for name in importing}
    texts = {text for node in runs.nodes if (text := _string(node))}
    strings = {(_folder(source), text) for text in texts if _folder(source) in folders}
    for name in found & importing:
        calls = (node for node in runs.nodes if isinstance(node, ast.Call))
        strings |= {(_folder(package[name]), text) for call in calls for text in map(_string, call.args[:1])}
    paths = {f"{folder}.{text.lstrip('.').replace('-', '_')}" for folder, text in strings}
    named = {module for path in paths if (module := _longest(path, package)) not in folders}
    return found | named - {""} | (texts & package.keys())


def _string(node: ast.AST) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _for_types(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Largest sets of more than one node that reach each other, sorted."""
    graph = networkx.DiGraph([(node, target) for node, targets in edges.items() for target in targets])
    return sorted(sorted(group) for group in networkx.strongly_connected_components(graph) if len(group) > 1)


def public_names(source: Source) -> Iterator[tuple[str, bool]]:
    """("class" | "function" | "method", whether it has a docstring) of everything public in a file."""
    if any(word.startswith("_") for word in source.module.split(".")):
        return
    for node in source.tree.body:
        if isinstance(node, FUNCTIONS) and not node.name.startswith("_"):
            yield "function", ast.get_docstring(node) is not None
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield "class", ast.get_docstring(node) is not None
            for inner in node.body:
                if isinstance(inner, FUNCTIONS) and not inner.name.startswith("_"):
                    yield "method", ast.get_docstring(inner) is not None
