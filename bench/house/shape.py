# SPDX-License-Identifier: Apache-2.0
"""The shape of the code: parameters and lengths of functions, the subjects of a file, public docstrings."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

import networkx

from .sources import (
    FUNCTIONS,
    FunctionNode,
    Source,
    imported,
    origin_of,
    public_names,
    reached,
    walk,
)

LONGEST_FUNCTION, MOST_PARAMETERS = 60, 8
_INTEGRATIONS = tuple(f"moe_lora.integrations.{name}" for name in ("callback", "trl", "verl"))
ROOTS = ("moe_lora", "moe_lora.cli.main", *_INTEGRATIONS)
"""The library's front door, the `moe-lora` command, and what trainers import."""
_SHAPE = re.compile(r"\[(?:[A-Z0-9…][\w+*/ .-]*)(?:, ?[\w+*/ .…-]+)*\]")
"""A shape in a docstring: [T, D], [num_tokens, 4], [S + 1]."""


def long_functions(package: dict[str, Source]) -> list[str]:
    """Functions of more than 60 lines, first to last, decorators apart; outside Triton."""
    return sorted(
        f"{one.path}:{name} ({length})"
        for one in _without_triton(package)
        for name, node in one.functions
        if (length := (node.end_lineno or 0) - node.lineno + 1) > LONGEST_FUNCTION
    )


def _without_triton(package: dict[str, Source]) -> list[Source]:
    return [one for one in package.values() if "/kernels/triton/" not in one.path]


class Parameters:
    """Parameters of functions, `self` among them, as the number of values from a caller.

    `*args` and `**kwargs` count as parameters of the callee if the function passes them on.  An object counts
    as its fields if a single constructor takes the object and only reads fields.
    """

    def __init__(self, package: dict[str, Source]) -> None:
        self._package = package
        self._fields = _fields_of_classes(package)
        self._definitions = _definitions(package)
        self._takers = self._count_takers()

    def above(self, most: int) -> list[str]:
        """Functions outside Triton with more parameters."""
        return sorted(
            f"{one.path}:{name} ({number})"
            for one in _without_triton(self._package)
            for name, node in one.functions
            if (number := self.number_of(name, node)) > most
        )

    def of(self, function: str) -> int:
        """Of the function with this qualified name.  Raises ValueError if there is none."""
        for one in self._package.values():
            for name, node in one.functions:
                if name == function:
                    return self.number_of(name, node)
        raise ValueError(f"no function is named {function!r}; state its new name in bench/house/measures.py")

    def number_of(self, name: str, node: FunctionNode) -> int:
        total = sum(self._weight(name, node, one) for one in _plain(node))
        stars = [one for one in (node.args.vararg, node.args.kwarg) if one is not None]
        return total + (max(len(stars), self._passed_on(node, stars)) if stars else 0)

    def _weight(self, name: str, node: FunctionNode, one: ast.arg) -> int:
        kinds = [kind for kind in _names_in(one.annotation) if kind in self._fields]
        constructor = name.endswith("__init__")
        if constructor and len(kinds) == 1 and self._takers[kinds[0]] == 1 and _only_unpacks(node, one.arg):
            return len(self._fields[kinds[0]])
        return 1

    def _passed_on(self, node: FunctionNode, stars: list[ast.arg]) -> int:
        """The most parameters of a callee to fill by the star-arguments; 0 for a foreign callee."""
        names = {one.arg for one in stars}
        found = [0]
        for call in (inner for inner in walk(node) if isinstance(inner, ast.Call)):
            spread = [one.value for one in call.args if isinstance(one, ast.Starred)]
            spread += [one.value for one in call.keywords if one.arg is None]
            if any(isinstance(one, ast.Name) and one.id in names for one in spread):
                callee = self._definitions.get(_last_name(call.func))
                stated = len(call.args) + len(call.keywords) - len(spread)
                found.append((callee or 0) - stated)
        return max(found)

    def _count_takers(self) -> Counter[str]:
        """Number of functions with a parameter of the class, by class."""
        takers: Counter[str] = Counter()
        for one in self._package.values():
            for _, node in one.functions:
                takers.update({kind for each in _plain(node) for kind in _names_in(each.annotation)})
        return takers


def _plain(node: FunctionNode) -> list[ast.arg]:
    return [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]


def _names_in(annotation: ast.expr | None) -> set[str]:
    if annotation is None:
        return set()
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return set(re.findall(r"\w+", annotation.value))
    names = {node.id for node in walk(annotation) if isinstance(node, ast.Name)}
    return names | {node.attr for node in walk(annotation) if isinstance(node, ast.Attribute)}


def _last_name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _only_unpacks(node: FunctionNode, name: str) -> bool:
    """True if a function reads the parameter only field by field, or spreads the parameter by a star."""
    read: set[ast.expr] = set()
    for inner in walk(node):
        if isinstance(inner, (ast.Attribute, ast.Starred)):
            read.add(inner.value)
    uses = [inner for inner in walk(node) if isinstance(inner, ast.Name) and inner.id == name]
    return bool(uses) and all(use in read for use in uses)


def _fields_of_classes(package: dict[str, Source]) -> dict[str, list[str]]:
    """Fields by class, of dataclasses, named tuples and typed dictionaries."""
    classes = {
        node.name: node for one in package.values() for node in one.nodes if isinstance(node, ast.ClassDef)
    }

    def fields(name: str, seen: tuple[str, ...] = ()) -> list[str]:
        if name not in classes or name in seen:
            return []
        node = classes[name]
        above = [field for base in node.bases for field in fields(_last_name(base), (*seen, name))]
        own = [
            one.target.id
            for one in node.body
            if isinstance(one, ast.AnnAssign)
            and isinstance(one.target, ast.Name)
            and "ClassVar" not in ast.dump(one.annotation)
        ]
        return [*above, *own]

    return {name: found for name in classes if (found := fields(name))}


