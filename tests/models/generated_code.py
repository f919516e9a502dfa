# SPDX-License-Identifier: Apache-2.0
"""Reads the code that inductor generated for a layer: which operation runs when, on which buffers.  Or runs
the layer's graph without such code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any
from unittest import mock

import torch

from moe_lora.core.shape import ModelShape

_CALL = re.compile(r"^\s+(?:(\w+) = )?torch\.ops\.moe_lora\.(\w+)\.default\((.*)\)$")
_GEMM = re.compile(r"^\s+extern_kernels\.(mm|addmm)\((.*), out=(\w+)\)$")
_ALIAS = re.compile(r"^\s+(\w+) = (?:reinterpret_tensor\()?(\w+)(?:[,;]|$)")
_BUFFER = re.compile(r"\b(?:buf\d+|arg\d+_\d+)\b")
_ALLOCATION = re.compile(r"empty_strided\w*\(\(([^()]*)\)")
_SYMBOL = re.compile(r"\bs\d+\b")


@dataclass(frozen=True)
class Call:
    """One operation: when it runs, what it returns, and the storage of each buffer it is given."""

    position: int
    name: str
    result: str
    operands: tuple[str, ...]
    arguments: str


def operations(code: str) -> list[Call]:
    """Calls of our operations in executed order, with views and renamings followed to the first name."""
    root: dict[str, str] = {}
    calls: list[Call] = []
    for position, line in enumerate(code.splitlines()):
        if call := _CALL.match(line):
            result, name, arguments = call.groups()
            root.pop(result, None)
            operands = tuple(root.get(buffer, buffer) for buffer in _BUFFER.findall(arguments))
            # A name that is used again for other content is another buffer.
            root[result] = f"{result}@{position}"
            calls.append(Call(position, name, root[result], operands, arguments))
        elif gemm := _GEMM.match(line):
            name, arguments, out = gemm.groups()
            operands = [root.get(buffer, buffer) for buffer in _BUFFER.findall(arguments)]
            if name == "addmm":  # the bias comes first
                operands = [*operands[1:], operands[0]]
            result = root[out] = f"{out}@{position}"
            calls.append(Call(position, f"{name}_linear", result, tuple(operands), arguments))
        elif alias := _ALIAS.match(line):
            name, source = alias.groups()
            if _BUFFER.fullmatch(source):
                root[name] = root.get(source, source)
            elif _BUFFER.fullmatch(name):
                root[name] = f"{name}@{position}"
    return calls


def largest_allocation(code: str, rows: int) -> int:
    """Elements of the largest buffer that the code allocates; a symbolic size counts as `rows`."""
    sizes = [_SYMBOL.sub(str(rows), size) for size in _ALLOCATION.findall(code)]
    return max(prod(int(factor) for factor in re.findall(r"\d+", size)) for size in sizes)


_ORDER = (
    *("qkv", "output_gate", "o", "shared_gate_up", "shared_down", "shared_gate", "router", "gate_up", "down"),
    *("dense_gate_up", "dense_down"),
)
"""A layer's sites in the order of their computation."""


def assert_one_operation_a_site(code: str, shape: ModelShape) -> None:
    """Every site of a layer is computed once, in order; KV written once, between the first and the second."""
    calls = [call for call in operations(code) if call.name in ("lora_linear", "paged_attention")]
    names = ["lora_linear", "paged_attention", *["lora_linear"] * (len(calls) - 2)]
    assert [call.name for call in calls] == names
    sites = [int(call.arguments.rsplit(",", 4)[1]) for call in calls if call.name == "lora_linear"]
    found = [shape.sites[number].name for number in sites]
    layers = range(shape.num_layers)
    assert found in [[name for name in _ORDER if shape.has_site(layer, name)] for layer in layers]
    for before, after in pairwise(calls):
        assert before.operands[0] == after.operands[0], "one channel"


def assert_sites_in_order(code: str, num_sites: int) -> None:
    """begin < base GEMM < add_to at every LoRA site, on one x and one y, KV written once."""
    calls = operations(code)
    begins = [call for call in calls if call.name == "lora_begin"]
    assert sorted(map(_site, begins)) == list(range(num_sites))
    assert [call.name for call in calls].count("paged_attention") == 1
    for begin in begins:
        (add,) = [call for call in calls if call.name == "lora_add_to" and _site(call) == _site(begin)]
        (gemm,) = [call for call in calls if call.name.endswith("linear") and call.result == add.operands[1]]
        assert gemm.operands[0] == begin.operands[1], "the base GEMM reads another x than begin"
        assert add.operands[2] == begin.operands[1], "x may be gone when the deltas are added"
        assert begin.position < gemm.position < add.position


def _site(call: Call) -> int:
    return int(call.arguments.rsplit(",", 1)[1])


@contextmanager
def captured_graphs() -> Iterator[list[int]]:
    """Compiled layers run the captured graphs: code generation takes long.  Yields a number a graph."""
    graphs: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(len(inputs))
        return graph

    torch._dynamo.reset()
    with mock.patch("moe_lora.models.compiled_layers.lookup_backend", return_value=backend):
        yield graphs
    torch._dynamo.reset()