def _definitions(package: dict[str, Source]) -> dict[str, int]:
    """Number of parameters of functions and constructors whose name is unique, `self` left out."""
    found: dict[str, list[int]] = defaultdict(list)
    for one in package.values():
        for name, node in one.functions:
            owner, _, last = name.rpartition(".")
            plain = [each for each in _plain(node) if each.arg not in ("self", "cls")]
            found[owner.rpartition(".")[2] if last == "__init__" else last].append(len(plain))
    for name, fields in _fields_of_classes(package).items():
        if name not in found:
            found[name].append(len(fields))
    return {name: numbers[0] for name, numbers in found.items() if len(numbers) == 1}


def headings(source: Source) -> list[str]:
    """Comments alone between blank lines, at any depth: the headings of a file's parts."""
    lines = source.text.splitlines()
    comments = [line.lstrip().startswith("#") for line in lines]
    found = []
    for number, line in enumerate(lines):
        if comments[number] and number and not lines[number - 1].strip():
            last = number
            while last < len(lines) and comments[last]:
                last += 1
            if last == len(lines) or not lines[last].strip():
                found.append(f"{source.path}:{number + 1} {line.strip()}")
    return found


def parts(package: dict[str, Source], divided: list[str]) -> int:
    """Files and their headings.  A file of two subjects counts twice, with or without a heading."""
    return sum(max(1 + len(headings(one)), 1 + (one.path in divided)) for one in package.values())


def divided_files(package: dict[str, Source]) -> list[str]:
    """Files with two groups of definitions, without references and common importers between the groups."""
    users: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for one in package.values():
        for module, name in _used_names(one, package):
            users[module][name].add(one.module)
    return sorted(
        one.path
        for one in package.values()
        if not one.is_package and len(_groups(one, users[one.module])) > 1
    )


def _used_names(source: Source, package: dict[str, Source]) -> Iterator[tuple[str, str]]:
    """(module, name) of each definition in a further file of the package, by use in this file."""
    modules: dict[str, str] = {}
    for node in source.nodes:
        if isinstance(node, ast.ImportFrom):
            origin = origin_of(source, node)
            for name in node.names:
                if f"{origin}.{name.name}" in package:
                    modules[name.asname or name.name] = f"{origin}.{name.name}"
                elif origin in package:
                    yield origin, name.name
        elif isinstance(node, ast.Import):
            modules.update({one.asname: one.name for one in node.names if one.asname and one.name in package})
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            yield modules[node.value.id], node.attr


def _groups(source: Source, users: dict[str, set[str]]) -> list[set[str]]:
    """Groups of imported top-level definitions, joined by references and by common importers.

    A group has a class or function; a constant alone is no subject.
    """
    defined: dict[str, ast.stmt] = {name: node for node in source.tree.body for name in _defines(node)}
    graph = networkx.Graph()
    graph.add_nodes_from(("name", name) for name in defined)
    for name, node in defined.items():
        for inner in walk(node):
            if isinstance(inner, ast.Name) and inner.id in defined:
                graph.add_edge(("name", name), ("name", inner.id))
            elif isinstance(inner, ast.Constant) and inner.value in defined:  # a name in quotes
                graph.add_edge(("name", name), ("name", inner.value))
        graph.add_edges_from((("name", name), ("user", user)) for user in users.get(name, ()))
    found = networkx.connected_components(graph)
    large = {("name", node.name) for node in source.tree.body if isinstance(node, (*FUNCTIONS, ast.ClassDef))}
    return [group for group in found if group & large and any(kind == "user" for kind, _ in group)]


def _defines(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        yield node.name
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            yield from (one.id for one in walk(target) if isinstance(one, ast.Name))
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id


def single_importers(package: dict[str, Source]) -> list[str]:
    """Files of moe_lora with a single importer in moe_lora and cli; no `__init__`."""
    importers = Counter(
        target for one in package.values() for target in imported(one, package, deferred=True)
    )
    return sorted(
        one.path
        for one in package.values()
        if importers[one.module] == 1 and not one.is_package and one.path.startswith("moe_lora/")
    )


def unreachable(package: dict[str, Source]) -> list[str]:
    """Files without a path of imports from a command or the library."""
    found = reached(package, [root for root in ROOTS if root in package])
    return sorted(one.path for one in package.values() if one.module not in found)


def fan_out(package: dict[str, Source]) -> tuple[int, str]:
    """The most imports of package files in a single file, and the path of this file."""
    return max((len(imported(one, package, deferred=True)), one.path) for one in package.values())


def documented_names(package: dict[str, Source]) -> int:
    """Public classes, functions and methods with a docstring."""
    return sum(documented for one in package.values() for _, documented in public_names(one))


def shaped_functions(package: dict[str, Source]) -> int:
    """Number of public functions on tensors with a shape in the docstring."""
    return sum(
        _takes_tensor(node) and bool(_SHAPE.search(ast.get_docstring(node) or ""))
        for one in package.values()
        for name, node in one.functions
        if not any(word.startswith("_") for word in [*one.module.split("."), *name.split(".")])
    )


def _takes_tensor(node: FunctionNode) -> bool:
    annotations: Iterable[ast.expr | None] = [*(one.annotation for one in _plain(node)), node.returns]
    return any("Tensor" in _names_in(one) for one in annotations)
